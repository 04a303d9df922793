"""Models of the engine's tests, and a check of their threads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import Tiny, write_tiny
from tests.kernels import kernels
from tests.tiny_models import write_pair, write_tiny_llama
from tests.unit.engine.offloading import threads, until


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of four layers, which can be streamed."""
    kernels("native")
    return write_tiny_llama(tmp_path / "model", num_layers=4, tokenizer=True)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a target and a draft."""
    return write_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=64, max_context=96)


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Checks that threads that read weights or run passes end with the test."""
    before = threading.enumerate()
    yield
    gc.collect()
    until(lambda: not threads(before))
