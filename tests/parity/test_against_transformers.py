"""Our logits against transformers', float32: a whole prompt, token by token, and over a token tree."""

from __future__ import annotations

import pytest
import torch

from specinfer.runtime.batch import Rows, chain_rows
from tests.kernels import NAMES
from tests.loading import load
from tests.states import StateRunner

from .families import CASES, save_random

TOLERANCE = 1e-4
PROMPT = [5, 17, 40, 3, 88, 61, 12, 12, 70, 29, 9, 54]
BLOCK = 4
# Blocks out of order, so that K and V are gathered; and in order, so that they are read where they lie.
SCATTERED, CONTIGUOUS = [6, 2, 9, 1, 5, 0, 3], [1, 2, 3, 4, 5, 6, 7]

#   54 (last prompt token)
#    |--- 7 --- 8 --- 30
#    |          `---- 31
#    `--- 20 -- 8
TREE_TOKENS = [54, 7, 20, 8, 8, 30, 31]
TREE_PARENTS = [-1, 0, 0, 1, 2, 3, 3]
TREE_PATHS = [[], [7], [20], [7, 8], [20, 8], [7, 8, 30], [7, 8, 31]]  # below the root, per node


def runner_of(model):
    return StateRunner(model, num_blocks=10, block_size=BLOCK)


@torch.no_grad()
def logits_of(theirs, token_ids):
    return theirs(torch.tensor([token_ids])).logits[0]


def each_token(ours, table):
    """Logits of the prompt, token by token over the cache."""
    runner = runner_of(ours)
    rows = [[chain_rows([token], i, table, logits=True)] for i, token in enumerate(PROMPT)]
    return torch.stack([runner.forward(row)[0] for row in rows])


def each_node(ours, table):
    """Logits of the tree in one pass; grown level by level, as a draft grows it, they are the same."""
    before = len(PROMPT) - 1
    both = runner_of(ours), runner_of(ours)
    for runner in both:
        runner.forward([chain_rows(PROMPT[:before], 0, table, logits=False)])
    whole = both[0].forward([Rows(TREE_TOKENS, before, table, 0, TREE_PARENTS)])
    levels = [(0, 1), (1, 3), (3, 5), (5, 7)]
    grown = [Rows(TREE_TOKENS[a:b], before + a, table, 0, TREE_PARENTS[:b]) for a, b in levels]
    torch.testing.assert_close(
        torch.cat([both[1].forward([r]) for r in grown]), whole, atol=TOLERANCE, rtol=0
    )
    return whole


# Each family with both kernels, once tied to its embeddings and once not.
@pytest.mark.few(30)
@pytest.mark.parametrize(
    ("name", "tied", "run"),
    [(name, (i + j) % 2 == 0, run) for i, name in enumerate(CASES) for j, run in enumerate(NAMES)],
)
def test_a_prompt_its_tokens_a_tree_and_a_batch(name, tied, run, tmp_path):
    theirs = save_random(name, tmp_path, tied=tied)
    ours = load(tmp_path, run)
    assert ours.config.tie_embeddings == (tied and bool(theirs._tied_weights_keys))

    prompt, other = logits_of(theirs, PROMPT), PROMPT[::-1][:7]
    tree = torch.stack([logits_of(theirs, PROMPT + path)[-1] for path in TREE_PATHS])
    both = [chain_rows(PROMPT, 0, [6, 2, 9], logits=True), chain_rows(other, 0, [0, 1], logits=True)]
    batch = torch.stack([prompt[-1], logits_of(theirs, other)[-1]])
    for what, got, want in (
        ("prompt", runner_of(ours).forward([Rows(PROMPT, 0, CONTIGUOUS, 0)]), prompt),
        ("tokens, scattered", each_token(ours, SCATTERED), prompt),
        ("tokens, contiguous", each_token(ours, CONTIGUOUS), prompt),
        ("tree, scattered", each_node(ours, SCATTERED), tree),
        ("tree, contiguous", each_node(ours, CONTIGUOUS), tree),
        ("two requests", runner_of(ours).forward(both), batch),
    ):
        assert (got - want).abs().max() <= TOLERANCE, what
