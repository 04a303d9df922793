"""What a block head makes of texts, and its pass: in native calls the same as op by op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specinfer.attention.native import NativeCache
from specinfer.heads.block_model import BlockModel
from specinfer.heads.checkpoint import HeadFolder
from specinfer.heads.load import load_head
from specinfer.kernels.choice import TORCH, Kernels, choose_kernels, guessing
from specinfer.models.weights import load_model, open_model
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.features import TappedRows
from specinfer.runtime.head_runner import BlockRunner, HeadRows
from tests.heads import SIZE, block_config, tiny_body, tiny_head, write_tiny_head
from tests.tiny_models import write_tiny_llama

CPU = torch.device("cpu")
HEADS: dict[str, dict[str, Any]] = {
    "embeddings": {},
    "the last state": {"reads_last": True},
    "one layer with biases": {"body": tiny_body(qk_norm=True, bias=True), "reads_last": True},
    "every row sees its block": {"causal": False, "sample_from_anchor": False},
}
NEAR: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.bfloat16: {"rtol": 0.1, "atol": 0.1},
}
TEXTS = ((9, [3, 1, 0, 4], 0), (5, [2, 5, 6], 4))  # tokens, blocks of a table, where it begins in the text
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
    return BlockRunner(head, num_blocks=7, block_size=BLOCK)


def guesses(runner: BlockRunner, levels: int) -> list[torch.Tensor]:
    """What is read of two texts, in two steps, and guessed behind them."""
    head, found, last = runner.model.head, list[torch.Tensor](), list[torch.Tensor]()
    random = torch.Generator().manual_seed(2)
    for steps in range(2):
        parts, states = [], []
        for tokens, table, shift in TEXTS:
            count = tokens - 2 if steps == 0 else 2
            start = steps * (tokens - 2)
            parts.append(HeadRows(chain_rows([0] * count, start, table, logits=False), shift))
            taps = torch.randn(count + 3, len(head.taps), SIZE, generator=random).to(runner.model.dtype)
            states.append(TappedRows(taps, [*range(1, count), 0]))
        fused_TD = runner.read(parts, states)
        found.append(fused_TD)
    ends = np.cumsum([2] * len(TEXTS)) - 1
    if head.reads_last:
        last = [fused_TD[end] for end in ends]
    blocks = []
    for number, (tokens, table, shift) in enumerate(TEXTS):
        ids = [7 + number, *[head.mask_token_id] * (levels - 1)]
        blocks.append(HeadRows(Rows(ids, tokens, table, 0), shift))
    found.extend(runner.guess(blocks, last, [0, levels - 1, levels, 2 * levels - 1]))
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


def test_what_is_not_there_is_refused(tmp_path: Path, native: Kernels) -> None:
    one = runner(tmp_path, "the last state", torch.float32, native)
    head, cache = one.model.native(8), one._cached.attention
    assert head is not None
    assert isinstance(cache, NativeCache)
    taps = TappedRows(torch.zeros(1, 2, SIZE), [0]).addresses()
    inside, outside = np.array([3]), np.array([7 * BLOCK])
    with pytest.raises(IndexError, match="slots"):
        head.read(taps, inside, outside, cache)
    with pytest.raises(IndexError, match="positions"):
        head.read(taps, np.array([head.positions]), inside, cache)
    with pytest.raises(TypeError, match="1 contiguous"):
        head.read(taps, np.array([1, 2]), inside, cache)
    block = HeadRows(chain_rows([5, 1], 0, [0], logits=False), 0)
    with pytest.raises(ValueError, match="0 rows before 1 blocks"):
        one.guess([block], [], [0])
    with pytest.raises(IndexError, match="rows"):
        one.guess([block], [torch.zeros(SIZE)], [2])
