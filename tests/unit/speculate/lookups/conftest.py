"""The library that looks guesses up."""

from __future__ import annotations

import pytest

from specinfer.kernels.library import Library
from tests.kernels import library_or_skip


@pytest.fixture(scope="session")
def library() -> Library:
    return library_or_skip()
