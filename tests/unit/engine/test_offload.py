"""Texts of models whose layers are streamed: those of the same models in memory, whoever guesses."""

from __future__ import annotations

import gc
import pickle
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.config import EngineConfig
from specinfer.engine import drafts as found_drafts
from specinfer.engine import memory
from specinfer.engine import models as loading
from specinfer.engine.memory import MemoryNeeds, MemoryPlan
from specinfer.engine.steps import Statistics
from specinfer.errors import CapacityError, ClosedError, ConfigError
from specinfer.hub.model_files import write_pool
from specinfer.models.weights import prepare
from specinfer.progress import NoProgress, Progress
from specinfer.speculate.policy import guard
from specinfer.speculate.policy.allowance import Allowance
from tests.engines import ENGINE, assert_idle, engine_of
from tests.heads import tiny_head, write_tiny_head
from tests.kernels import kernels
from tests.offloading import OPTIONS, count_models_alone, write_large
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import write_similar_llama, write_tiny_llama, write_tiny_mixture
from tests.unit.engine.heads.head_engines import HEADS
from tests.unit.engine.offloading import Planned, resident, streamed, threads, until

pytestmark = [pytest.mark.usefixtures("own_cache", "no_thread_is_left"), pytest.mark.thorough]

PROMPTS = [[9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [3] * 37, [50, 2, 61, 7], [1], [5, 6, 5, 6, 5]]
GREEDY = SamplingParams(max_tokens=10, temperature=0)
# 20 texts, four of them at a time.
PARAMS = [GREEDY, *(SamplingParams(max_tokens=10, temperature=0.8, seed=seed) for seed in (1, 2, 3))]
DRAFTS = {"similar": ("similar",), "pool": ("pool",), **{name: (name,) for name in HEADS}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of three layers, and drafts of every kind for it."""
    kernels("native")
    folder = tmp_path_factory.mktemp("offload")
    target = write_tiny_llama(folder / "target", num_layers=3, tokenizer=True, eos_token_id=63)
    write_similar_llama(target, folder / "similar", noise=0.1)
    for number in (1, 2):
        write_similar_llama(target, folder / "pool" / f"member{number}", noise=0.3, seed=number)
    write_pool(folder / "pool", ["member1", "member2"])
    for number, (name, config) in enumerate(HEADS.items()):
        write_tiny_head(tiny_head(config, seed=number), folder / name)
    return folder


def tokens(llm: LLM) -> list[tuple[int, ...]]:
    """Run twenty answers, after which the bookkeeping is checked."""
    each = [(prompt, one) for one in PARAMS for prompt in PROMPTS]
    outputs = llm.generate([prompt for prompt, _ in each], [one for _, one in each])
    assert [output.error for output in outputs if output.error] == []
    assert_idle(llm)
    return [output.token_ids for output in outputs]


def texts(llm: LLM) -> list[tuple[int, ...]]:
    with llm:
        return tokens(llm)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", DRAFTS)
def test_texts_with_every_draft(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    drafts = tuple(str(folder / one) for one in DRAFTS[name])
    want = texts(resident(folder / "target"))
    llm = streamed(folder / "target", monkeypatch, drafts=drafts, max_batch_size=4)
    with llm:
        assert tokens(llm) == want
        assert sum(llm.statistics().guessed_tokens.values()) > 100


def test_a_draft_of_its_files_blocks_is_not_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = (write_tiny_gguf(tmp_path / f"{name}.gguf") for name in ("target", "draft"))
    want = texts(resident(target))
    options: dict[str, Any] = {"drafts": (str(draft),), "draft_quantization": "gguf", "max_batch_size": 4}
    llm = streamed(target, monkeypatch, **options, offload_folder=tmp_path / "disk")
    with llm:
        assert tokens(llm) == want
        assert sum(llm.statistics().guessed_tokens.values()) > 100
    assert [file.name.partition("-")[0] for file in (tmp_path / "disk").rglob("*.safetensors")] == ["target"]


@pytest.mark.parametrize("options", [{"quantization": "int4"}, {"draft_quantization": "int8"}])
def test_a_self_draft_no_smaller_than_its_target_is_refused(folder: Path, options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="name a smaller model or a head, or leave it out"):
        resident(folder / "target", **{"quantization": "int8", **options}, drafts=("self",), offload="auto")


@pytest.mark.parametrize(
    ("options", "guessing"),
    [
        ({}, [(), ("self",), ("self",)]),
        ({"offload": "layers"}, [()]),
        ({"max_nodes": 1}, [()]),
        ({"quantization": "int4"}, [()]),
    ],
)
def test_who_may_guess_where_no_draft_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], guessing: list[tuple[str, ...]]
) -> None:
    found: list[tuple[str, ...]] = []

    class Recording(Planned):
        def __call__(self, needs: MemoryNeeds, config: EngineConfig, progress: Progress) -> MemoryPlan:
            found.extend(drafts.names for drafts in needs.draft_sets)
            return super().__call__(needs, config, progress)

    with streamed(folder / "target", monkeypatch, Recording(), **options):
        assert found == guessing


def test_only_native_kernels_on_a_cpu_stream_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "process_bytes", lambda: 1 << 30)
    for options, says in (({"kernels": "torch"}, "with PyTorch's: choose"), ({"device": "cuda"}, "cuda")):
        with pytest.raises((ConfigError, CapacityError), match=says):
            resident(folder / "target", memory=1 << 30, offload="auto", **options)


def test_a_closed_llm_reads_no_more_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = streamed(folder / "target", monkeypatch)
    other = llm.variant(lookup=True)
    llm.on_step = lambda _: time.sleep(0.01)  # the answer does not end by itself
    begun = llm.stream(PROMPTS[0], GREEDY)
    next(begun)
    engine = engine_of(llm)
    llm.close()
    assert not engine.has_work
    del engine
    for use in (lambda: [*begun], lambda: llm.generate(PROMPTS, GREEDY), llm.check_integrity):
        with pytest.raises(ClosedError):
            use()
    assert len(threads()) == 2, "the variant needs the readers"
    tokens(other)
    other.close()
    until(lambda: not threads())


@pytest.mark.parametrize("name", ["similar", "eagle", "block", "self"])
def test_a_closed_llm_needs_no_collector(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    draft = name if name == "self" else str(folder / name)
    llm = streamed(folder / "target", monkeypatch, drafts=(draft,), lookup=True)
    collects = gc.isenabled()
    gc.disable()
    try:
        llm.generate(PROMPTS, GREEDY)
        llm.close()
        until(lambda: not threads())
    finally:
        if collects:
            gc.enable()


def test_statistics_of_streams_go_to_another_process(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed(folder / "target", monkeypatch, Planned(self_draft=True)) as llm:
        before = llm.statistics()
        tokens(llm)
        after: Statistics = pickle.loads(pickle.dumps(llm.statistics()))
        done = after.since(before)
        plan = llm.models.plan
        assert done.streamed_bytes >= done.steps * plan.placement.streamed_bytes / 2
        assert done.stream_wait_seconds >= 0
        assert loading.Models.settled(llm.models, llm.config) == llm.config


def test_what_does_not_fit_is_refused_with_the_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count_models_alone(monkeypatch)
    model = write_large(tmp_path / "large")
    for options, line in (
        ({"drafts": (str(model),), "memory": 4 << 20}, r"at least .*drafts \d\.\d\d MiB.* = .*, but may"),
        ({"kv_cache_memory": 1 << 30}, r"at least .*KV caches 1\.00 GiB.* = .*, but may take .*; raise --me"),
        ({"memory": 1024}, r"at least .* = \d\.\d\d MiB, but may take 0\.00 MiB; raise --memory"),
        ({"memory": 900 << 40}, r"memory is 921600\.00 GiB, and this process can have .* here; lower it"),
    ):
        with pytest.raises(CapacityError, match=line):
            LLM(model, progress=NoProgress(), **{**OPTIONS, **options})


def test_the_first_start_plans_like_the_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the preparation, which was measured before."""
    count_models_alone(monkeypatch)
    taken = [0]
    monkeypatch.setattr(memory, "process_bytes", lambda: taken[0])

    def heavy(*args: Any, **options: Any) -> Any:
        taken[0] = 1 << 20
        return prepare(*args, **options)

    model, plans = write_large(tmp_path / "large"), list[str]()
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(found_drafts, "prepare", heavy)
            taken[0] = 0
            with LLM(model, progress=NoProgress(), **OPTIONS) as llm:
                plan = llm.models.plan
                plans.append(f"{plan.placement} {plan.drafts.names} {plan.limits}")
    assert plans[0] == plans[1]
    assert "streamed=(" in plans[0]
    taken[0] = 1 << 20
    with LLM(model, progress=NoProgress(), **OPTIONS) as llm:
        plan = llm.models.plan
        assert f"{plan.placement} {plan.drafts.names} {plan.limits}" != plans[0]


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of twelve layers."""
    kernels("native")
    folder = tmp_path_factory.mktemp("self_draft") / "deep"
    return write_tiny_llama(folder, num_layers=12, tokenizer=True, eos_token_id=63)


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


# Experts, which are read when they are chosen.


EXPERTS, LAYERS = 8, 3


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kernels("native")
    made = tmp_path_factory.mktemp("experts")
    shape: dict[str, Any] = {"num_layers": LAYERS, "hidden_size": 64, "expert_size": 64}
    target = write_tiny_mixture(
        made / "target", experts=EXPERTS, per_token=2, shared_size=24, tokenizer=True, **shape
    )
    write_similar_llama(target, made / "draft", noise=0.1)
    return made


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_of_every_kind(mixtures: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, kind: str) -> None:
    options = {"dtype": dtype, "quantization": kind, "max_batch_size": 4}
    with resident(mixtures / "target", **options) as llm:
        want = tokens(llm)
    for plan, more in (
        (Planned(slots=EXPERTS), {}),
        (Planned(slots=2 * EXPERTS), {"lookup": True}),
        (Planned(slots=EXPERTS), {"drafts": (str(mixtures / "draft"),), "expansion": (2, 2, 1)}),
        (Planned(slots=2 * EXPERTS), {"drafts": (str(mixtures / "draft"),), "tree_size": "cost"}),
    ):
        with streamed(mixtures / "target", monkeypatch, plan, **options, **more) as llm:
            assert tokens(llm) == want


def limited(mixtures: Path, memory: int, **options: Any) -> LLM:
    """Open a mixture of experts with `memory` bytes in addition to its cache."""
    given = {**ENGINE, "kernels": "native", "dtype": "bfloat16", "kv_cache_memory": 1 << 20}
    return LLM(
        mixtures / "target", memory=memory, offload="auto", progress=NoProgress(), **{**given, **options}
    )


def test_a_limit_keeps_as_many_experts_as_fit(mixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with resident(mixtures / "target", dtype="bfloat16") as llm:
        want = tokens(llm)
    count_models_alone(monkeypatch)
    plans = list[MemoryPlan]()
    with pytest.raises(CapacityError, match=r"the model needs at least .* experts of a layer .*, but"):
        limited(mixtures, (1 << 20) + 100_000)
    for limit in (1_700_000, 1_850_000):
        with limited(mixtures, limit, drafts=()) as llm:
            plans.append(llm.models.plan)
            assert tokens(llm) == want
    rooms = [plan.placement.experts for plan in plans]
    assert all(EXPERTS <= room.slots < EXPERTS * LAYERS for room in rooms if room is not None)
    assert [plan.placement.resident_bytes <= plan.placement.memory for plan in plans] == [True, True]
    assert f"{rooms[0].slots} of {EXPERTS * LAYERS} experts in memory" in str(plans[0])
    with limited(mixtures, 1 << 30) as llm:
        assert llm.models.plan is None
        assert tokens(llm) == want
