"""The models that the commands with measurements run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engines import write_tiny


@pytest.fixture
def pair(tmp_path: Path) -> list[str]:
    """Options: a tiny target, a draft that often agrees with it, and a small cache."""
    folder = tmp_path / "models"
    write_tiny(folder, vocab_size=256, max_context=900)
    models = ["--model", str(folder / "target"), "--draft", str(folder / "similar")]
    return [*models, "--kv-cache-memory", "64MB"]
