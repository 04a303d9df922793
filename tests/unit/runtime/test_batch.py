"""Rows to tensors: slots and paths, as literals a person can check; and the rows that become text."""

from __future__ import annotations

import torch

from specinfer.runtime import batch as batches
from specinfer.runtime.batch import ModelBatch, Rows, build_batch, chain_rows, likelihoods, logit_rows
from specinfer.runtime.features import text_rows
from specinfer.sampling_params import SamplingParams
from specinfer.tree import TokenTree, TreeBuilder
from specinfer.tree.token_tree import single_node
from tests.plans import entry, plan


def build(*rows: Rows) -> ModelBatch:
    return build_batch(rows, block_size=4, device=torch.device("cpu"))


def paths(batch: ModelBatch) -> list[list[int]]:
    """The slots every row attends to, in order."""
    p = batch.paths
    found = []
    for request, (first, end, _, _) in enumerate(p.requests_R4.tolist()):
        slots = p.slots(request).tolist()
        for t in range(first, end):
            tail = p.tails[p.tail_ends[t] : p.tail_ends[t + 1]].tolist()
            found.append([*slots[: p.shared_T[t]], *(slots[i] for i in tail)])
            assert found[-1][-1] == slots[t - end], "a row's own slot is that of one of the last positions"
    assert len(found) == len(p.shared_T) == len(p.tail_ends) - 1
    return found


def test_a_chunk_of_a_prompt_sees_what_is_before_it() -> None:
    batch = build(chain_rows([7, 8, 9], 2, [5, 6], logits=True))
    assert batch.token_ids_T.tolist() == [7, 8, 9]
    assert batch.positions_T.tolist() == [2, 3, 4]
    assert paths(batch) == [[20, 21, 22], [20, 21, 22, 23], [20, 21, 22, 23, 24]]
    assert batch.paths.tables_B.tolist() == [5, 6]
    assert batch.paths.requests_R4.tolist() == [[0, 3, 0, 5]]
    assert batch.logit_rows.tolist() == [2]


def test_a_node_sees_the_text_its_ancestors_and_itself() -> None:
    #  root 4 at position 3     1: 5   2: 7 (siblings)   3: 6 below 1
    batch = build(Rows([4, 5, 7, 6], 3, [0, 1], 0, [-1, 0, 0, 1]))
    assert batch.positions_T.tolist() == [3, 4, 4, 5]
    assert paths(batch) == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 2, 3, 4, 6]]
    assert batch.paths.tails.tolist() == [5, 4, 6]  # node 1 stands where a token of text would
    assert batch.logit_rows is None


def test_a_prompt_followed_by_a_tree() -> None:
    # Blocks 5 and 2: positions 0..3 are slots 20..23, position 4 is slot 8.
    batch = build(Rows([1, 2, 4, 5, 7], 0, [5, 2], 2, [-1, 0, 0]))
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 3]
    assert paths(batch) == [[20], [20, 21], [20, 21, 22], [20, 21, 22, 23], [20, 21, 22, 8]]
    assert batch.logit_rows.tolist() == [2, 3, 4]


def test_the_frontier_of_a_half_grown_tree_sees_nodes_that_are_in_the_cache() -> None:
    #  root 0 at position 2; children 1, 2 in the cache; 3 below 1 and 4 below 2 are run now
    batch = build(Rows([30, 40], 5, [0, 1], 0, [-1, 0, 0, 1, 2]))
    assert batch.positions_T.tolist() == [4, 4]
    assert paths(batch) == [[0, 1, 2, 3, 5], [0, 1, 2, 4, 6]]


def test_requests_follow_one_another() -> None:
    batch = build(
        chain_rows([1, 2], 0, [0], logits=False),
        Rows([5, 6, 7], 1, [7], 0, [-1, 0, 0]),
        chain_rows([3], 6, [4, 5], logits=True),
    )
    assert batch.paths.requests_R4.tolist() == [[0, 2, 0, 2], [2, 5, 1, 4], [5, 6, 2, 7]]
    assert batch.paths.tables_B.tolist() == [0, 7, 4, 5]
    assert paths(batch) == [
        *([0], [0, 1]),
        *([28, 29], [28, 29, 30], [28, 29, 31]),
        [16, 17, 18, 19, 20, 21, 22],
    ]
    assert batch.positions_T.tolist() == [0, 1, 1, 2, 2, 6]
    assert batch.logit_rows.tolist() == [2, 3, 4, 5]


def test_a_step_knows_whose_logits_are_likely_asked_for() -> None:
    builder = TreeBuilder(root=3)
    builder.add(0, 5, "draft", confidence=0.25)
    scored = entry([1, 2, 3], rows=3, params=SamplingParams(prompt_logprobs=0))
    prompt = entry([1, 2, 3, 4], rows=2, max_nodes=0, request_id="read")
    trees = [builder.build(), single_node(3)]
    step = plan(entry([1, 2, 3]), prompt, scored)
    rows = logit_rows(step, trees)
    assert (rows.count, rows.roots, rows.scored) == (5, [0, 4], [(scored, range(2, 4))])
    assert likelihoods(step, trees) == [1.0, 0.25, 0.0, 0.0, 1.0]
    wanted = [len(part.token_ids) - part.logits_from for part in batches.step_rows(step, trees)]
    assert wanted == [2, 0, 3]


def test_rows_of_prompts_roots_and_accepted_paths_become_text() -> None:
    text = [1, 2, 3, 4, 5, 6, 7]
    tree = TokenTree((7, 20, 21, 22, 23), (-1, 0, 0, 2, 2))
    step = plan(
        entry(text, request_id="chunk", start=0, end=4, max_nodes=0),
        entry(text, request_id="tree", start=6, end=7),
        entry(text, request_id="ends", start=6, end=7),
        entry(text, request_id="whole", start=4, end=7, max_nodes=1),
    )
    trees = [tree, tree, TokenTree((7,), (-1,))]
    found = text_rows(step, trees, [(2, 4), None, ()])
    # Rows of the pass: 0-3 the chunk, 4-8 a tree, 9-13 another, 14-16 the end of a prompt.
    names = [one.request.request_id for one in found.entries]
    assert dict(zip(names, found.rows, strict=True)) == {
        "chunk": [0, 1, 2, 3],
        "tree": [4, 6, 8],
        "whole": [14, 15, 16],
    }
    few = found.where(lambda one: one.request.request_id != "tree")
    assert few.rows == [[0, 1, 2, 3], [14, 15, 16]]
