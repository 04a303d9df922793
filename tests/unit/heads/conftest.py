"""The target that heads are written for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"), num_layers=3, tie_embeddings=False)
