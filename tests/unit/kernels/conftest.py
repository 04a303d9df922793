"""The native library of this machine."""

from __future__ import annotations

import pytest

from specinfer.kernels.library import Library
from tests.kernels import kernels


@pytest.fixture(scope="module")
def real() -> Library:
    library = kernels("native").library
    assert library is not None
    return library
