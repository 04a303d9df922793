"""A streamed model and its quantized copy, whose memory layers get if it does not pay."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM
from specinfer.errors import ConfigError
from specinfer.speculate.policy import guard
from specinfer.speculate.policy.allowance import Allowance
from tests.kernels import kernels
from tests.tiny_models import write_tiny_llama
from tests.unit.engine.offloading import Planned, resident, streamed
from tests.unit.engine.test_offload import answers, texts

pytestmark = pytest.mark.usefixtures("own_cache", "no_thread_is_left")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of twelve layers."""
    kernels("native")
    folder = tmp_path_factory.mktemp("self_draft") / "deep"
    return write_tiny_llama(folder, num_layers=12, tokenizer=True, eos_token_id=63)


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    return [output.token_ids for output in answers(llm)]


@pytest.mark.parametrize("kind", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_before_and_after_layers_get_the_memory_of_the_self_draft(
    deep: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str
) -> None:
    """Speculation is off in two of three steps."""
    options: dict[str, Any] = {"dtype": dtype, "quantization": kind, "max_batch_size": 4}
    want = texts(resident(deep, **options))
    steps = count()

    def allows(allowance: Allowance, *asked: object, **more: object) -> bool:
        allowance.guessing = next(steps) % 3 == 0
        return allowance.guessing

    monkeypatch.setattr(Allowance, "allows", allows)
    monkeypatch.setattr(guard, "_GIVEN_UP", 9)
    llm = streamed(deep, monkeypatch, Planned(self_draft=True), **options, tree_size="cost")
    draft_memory = llm.models.draft_memory
    assert draft_memory.layers
    assert not draft_memory.given
    with llm:
        assert tokens(llm) == want, "the memory is given amid these texts"
        assert draft_memory.given
        guessed = llm.statistics().guessed_tokens["draft"]
        assert tokens(llm) == want
        assert llm.statistics().guessed_tokens["draft"] == guessed
        with pytest.raises(ConfigError, match="layers got its memory"):
            llm.variant()
        assert texts(llm.variant(drafts=())) == want
