"""Fixtures of the engine's tests: a counting engine for loops, an oracle and engines for parameters."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from specinfer import LLM
from specinfer.engine.admission import AdmittedRequest
from specinfer.engine.loop import EngineLoop
from specinfer.tokenizer import Tokenizer
from tests.engines import Tiny, write_tiny
from tests.kernels import kernels
from tests.scripted_engine import ScriptedEngine, admitted
from tests.tiny_models import write_pair, write_tiny_llama
from tests.unit.engine.byte_oracle import EOS, SPECULATION, VOCAB, Oracle
from tests.unit.engine.offloading import threads as streaming_threads
from tests.unit.engine.offloading import until

T = TypeVar("T")
Make = Callable[..., AdmittedRequest]


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
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a function that makes a request with an id and a number of tokens."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("t"), vocab_size=256, tokenizer=True)
    tokenizer = Tokenizer.load(folder)
    return lambda request_id, max_tokens=3: admitted(tokenizer, request_id, max_tokens)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def loop(engine: ScriptedEngine) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine)
    yield loop
    loop.close()
    assert not engine.has_work


@pytest.fixture
def threads() -> Iterator[Callable[[Callable[[], T]], Future[T]]]:
    with ThreadPoolExecutor(16) as pool:
        yield pool.submit


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=64, max_context=96)


@pytest.fixture(scope="session")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Models whose tokens are bytes, for the oracle."""
    folder = tmp_path_factory.mktemp("letters")
    return write_tiny(folder, vocab_size=VOCAB, max_context=96, eos_token_id=EOS, spread=0.25)


@pytest.fixture(scope="session")
def oracle(letters: Tiny) -> Oracle:
    return Oracle(letters)


@pytest.fixture(scope="session")
def llms(letters: Tiny) -> dict[str, LLM]:
    return {name: letters.llm(**options) for name, options in SPECULATION.items()}


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """Checks that threads that read weights or run passes end with the test."""
    before = threading.enumerate()
    yield
    gc.collect()
    until(lambda: not streaming_threads(before))
