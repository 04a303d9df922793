"""A streamed model and its quantized copy, whose memory layers use while speculation is off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from specinfer.models.draft_memory import DraftMemory
from specinfer.speculate.policy.allowance import Allowance
from tests.kernels import kernels
from tests.tiny_models import write_tiny_llama
from tests.unit.engine.offloading import Planned, resident, streamed
from tests.unit.engine.test_offload import texts

pytestmark = pytest.mark.usefixtures("own_cache", "no_thread_is_left")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of twelve layers."""
    kernels("native")
    folder = tmp_path_factory.mktemp("self_draft") / "deep"
    return write_tiny_llama(folder, num_layers=12, tokenizer=True, eos_token_id=63)


def counted(calls: Counter[str], name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def counting(*given: Any) -> Any:
        calls[name] += 1
        return call(*given)

    return counting


@pytest.mark.parametrize("kind", ["none", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_while_layers_have_the_memory_of_the_self_draft(
    deep: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str
) -> None:
    """Speculation is off in one of three steps."""
    options: dict[str, Any] = {"dtype": dtype, "quantization": kind, "max_batch_size": 4}
    want = texts(resident(deep, **options))
    steps = count()
    monkeypatch.setattr(Allowance, "allows", lambda *asked, **more: next(steps) % 3 > 0)
    llm = streamed(deep, monkeypatch, Planned(self_draft=True), **options, tree_size="cost")
    draft_memory = llm.models.draft_memory
    assert draft_memory is not None
    assert draft_memory.layers
    moves = Counter[str]()
    for name in ("give_to_layers", "give_to_draft"):
        monkeypatch.setattr(DraftMemory, name, counted(moves, name, getattr(DraftMemory, name)))
    assert texts(llm) == want
    assert min(moves["give_to_layers"], moves["give_to_draft"]) > 9
    assert next(steps) > 30
