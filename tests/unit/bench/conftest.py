"""A tiny pair of models with and without speculation, and a small data set."""

from __future__ import annotations

from typing import Any

import pytest

from specinfer.llm import LLM
from specinfer.report.dataset import Conversation, Dataset
from tests.engines import Tiny, write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=256, max_context=160)


@pytest.fixture
def dataset() -> Dataset:
    turns = [("one two one two",), ("a question", "another"), ("red red blue",), ("xyz xyz",), ("last",)]
    return Dataset("made up", tuple(Conversation(t) for t in turns), duplicates=0)


@pytest.fixture
def pair(tiny: Tiny) -> Any:
    """Makes (without, with) speculation; options go to the second, max_batch_size to both."""

    def make(**options: Any) -> tuple[LLM, LLM]:
        batch = {"max_batch_size": options.pop("max_batch_size", 1)}
        return tiny.llm(**batch), tiny.llm(**{"drafts": ["similar"], "lookup": True, **batch, **options})

    return make
