"""Our logits against transformers', float32: a whole prompt, token by token, and over a token tree."""

from __future__ import annotations

import pytest
import torch

from specinfer.models.weights import load_model
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import ModelRunner
from tests.kernels import NAMES, kernels

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


@pytest.fixture(
    params=[(name, tied, run) for name in CASES for tied in (True, False) for run in NAMES],
    ids=str,
    scope="module",
)
def both(request, tmp_path_factory):
    """A transformers model, and ours loaded from the folder it was saved to."""
    name, tied, run = request.param
    folder = tmp_path_factory.mktemp(name)
    theirs = save_random(name, folder, tied=tied)
    ours = load_model(folder, dtype=torch.float32, device=torch.device("cpu"), kernels=kernels(run))
    assert ours.config.tie_embeddings == tied
    return theirs, ours


def runner_of(model):
    return ModelRunner(model, num_blocks=10, block_size=BLOCK)


@torch.no_grad()
def logits_of(theirs, token_ids):
    return theirs(torch.tensor([token_ids])).logits[0]


@pytest.mark.few(57)
def test_a_whole_prompt(both):
    theirs, ours = both
    rows = Rows(PROMPT, 0, CONTIGUOUS, 0)
    torch.testing.assert_close(
        runner_of(ours).forward([rows]), logits_of(theirs, PROMPT), atol=TOLERANCE, rtol=0
    )


@pytest.mark.thorough
@pytest.mark.parametrize("block_table", [SCATTERED, CONTIGUOUS], ids=["scattered", "contiguous"])
def test_token_by_token_over_the_cache(both, block_table):
    theirs, ours = both
    runner = runner_of(ours)
    got = [
        runner.forward([chain_rows([token], i, block_table, logits=True)])[0]
        for i, token in enumerate(PROMPT)
    ]
    torch.testing.assert_close(torch.stack(got), logits_of(theirs, PROMPT), atol=TOLERANCE, rtol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("block_table", [SCATTERED, CONTIGUOUS], ids=["scattered", "contiguous"])
def test_every_path_of_a_tree(both, block_table):
    theirs, ours = both
    runner = runner_of(ours)
    before = len(PROMPT) - 1
    runner.forward([chain_rows(PROMPT[:before], 0, block_table, logits=False)])
    whole = Rows(TREE_TOKENS, before, block_table, 0, TREE_PARENTS)
    # As a draft grows it: the nodes of one depth at a time.
    levels = [(0, 1), (1, 3), (3, 5), (5, 7)]
    grown = [Rows(TREE_TOKENS[a:b], before + a, block_table, 0, TREE_PARENTS[:b]) for a, b in levels]
    got = runner.forward([whole])
    torch.testing.assert_close(torch.cat([runner.forward([r]) for r in grown]), got, atol=TOLERANCE, rtol=0)
    want = torch.stack([logits_of(theirs, PROMPT + path)[-1] for path in TREE_PATHS])
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.few(57)
def test_two_requests_in_one_pass(both):
    theirs, ours = both
    runner = runner_of(ours)
    other = PROMPT[::-1][:7]
    rows = [chain_rows(PROMPT, 0, [6, 2, 9], logits=True), chain_rows(other, 0, [0, 1], logits=True)]
    want = torch.stack([logits_of(theirs, PROMPT)[-1], logits_of(theirs, other)[-1]])
    torch.testing.assert_close(runner.forward(rows), want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("run", NAMES)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "opt"])
def test_bf16_stays_near_float32(name, run, tmp_path):
    """The packed bf16 products: not to 1e-4, but the same model."""
    theirs = save_random(name, tmp_path, tied=False)
    ours = load_model(tmp_path, dtype=torch.bfloat16, device=torch.device("cpu"), kernels=kernels(run))
    rows = Rows(PROMPT, 0, CONTIGUOUS, 0)
    got, want = runner_of(ours).forward([rows]), logits_of(theirs, PROMPT)
    assert got.dtype is torch.bfloat16
    assert (got.float() - want).abs().max() < 0.05 * want.abs().max()
