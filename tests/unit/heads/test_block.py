"""Guesses of a block head; native and op-by-op passes give the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.heads.block import BlockModel, BlockText
from specinfer.heads.checkpoint import HeadFolder, load_head
from specinfer.heads.runner import HeadRunner
from specinfer.kernels.attention import NativeCache
from specinfer.kernels.choice import TORCH, Kernels, choose_kernels, draft_kernels
from specinfer.models.open_model import open_model
from specinfer.runtime.features import TappedRows
from tests.heads import SIZE, block_config, tiny_body, tiny_head, write_tiny_head
from tests.loading import load
from tests.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
HEADS: dict[str, dict[str, Any]] = {
    "embeddings": {},
    "the last state": {"reads_last": True},
    "one layer with biases": {"body": tiny_body(qk_norm=True, bias=True), "reads_last": True},
    "every row sees its block": {"causal": False, "sample_from_anchor": False},
    "the first row guesses nothing": {"reads_last": True, "sample_from_anchor": False},
}
NEAR: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 0.1, "atol": 0.1},
}
TEXTS = (([3, 1, 0, 4, 8, 10], 0), ([2, 5, 6, 7, 9, 11], 4))  # tables, and where in the text they begin
BLOCK = 4


@pytest.fixture(scope="module")
def native() -> Kernels:
    kernels = draft_kernels(choose_kernels("auto", CPU)[0])
    if kernels.library is None:
        pytest.skip("there is no native library here")
    return kernels


def runner(folder: Path, name: str, dtype: torch.dtype, kernels: Kernels) -> HeadRunner[BlockModel]:
    if not (folder / "target").exists():
        write_tiny_llama(folder / "target", tokenizer=True, num_layers=3)
    target = open_model(folder / "target")
    model = load(folder / "target", kernels, dtype=dtype)
    written = write_tiny_head(tiny_head(block_config(**HEADS[name]), seed=6), folder / "head")
    head = load_head(HeadFolder(written, target.config, target), model, kernels=kernels)
    assert isinstance(head, BlockModel)
    return HeadRunner(head, num_blocks=12, block_size=BLOCK)


def guesses(runner: HeadRunner[BlockModel], levels: int) -> list[torch.Tensor]:
    """Rows and guesses of two texts in three steps.

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
            text.anchor = 7 + number
            begins[number] += count
            texts.append(text)
        made = runner.guess(texts)
        assert made.logits_RU is not None
        assert [new is None for new in made.made] == [count == 0 for count in counts]
        last = [old if new is None else new for old, new in zip(last, made.made, strict=True)]
        found += [made.read_RD, made.logits_RU, *(new for new in made.made if new is not None)]
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
    caches = [one.cache.kv for one in both if one.cache is not None]
    for got, expected in zip(*(kv.keys + kv.values for kv in caches), strict=True):
        torch.testing.assert_close(got, expected, **NEAR[dtype])
    assert both[0].model.native is not None
    assert both[1].model.native is None


@pytest.mark.parametrize(
    "wrong",
    [{"table": [12, 0]}, {"table": [0]}, {"anchor": 64}, {"last": None}, {"rows": 6}, {"shift": 1 << 20}],
    ids=str,
)
def test_what_is_not_there_is_refused(tmp_path: Path, native: Kernels, wrong: dict[str, Any]) -> None:
    one = runner(tmp_path, "the last state", torch.float32, native)
    right: dict[str, Any] = {"table": [0, 1], "shift": 0, "begin": 3, "rows": 5, "anchor": 1}
    right["last"] = torch.ones(SIZE)
    logits_RU = one.guess([BlockText(**right)]).logits_RU
    assert logits_RU is not None
    assert logits_RU.isfinite().all()
    head = one.model.native
    assert head is not None
    assert one.cache is not None
    cache = one.cache.attention
    assert isinstance(cache, NativeCache)
    asked = {**right, **wrong}
    last = 0 if asked["last"] is None else asked["last"].data_ptr()
    text = [0, len(asked["table"]), asked["shift"], asked["begin"], 0, asked["rows"]]
    text += (asked["anchor"], last)
    with pytest.raises(IndexError, match="invalid slot or token"):
        head.step(text, [], asked["table"], asked["rows"], block_size=BLOCK, cache=cache)
