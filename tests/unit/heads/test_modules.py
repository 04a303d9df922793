"""The modules of heads against plain loops, and what of them is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specinfer.errors import ModelError
from specinfer.heads.block import BlockModel, BlockText
from specinfer.heads.checkpoint import HeadFolder, load_head
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.eagle import EagleHead
from specinfer.heads.runner import HeadRunner
from specinfer.kernels.choice import TORCH, Kernels, choose_kernels, draft_kernels
from specinfer.models.open_model import open_model
from specinfer.runtime.features import TappedRows
from tests.heads import SIZE, VOCAB, block_config, eagle_config, tiny_body, tiny_head, write_tiny_head
from tests.loading import load
from tests.tiny_models import write_tiny_llama
from tests.unit.heads.plain import block_hidden, eagle_logits, weights_of

GENERATOR = torch.Generator().manual_seed(7)
TEXT = torch.randint(0, VOCAB, (9,), generator=GENERATOR).tolist()
PATH = [5, 40, 17]

EAGLES = {
    "EAGLE-3": eagle_config(),
    "two layers, biases": eagle_config(body=tiny_body(num_layers=2, bias=True)),
    "norms of queries and keys": eagle_config(body=tiny_body(qk_norm=True)),
    "norm_before_residual": eagle_config(norm_before_residual=True),
    "norm_before_fc": eagle_config(norm_before_fc=True),
    "EAGLE-3.1": eagle_config(fc_norm=True, norm_output=True),
    "every token": eagle_config(draft_vocab_size=VOCAB),
}
BLOCKS = {
    "DSpark, causal": block_config(),
    "DFlash": block_config(causal=False, sample_from_anchor=False, markov_rank=0),
    "one row": block_config(block_size=1),
    "behind the last state": block_config(reads_last=True),
}


def taps_of(rows: int, taps: int) -> torch.Tensor:
    return torch.randn(2, rows, taps, SIZE, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("config", EAGLES.values(), ids=EAGLES)
def test_an_eagle_head_is_what_a_loop_over_rows_makes(config: EagleConfig) -> None:
    head = tiny_head(config)
    taps = taps_of(len(TEXT) - 1, len(config.taps))
    # The last row's steps are the path; other rows do not see each other's steps.
    tokens = torch.full((2, len(TEXT) - 1, 1 + len(PATH)), 3)
    tokens[:, :, 0] = torch.tensor(TEXT[1:])
    tokens[:, -1, 1:] = torch.tensor(PATH)
    with torch.no_grad():
        logits = head.logits(head(tokens, taps))
    for sequence in range(2):
        plain = eagle_logits(weights_of(head), config, TEXT, taps[sequence].double().numpy(), PATH)
        np.testing.assert_allclose(logits[sequence, :, 0], plain[: len(TEXT) - 1], atol=1e-4)
        np.testing.assert_allclose(logits[sequence, -1], plain[len(TEXT) - 2 :], atol=1e-4)


@pytest.mark.parametrize("config", BLOCKS.values(), ids=BLOCKS)
def test_a_block_head_is_what_a_loop_over_rows_makes(config: BlockConfig) -> None:
    head = tiny_head(config)
    taps = taps_of(len(TEXT), len(config.taps))
    anchors = torch.tensor([[1, 4, len(TEXT)]] * 2)
    anchor_ids = torch.tensor([[9, 12, 30]] * 2)
    with torch.no_grad():
        hidden = head(taps, anchor_ids, anchors)
    assert hidden.shape == (2, 3, config.depth, SIZE)
    for sequence in range(2):
        for block, (anchor, token) in enumerate([(1, 9), (4, 12), (len(TEXT), 30)]):
            plain = block_hidden(weights_of(head), config, taps[sequence].double().numpy(), token, anchor)
            np.testing.assert_allclose(hidden[sequence, block], plain, atol=1e-4)


def test_the_first_rows_of_a_causal_block_do_not_depend_on_the_others() -> None:
    head = tiny_head(block_config())
    given = taps_of(6, 2), torch.tensor([[3, 9], [4, 1]]), torch.tensor([[2, 6], [1, 5]])
    with torch.no_grad():
        whole = head(*given)
        assert whole.shape[2] == 5
        for rows in (1, 3):
            assert torch.allclose(head(*given, rows), whole[:, :, :rows], atol=1e-5)


@pytest.mark.parametrize("config", [eagle_config(own_head=False), block_config(own_head=False)])
def test_all_but_the_targets_tables_is_trained(config: EagleConfig | BlockConfig) -> None:
    head = tiny_head(config)
    taps = taps_of(len(TEXT), len(config.taps))
    if isinstance(head, EagleHead):
        logits = head.logits(head(torch.tensor(TEXT).expand(2, 1, -1).mT.repeat(1, 1, 2), taps))
        loss = logits.logsumexp(-1).sum()
    else:
        before = torch.tensor([[4], [5]])
        hidden = head(taps, before, torch.tensor([[3], [6]]))
        seen = before[..., None].expand(2, 1, config.depth)
        logits = head.logits(hidden) + head.pair_logits(seen)
        loss = logits.logsumexp(-1).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    without = {name for name, parameter in head.named_parameters() if parameter.grad is None}
    assert without == {"embed_tokens.weight", "lm_head.weight"}
    dead = {name for name, p in head.named_parameters() if p.grad is not None and not p.grad.abs().sum() > 0}
    assert dead == set()


@pytest.mark.parametrize("ids", [[3, 2], [1, 1], [-1, 4], [0, VOCAB], [0]])
def test_wrong_tokens_are_refused(ids: list[int]) -> None:
    with pytest.raises(ModelError):
        EagleHead(eagle_config(draft_vocab_size=2), ids)


# Guesses of a block head; native and op-by-op passes give the same.


CPU = torch.device("cpu")
GUESSING: dict[str, dict[str, Any]] = {
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
    written = write_tiny_head(tiny_head(block_config(**GUESSING[name]), seed=6), folder / "head")
    head = load_head(HeadFolder(written, target.config, target), model, kernels=kernels)
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
        assert [new is None for new in made.made] == [count == 0 for count in counts]
        last = [old if new is None else new for old, new in zip(last, made.made, strict=True)]
        found += [made.read_RD, made.logits_RU, *(new for new in made.made if new is not None)]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GUESSING)
@pytest.mark.parametrize("levels", [3, 5])
def test_native_calls(tmp_path: Path, native: Kernels, name: str, dtype: torch.dtype, levels: int) -> None:
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
    assert logits_RU.isfinite().all()
    head = one.model.native
    cache = one.cache.attention
    asked = {**right, **wrong}
    last = 0 if asked["last"] is None else asked["last"].data_ptr()
    text = [0, len(asked["table"]), asked["shift"], asked["begin"], 0, asked["rows"]]
    text += (asked["anchor"], last)
    with pytest.raises(IndexError, match="invalid slot or token"):
        head.step(text, [], asked["table"], asked["rows"], block_size=BLOCK, cache=cache)
