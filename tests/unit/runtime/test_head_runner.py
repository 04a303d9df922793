"""What a block head makes of texts, and its pass: in native calls the same as op by op."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.attention.backend import Paths
from specinfer.attention.native import NativeCache
from specinfer.heads.block import BlockHead
from specinfer.heads.block_model import BlockModel
from specinfer.heads.checkpoint import HeadFolder
from specinfer.heads.load import load_head
from specinfer.heads.vocabulary import Tables
from specinfer.kernels.choice import TORCH, Kernels, choose_kernels, guessing
from specinfer.models.weights import load_model, open_model
from specinfer.runtime import head_runner
from specinfer.runtime.features import TappedRows
from specinfer.runtime.head_runner import BlockRunner, BlockText
from tests.heads import SIZE, block_config, tiny_body, tiny_head, write_tiny_head
from tests.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
HEADS: dict[str, dict[str, Any]] = {
    "embeddings": {},
    "the last state": {"reads_last": True},
    "one layer with biases": {"body": tiny_body(qk_norm=True, bias=True), "reads_last": True},
    "every row sees its block": {"causal": False, "sample_from_anchor": False},
    "a member": {"reads_last": True, "members": 1},
    "two members, the first row guesses nothing": {
        "reads_last": True,
        "members": 2,
        "sample_from_anchor": False,
    },
}
NEAR: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 0.1, "atol": 0.1},
}
TEXTS = (([3, 1, 0, 4, 8, 10], 0), ([2, 5, 6, 7, 9, 11], 4))  # tables, and where in the text they begin
BLOCK = 4


@pytest.fixture(scope="module")
def native() -> Kernels:
    kernels = guessing(choose_kernels("auto", CPU)[0])
    if kernels.library is None:
        pytest.skip("there is no native library here")
    return kernels


def runner(folder: Path, name: str, dtype: torch.dtype, kernels: Kernels) -> BlockRunner:
    if not (folder / "target").exists():
        write_tiny_llama(folder / "target", tokenizer=True, num_layers=3)
    target = open_model(folder / "target")
    model = load_model(folder / "target", dtype=dtype, device=CPU, kernels=kernels)
    written = write_tiny_head(tiny_head(block_config(**HEADS[name]), seed=6), folder / "head")
    head = load_head(HeadFolder(written, target.config), target, model, kernels=kernels)
    assert isinstance(head, BlockModel)
    return BlockRunner(head, num_blocks=12, block_size=BLOCK)


def guesses(runner: BlockRunner, levels: int) -> list[torch.Tensor]:
    """What is read of two texts, and guessed behind them, in three steps.

    First only one has a block, then both have read something, and at last the first has read nothing more.
    """
    head, found = runner.model.head, list[torch.Tensor]()
    random = torch.Generator().manual_seed(2)
    last: list[torch.Tensor | None] = [None] * len(TEXTS)
    begins = [0, 0]
    for step, counts in enumerate([(7, 5), (2, 1), (0, 2)]):
        texts = []
        for number, (count, (table, shift)) in enumerate(zip(counts, TEXTS, strict=True)):
            taps = torch.randn(count + 3, len(head.taps), SIZE, generator=random).to(runner.model.dtype)
            text = BlockText(table, shift, begin=begins[number], count=count, last=last[number])
            text.states = [TappedRows(taps, [count, *range(1, count)])] if count else []
            text.rows = 0 if step == 0 and number == 1 else levels - number
            text.members = max(0, head.members - (step == 1 and number))
            text.anchor = 7 + number
            begins[number] += count
            texts.append(text)
        made = runner.step(texts)
        assert [new is None for new in made.last] == [count == 0 for count in counts]
        last = [old if new is None else new for old, new in zip(last, made.last, strict=True)]
        found += [made.read_RD, made.logits_RU, *(new for new in made.last if new is not None)]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("levels", [3, 5])
def test_native_calls_do_what_the_head_does_op_by_op(
    tmp_path: Path, native: Kernels, name: str, dtype: torch.dtype, levels: int
) -> None:
    both = [runner(tmp_path, name, dtype, kernels) for kernels in (native, TORCH)]
    ours, theirs = (guesses(one, levels) for one in both)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, **NEAR[dtype])
        assert expected.float().std() > 0.1
    for got, expected in zip(*(one.cache.keys + one.cache.values for one in both), strict=True):
        torch.testing.assert_close(got, expected, **NEAR[dtype])
    assert both[0].model.native(1) is not None
    assert both[1].model.native(1) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"table": [12, 0, 1, 2]},
        {"table": [0, 1, 2]},
        {"anchor": 64},
        {"last": None},
        {"rows": 6},
        {"shift": 1 << 20},
        {"members": -1},
        {"members": 2},
        {"begin": 0},
    ],
    ids=str,
)
def test_what_is_not_there_is_refused(tmp_path: Path, native: Kernels, wrong: dict[str, Any]) -> None:
    one = runner(tmp_path, "a member", torch.float32, native)
    right: dict[str, Any] = {
        "table": [0, 1, 2, 3],
        "shift": 0,
        "begin": 3,
        "rows": 5,
        "anchor": 1,
        "members": 1,
    }
    right["last"] = torch.ones(SIZE)
    assert one.step([BlockText(**right)]).logits_RU.isfinite().all()
    head, cache = one.model.native(8), one._cached.attention
    assert head is not None
    assert isinstance(cache, NativeCache)
    asked = {**right, **wrong}
    last = 0 if asked["last"] is None else asked["last"].data_ptr()
    text = [0, len(asked["table"]), asked["shift"], asked["begin"], 0, asked["rows"], asked["members"]]
    text += (asked["anchor"], last)
    guesses = (1 + asked["members"]) * asked["rows"]
    with pytest.raises(IndexError, match="what is not there"):
        head.step(text, [], asked["table"], guesses, block_size=BLOCK, cache=cache)


class Moved(BlockHead):
    """A head of its own: what its entry puts out has a vector more, and there are no other blocks."""

    vector: torch.Tensor

    def _entered(self, *given: Any) -> torch.Tensor:
        return super()._entered(*given) + self.vector[: given[-1]]


def module(folder: Path) -> BlockHead:
    """The head that a runner has, in plain PyTorch."""
    target = open_model(folder / "target")
    head = HeadFolder(folder / "head", target.config).module(target)
    assert isinstance(head, BlockHead)
    return head


def alone(head: BlockHead, member: int) -> BlockHead:
    """A member without its trunk; 0: the trunk."""
    tables = Tables(head.embed_tokens.weight, head.lm_head.weight)
    moved = Moved(replace(head.config, members=0), head.ids.tolist(), tables)
    moved.load_state_dict(head.state_dict(), strict=False)
    moved.vector = torch.zeros(head.config.block_size, SIZE)
    if member:
        moved.vector = head.get_parameter(f"members.{member - 1}.vector")
        with torch.no_grad():
            moved.markov_head.markov_w1.weight.copy_(
                head.get_parameter(f"members.{member - 1}.markov_w1.weight")
            )
    return moved.eval()


@torch.no_grad()
def largest_difference(runner: BlockRunner, head: BlockHead, rows: int) -> float:
    """Between what the runner reads of the blocks of all members, and each of them alone in float32."""
    taps_TND = torch.randn(7, len(head.config.taps), SIZE, generator=torch.Generator().manual_seed(3))
    text = BlockText([4, 1, 7, 2, 9, 0], 0, begin=0, states=[TappedRows(taps_TND, range(7))], count=7)
    text.rows, text.members, text.anchor = rows, head.config.members, 11
    read_BRD = runner.step([text]).read_RD.unflatten(0, (1 + text.members, -1))
    given = taps_TND[None], torch.tensor([[11]]), torch.tensor([[7]])
    one_by_one = [alone(head, member)(*given)[0, 0] for member in range(1 + text.members)]
    expected_BRD = torch.stack(one_by_one)[:, : read_BRD.shape[1]]
    assert (expected_BRD[1:] - expected_BRD[0]).abs().amax() > 0.1
    beside = [head(*given, member=member)[0, 0] for member in range(1 + text.members)]
    torch.testing.assert_close(torch.stack(beside)[:, : read_BRD.shape[1]], expected_BRD)
    return float((read_BRD - expected_BRD).abs().max())


MEMBERS = ["a member", "two members, the first row guesses nothing"]


@pytest.mark.parametrize("name", MEMBERS)
@pytest.mark.parametrize("rows", [3, 5])
def test_rows_of_a_member_are_those_of_a_head_of_its_own(
    tmp_path: Path, native: Kernels, name: str, rows: int
) -> None:
    for kernels in (TORCH, native):
        one = runner(tmp_path, name, torch.float32, kernels)
        assert largest_difference(one, module(tmp_path), rows) < 1e-4


@pytest.mark.parametrize("name", MEMBERS)
def test_members_that_see_each_other_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The mutant: a row sees all rows before it, whosever they are."""

    def seeing(texts: Sequence[BlockText], block_size: int, *, causal: bool) -> Paths:
        [text] = texts
        begin, end = text.count, text.count + (1 + text.members) * text.rows
        shared = range(begin + 1, end + 1)
        return Paths.of(
            *([0, len(shared), 0, end], shared, [0] * (1 + len(shared)), []),
            tables=[text.table],
            block_size=block_size,
        )

    monkeypatch.setattr(head_runner, "_block_paths", seeing)
    one = runner(tmp_path, name, torch.float32, TORCH)
    assert largest_difference(one, module(tmp_path), 5) > 0.05


def test_a_pass_is_timed_with_its_members(tmp_path: Path, native: Kernels) -> None:
    one = runner(tmp_path, "a member", torch.float32, native)
    asked: list[BlockText] = []
    step = one.step
    one.step = lambda texts: (asked.extend(texts), step(texts))[1]  # type: ignore[method-assign]
    one.probe(4, every_row=True)
    assert [(text.rows, text.members) for text in asked] == [(5, 1)] * 2
