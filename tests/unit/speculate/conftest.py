"""The model that speculators of text alone guess for."""

from __future__ import annotations

import pytest

from tests.engines import Tiny, write_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=16, max_context=64)
