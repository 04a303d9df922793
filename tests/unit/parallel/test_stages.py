"""Models of every family in pipeline stages, whose ranks are threads here: the bits of one process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specinfer import SamplingParams
from specinfer.errors import PeerLostError
from specinfer.heads.checkpoint import load_head, open_head
from specinfer.kernels.choice import draft_kernels
from specinfer.models.language_model import LanguageModel
from specinfer.models.open_model import open_model
from specinfer.models.shard import Layout
from specinfer.models.weights import load_model
from specinfer.runtime.batch import ModelBatch, Rows, build_batch
from specinfer.runtime.executor import Executor, Host
from specinfer.runtime.runner import ModelRunner
from specinfer.runtime.stages import StageTimes, cut_rows
from specinfer.speculation_config import Quantization
from tests.heads import eagle_config, tiny_head, write_tiny_head
from tests.kernels import NAMES, kernels
from tests.ranks import CPU, llm_of, ranks_of, whole_model
from tests.tiny_models import write_similar_llama, write_tiny_llama
from tests.unit.parallel.conftest import Saved
from tests.unit.parallel.test_texts import FAMILIES, SHAPE, said

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.thorough]
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [9], [40, 41, 42, 40, 41, 42, 40, 41], [5, 6]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=10),
    SamplingParams(temperature=0.8, seed=5, max_tokens=10),
]
LAYOUTS = [(2, 2), (3, 3), (4, 2)]  # ranks, stages


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("family", "name"),  # stages divide no sums, and run with either kernels
    [(family, NAMES[number % 2]) for number, family in enumerate(FAMILIES)] + [("qwen3", "torch")],
)
def test_logits_and_taps(family: str, name: Literal["torch", "native"], tmp_path: Path, saved: Saved) -> None:
    path, chosen = saved(family, **FAMILIES[family]), kernels(name)
    dtype = torch.bfloat16 if name == "native" else torch.float32
    layers = open_model(path).config.num_layers
    taps = (layers, 0, layers - 1, 1)
    # Every kind in every layout for one family, with both makers; for the others each kind and each layout.
    kinds: list[tuple[Quantization, int, int]] = [("none", 2, 2), ("int8", 3, 3), ("int4", 4, 2)]
    if family == "qwen3":
        kinds = [(kind, *layout) for kind in ("none", "int4", "int8") for layout in LAYOUTS]
    for kind, size, stages in kinds:
        if name == "torch" and size > stages:
            continue
        want = said(whole_model(path, chosen, tmp_path, dtype, kind, size // stages), taps)
        how: dict[str, Any] = {"dtype": dtype, "quantization": kind, "stages": stages}
        with ranks_of(path, size, chosen, tmp_path, **how) as model:
            found = said(model, taps)
            assert all(map(torch.equal, found, want)), (kind, size, stages)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_tiny_llama(tmp_path / "model", tokenizer=True, num_layers=4, **SHAPE)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("size", "stages", "kind"),
    [(2, 1, "none"), (3, 1, "int4"), *((size, stages, "int8") for size, stages in LAYOUTS)],
)
def test_whoever_guesses(llama: Path, size: int, stages: int, kind: Quantization, tmp_path: Path) -> None:
    native = kernels("native")
    similar = write_similar_llama(llama, tmp_path / "similar", noise=0.1)
    draft = load_model(similar, dtype=torch.float32, device=CPU, kernels=draft_kernels(native))
    opened = open_model(llama)
    head_folder = open_head(
        write_tiny_head(tiny_head(eagle_config(own_head=False)), tmp_path / "head"), opened
    )

    def texts(target: LanguageModel, who: str, **options: Any) -> list[tuple[int, ...]]:
        head = None
        if who == "head":
            head = load_head(head_folder, target, kernels=draft_kernels(native))
        drafts = {"draft": {"draft": draft}, "head": {"head": head}}.get(who)
        llm = llm_of(target, llama, drafts, lookup=who == "lookups", tree_size="fixed", **options)
        found = [tuple(out.token_ids) for params in PARAMS for out in llm.generate(PROMPTS, params)]
        llm.close()
        return found

    want = texts(whole_model(llama, native, tmp_path, quantization=kind), "nobody")
    how: dict[str, Any] = {"quantization": kind, "whole_table": True, "stages": stages}
    with ranks_of(llama, size, native, tmp_path, **how) as target:
        for who in ("nobody", "lookups", "draft", "head"):
            assert texts(target, who) == want, who
        assert texts(target, "draft", max_batch_size=1, max_step_tokens=32) == want


@pytest.mark.few(4)
@pytest.mark.parametrize("family", ["llama-biases", "lfm2-biases", "qwen3.5", "nemotron-h"])
@pytest.mark.parametrize("parts", [2, 3, 20])
def test_a_pass_in_parts_has_the_bits_of_a_whole_one(
    family: str, parts: int, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(family, **FAMILIES[family])
    layers = open_model(path).config.num_layers
    taps = (layers, 0, layers // 2)
    want = said(whole_model(path, kernels("native"), tmp_path, quantization="int4", width=1), taps)
    monkeypatch.setattr(StageTimes, "parts", lambda self, rows, stages: min(rows, parts))
    for size, stages, kind in ((2, 2, "int4"), (3, 3, "int4"), (4, 2, "int8")):
        if kind == "int8":
            want = said(whole_model(path, kernels("native"), tmp_path), taps)
        how: dict[str, Any] = {"quantization": kind, "stages": stages}
        with ranks_of(path, size, kernels("native"), tmp_path, **how) as model:
            assert all(map(torch.equal, said(model, taps), want)), (size, stages)


def paths_of(batch: ModelBatch) -> list[list[int]]:
    """The slots that each row of a batch sees."""
    paths, found = batch.paths, list[list[int]]()
    for number, (first, behind, _, _) in enumerate(paths.requests_R4.tolist()):
        slots = paths.slots(number)
        for row in range(first, behind):
            tail = paths.tails[paths.tail_ends[row] : paths.tail_ends[row + 1]]
            found.append([*slots[: paths.shared_T[row]].tolist(), *slots[tail].tolist()])
    return found


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_parts_are_the_rows_of_the_whole(data: st.DataObject) -> None:
    def request(number: int) -> Rows:
        n = data.draw(st.integers(1, 9))
        parents: list[int] | None = None
        start = data.draw(st.integers(0, 5))
        if data.draw(st.booleans()):
            nodes = data.draw(st.integers(1, start + n))
            parents = [-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, nodes))]
        return Rows(
            [*range(n)], start, [3 * number + i for i in range(3)], data.draw(st.integers(0, n)), parents
        )

    rows = [request(number) for number in range(data.draw(st.integers(1, 3)))]
    count = sum(len(one.token_ids) for one in rows)
    parts = cut_rows(rows, data.draw(st.integers(1, count)))
    sizes = [sum(len(one.token_ids) for one in part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    whole, *cut = (build_batch(one, block_size=8, device=CPU) for one in (rows, *parts))
    for name in ("token_ids_T", "positions_T"):
        assert torch.equal(torch.cat([getattr(one, name) for one in cut]), getattr(whole, name))
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    read = [
        first + torch.arange(size) if one.logit_rows is None else first + one.logit_rows
        for first, size, one in zip(firsts, sizes, cut, strict=True)
    ]
    assert torch.cat(read).tolist() == (
        [*range(count)] if whole.logit_rows is None else whole.logit_rows.tolist()
    )
    assert [path for one in cut for path in paths_of(one)] == paths_of(whole)


def test_a_stage_has_its_layers_alone(llama: Path, tmp_path: Path) -> None:
    whole = whole_model(llama, kernels("native"), tmp_path)
    wanted: dict[str, Any] = {"block_size": 16, "wanted_positions": 1 << 20, "needed_positions": 16}
    blocks = Executor.within_memory(whole, [], limit=1 << 20, **wanted).num_blocks
    with ranks_of(llama, 2, kernels("native"), tmp_path, stages=2) as model:
        assert len(ModelRunner(model, num_blocks=1, block_size=8).cache.keys) == 2
        later = Layout(1, (0, 2, 4)).part(1, whole.config)
        hosts = [Host("", [later])]
        executor = Executor.within_memory(model, [], limit=1 << 20, hosts=hosts, **wanted)
    assert executor.num_blocks == blocks


def test_what_followers_answer_is_waited_for_within_a_pass_and_asked_for_behind_it(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taps are a part of the pass, and the times of ranks are none."""
    with ranks_of(llama, 2, kernels("native"), tmp_path, stages=2) as model:
        runner, group = ModelRunner(model, num_blocks=1, block_size=8), model.group
        hear, take, heard = group.read_times, group._take, list[float]()

        def slow(*given: Any) -> Tensor:
            time.sleep(0.05)
            return take(*given)

        def read_times() -> None:
            heard.append(sum(group.times.spent))
            hear()

        monkeypatch.setattr(group, "read_times", read_times)
        runner.launch([Rows((3,), 0, [0], 0)])
        assert heard == [sum(group.times.spent)]
        assert len(group.times.by_rank) == 6
        waited = group.times.spent[2]
        monkeypatch.setattr(group, "_take", slow)
        runner.launch([Rows((1,), 1, [0], 0)], taps=(3,))
        assert group.times.spent[2] >= waited + 0.1, "for rows and for taps"


