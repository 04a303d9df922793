"""Mixtures whose experts are read when they are chosen: the texts of the same models in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.engine.memory import MemoryPlan
from specinfer.errors import CapacityError
from specinfer.progress import NoProgress
from tests.engines import ENGINE, assert_idle
from tests.kernels import kernels
from tests.offloading import count_models_alone
from tests.tiny_models import write_similar_llama, write_tiny_mixture
from tests.unit.engine.offloading import Planned, resident, streamed

pytestmark = [pytest.mark.usefixtures("own_cache", "no_thread_is_left"), pytest.mark.thorough]

PROMPTS = [[9, 8, 7, 6, 5, 4], [3] * 17, [50, 2, 61, 7], [1]]
GREEDY = SamplingParams(max_tokens=12, temperature=0)
PARAMS = [GREEDY, SamplingParams(max_tokens=12, temperature=0.8, seed=3)]
COUNT, LAYERS = 8, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kernels("native")
    folder = tmp_path_factory.mktemp("experts")
    shape: dict[str, Any] = {"num_layers": LAYERS, "hidden_size": 64, "expert_size": 64}
    target = write_tiny_mixture(
        folder / "target", experts=COUNT, per_token=2, shared_size=24, tokenizer=True, **shape
    )
    write_similar_llama(target, folder / "draft", noise=0.1)
    return folder


def texts(llm: LLM, params: list[SamplingParams] | None = None) -> list[tuple[int, ...]]:
    outputs = [out for one in params or PARAMS for out in llm.generate(PROMPTS, one)]
    assert [output.error for output in outputs if output.error] == []
    assert_idle(llm)
    return [tuple(output.token_ids) for output in outputs]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_of_every_kind(folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str) -> None:
    options = {"dtype": dtype, "quantization": kind, "max_batch_size": 4}
    with resident(folder / "target", **options) as llm:
        want = texts(llm)
    for plan, more in (
        (Planned(slots=COUNT), {}),
        (Planned(slots=2 * COUNT), {"lookup": True}),
        (Planned(slots=COUNT), {"drafts": (str(folder / "draft"),), "expansion": (2, 2, 1)}),
        (Planned(slots=2 * COUNT), {"drafts": (str(folder / "draft"),), "tree_size": "cost"}),
    ):
        with streamed(folder / "target", monkeypatch, plan, **options, **more) as llm:
            assert texts(llm) == want


def limited(folder: Path, memory: int, **options: Any) -> LLM:
    """Open a mixture of experts with `memory` bytes in addition to its cache."""
    given = {**ENGINE, "kernels": "native", "dtype": "bfloat16", "kv_cache_memory": 1 << 20}
    return LLM(
        folder / "target", memory=memory, offload="auto", progress=NoProgress(), **{**given, **options}
    )


def test_a_limit_keeps_as_many_experts_as_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with resident(folder / "target", dtype="bfloat16") as llm:
        want = texts(llm)
    count_models_alone(monkeypatch)
    plans = list[MemoryPlan]()
    with pytest.raises(CapacityError, match=r"the model needs at least .* experts of a layer .*, but"):
        limited(folder, (1 << 20) + 100_000)
    for memory in (1_700_000, 1_850_000):
        with limited(folder, memory, drafts=()) as llm:
            assert llm.models.plan is not None
            plans.append(llm.models.plan)
            assert texts(llm) == want
    rooms = [plan.placement.experts for plan in plans]
    assert rooms[1] is not None
    assert all(COUNT <= room.slots < COUNT * LAYERS for room in rooms if room is not None)
    assert [plan.placement.resident_bytes <= plan.placement.memory for plan in plans] == [True, True]
    assert f"{rooms[0].slots} of {COUNT * LAYERS} experts in memory" in str(plans[0])
    with limited(folder, 1 << 30) as llm:
        assert llm.models.plan is None
        assert texts(llm) == want
