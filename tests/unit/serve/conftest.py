"""Shared by tests of the server."""

from __future__ import annotations

import pytest

from specinfer.tokenizer import Tokenizer
from tests.serving import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per byte, and a chat template that shows its messages."""
    return byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
