"""The modules of heads against plain loops, and what of them is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specinfer.errors import ModelError
from specinfer.heads.block import BlockHead
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.eagle import EagleHead
from tests.heads import SIZE, VOCAB, block_config, eagle_config, tiny_body, tiny_head
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
    assert isinstance(head, EagleHead)
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
    assert isinstance(head, BlockHead)
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
    assert isinstance(head, BlockHead)
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
    dead = {
        name for name, p in head.named_parameters() if p.grad is not None and not bool(p.grad.abs().sum() > 0)
    }
    assert dead == set()


@pytest.mark.parametrize("ids", [[3, 2], [1, 1], [-1, 4], [0, VOCAB], [0]])
def test_wrong_tokens_are_refused(ids: list[int]) -> None:
    with pytest.raises(ModelError):
        EagleHead(eagle_config(draft_vocab_size=2), ids)