@pytest.mark.parametrize(("fault", "stages"), [("embed", 1), ("embed", 3), ("later", 3)])
def test_a_pass_that_fails_ends_the_group(
    llama: Path, fault: str, stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Tensor:
        raise MemoryError("none is left")

    with ranks_of(llama, 3, kernels("native"), tmp_path, stages=stages) as model:
        runner = ModelRunner(model, num_blocks=1, block_size=8)
        with pytest.raises(ValueError, match="block"):  # before a message is sent
            runner.forward([Rows((3,), 0, [7], 0)])
        assert runner.forward([Rows((3,), 0, [0], 0)]).shape == (1, 64)
        group = model.group
        if fault == "embed":
            monkeypatch.setattr(model, "read", fail)
            with pytest.raises(MemoryError):
                runner.forward([Rows((3,), 0, [0], 0)])
        else:

            def lose(*_: object) -> None:
                raise group.shut_down("it is lost")

            monkeypatch.setattr(group, "send_on", lose)
            with pytest.raises(PeerLostError):
                runner.forward([Rows((3,), 0, [0], 0)])
        why = "rank 0 has failed in the middle of a pass" if fault == "embed" else "it is lost"
        with pytest.raises(PeerLostError, match=why):
            runner.forward([Rows((3,), 0, [0], 0)])
