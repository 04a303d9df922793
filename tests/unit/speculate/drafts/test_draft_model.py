"""The cache of a draft model or a head: a wrong position costs guesses, never the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specinfer import SamplingParams
from specinfer.plan import PlanEntry
from specinfer.runtime.features import TappedRows, TextFeatures
from specinfer.runtime.runner import ModelRunner
from specinfer.speculate.drafts.draft import CachedText, CachedTexts
from specinfer.speculate.drafts.draft_model import DraftModel
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.policy import SpeculationPolicy
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.token_tree import Expansion
from tests import plans
from tests.engines import Tiny, tiny_of
from tests.plans import outcome
from tests.unit.speculate.guessers import passes_of

TEXT = [9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 11, 12]
GREEDY = SamplingParams(temperature=0, max_tokens=40)


tiny = tiny_of(vocab_size=64, max_context=96)


def draft(tiny: Tiny, *widths: int, max_rows: int = 96) -> DraftModel:
    return shaped(tiny, Shape(Expansion(widths), DrawRule.POINT_MASS), max_rows)


def shaped(tiny: Tiny, shape: Shape, max_rows: int = 96, shortlist: int | None = None) -> DraftModel:
    runner = ModelRunner(tiny.similar, num_blocks=60, block_size=4, shortlist=shortlist)
    return DraftModel("draft", runner, shape, max_rows=max_rows)


def entry(text: list[int], *, blocks: int = 0, max_depth: int = 9, **fields: Any) -> PlanEntry:
    """A decode step after `text`, whose blocks are 30 in a row from number `blocks` on."""
    table = tuple(range(blocks, blocks + 30))
    return plans.entry(list(text), params=GREEDY, max_depth=max_depth, block_table=table, **fields)


def guesses(model: DraftModel, step: PlanEntry, policy: SpeculationPolicy | None = None) -> TokenTree:
    (tree,) = propose(model, step, policy=policy)
    return tree


def propose(
    model: DraftModel, *entries: PlanEntry, policy: SpeculationPolicy | None = None
) -> list[TokenTree]:
    return Ensemble([model], vocab=64, policy=policy or SpeculationPolicy()).propose(plans.plan(*entries))


def test_texts_of_common_tokens_are_guessed_from_the_shortlist(tiny: Tiny) -> None:
    """With a text of other tokens in the batch, all texts are guessed from all tokens."""
    every, some = (Shape(Expansion((width,)), DrawRule.POINT_MASS) for width in (63, 24))
    common, rare = entry(TEXT), entry([*TEXT[2:], 40, 41], blocks=30, request_id="other")
    ranked = {step.block_table[0]: guesses(shaped(tiny, every), step).token_ids for step in (common, rare)}
    short = [token for token in ranked[0] if token < 32]
    assert [*guesses(shaped(tiny, some, shortlist=32), common).token_ids] == short[:25]
    assert guesses(shaped(tiny, every, shortlist=32), rare).token_ids == ranked[30]
    both = propose(shaped(tiny, some, shortlist=32), common, rare)
    assert [tree.token_ids for tree in both] == [ranked[0][:25], ranked[30][:25]]
    assert ModelRunner(tiny.similar, num_blocks=1, block_size=4, shortlist=64).shortlist is None, "all"


def test_a_path_through_later_siblings_leaves_a_cache_as_good_as_new(tiny: Tiny) -> None:
    model = draft(tiny, 3, 2, 2)
    #      0
    #    / | \
    #   1  2  3
    #      ..  \\
    #     .. . 8 9       committed: node 3, then its second child 9, then a bonus token of another's
    tree = guesses(model, entry(TEXT))
    assert tree.parents[:10] == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3)
    committed = (tree.token_ids[3], tree.token_ids[9], 17)
    model.observe([outcome(*committed)])
    text = [*TEXT, *committed]
    assert guesses(model, entry(text)).token_ids == guesses(draft(tiny, 3, 2, 2), entry(text)).token_ids


class Choosing(SpeculationPolicy):
    """Goes on below these of the ends, by their place among all: a row for each level."""

    def __init__(self, *places: tuple[int, ...]) -> None:
        self.places = [*places]
        self.asked: list[tuple[int, ...]] = []

    def worth_deepening(self, speculator: str, *asked: Any) -> list[Sequence[int]]:
        [nodes] = asked[-1]
        self.asked.append(tuple(nodes))
        return [[nodes[place] for place in self.places.pop(0)] if self.places else ()]


LEARNED = Shape(Expansion((1, 1)), DrawRule.POINT_MASS, learned=True, min_probability=0.0, min_path=0.0)


def test_a_learned_tree_grows_below_any_of_its_nodes(tiny: Tiny) -> None:
    #        0
    #     / / \  \
    #    1 2   3  4       first below 2 and 4, then below 1, which had been left, and 2's last child, 8
    #    . ....   ....
    model, policy = shaped(tiny, LEARNED), Choosing((1, 3), (0, 5))
    tree = guesses(model, entry(TEXT), policy)
    assert policy.asked == [(1, 2, 3, 4), (1, 3, *range(5, 13)), (3, *range(5, 8), *range(9, 21))]
    assert tree.parents == (-1, *[0] * 4, *[2] * 4, *[4] * 4, *[1] * 4, *[8] * 4)
    for node in (0, 2, 4, 1, 8):
        alone = guesses(draft(tiny, 4), entry([*TEXT, *tree.path_tokens(node)]))
        assert [*tree.children()[node]] == [*alone.token_ids[1:]]


def test_a_path_through_nodes_that_were_run_in_turns_leaves_a_cache_as_good_as_new(tiny: Tiny) -> None:
    model = shaped(tiny, LEARNED)
    tree = guesses(model, entry(TEXT), Choosing((1, 3), (0, 5)))
    committed = (*tree.path_tokens(20), 17)  # 2, 8 and 20; the last one was not run
    model.observe([outcome(*committed)])
    text = [*TEXT, *committed]
    assert model.begin(plans.plan(entry(text))) == [2]
    assert guesses(model, entry(text)).token_ids == guesses(shaped(tiny, LEARNED), entry(text)).token_ids


def test_only_what_the_cache_lacks_is_read_again(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = draft(tiny, 1, 1, 1)
    first = guesses(model, entry(TEXT))
    committed = (*first.token_ids[1:], 17)  # the third guess was never run, the bonus token not guessed
    model.observe([outcome(*committed)])
    passes = passes_of(model._runner, monkeypatch)
    guesses(model, entry([*TEXT, *committed]))
    assert passes[0] == [[first.token_ids[3], 17]]


def test_a_preempted_request_is_read_anew_into_its_new_blocks(tiny: Tiny) -> None:
    model = draft(tiny, 2, 2)
    guesses(model, entry(TEXT))
    model.observe([outcome(17)])
    text = [*TEXT, 17]
    moved = guesses(model, entry(text, blocks=30, generation=1))
    assert moved.token_ids == guesses(draft(tiny, 2, 2), entry(text)).token_ids


def lengths(passes: list[list[list[int]]]) -> list[list[int]]:
    """The number of rows that each request has in each pass."""
    return [[*map(len, rows)] for rows in passes]


def test_a_prompt_is_read_in_step_with_the_target(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = draft(tiny, 2, 2)
    passes = passes_of(model._runner, monkeypatch)
    for start, end in [(0, 5), (5, 10), (10, 12)]:  # the last chunk ends in the root alone
        nodes = int(end == len(TEXT))
        assert propose(model, entry(TEXT, start=start, end=end, max_nodes=nodes, max_depth=0)) == nodes * [
            TokenTree((TEXT[-1],), (-1,))
        ]
    assert lengths(passes) == [[5], [5], [2]]
    text = [*TEXT, 17]
    assert guesses(model, entry(text)).token_ids == guesses(draft(tiny, 2, 2), entry(text)).token_ids
    assert lengths(passes[3:]) == [[1], [2]]


@pytest.mark.parametrize(("max_rows", "steps"), [(1, 12), (5, 3), (11, 2), (12, 1)])
def test_a_long_text_in_steps(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, max_rows: int, steps: int) -> None:
    model = draft(tiny, 2, 2, max_rows=max_rows)
    passes = passes_of(model._runner, monkeypatch)
    trees = [guesses(model, entry(TEXT)) for _ in range(steps)]
    assert max(lengths(passes[:-1])) == [max_rows]  # the last pass is the frontier
    assert [tree.num_nodes for tree in trees[:-1]] == [1] * (steps - 1)
    assert trees[-1].token_ids == guesses(draft(tiny, 2, 2), entry(TEXT)).token_ids


def test_a_tree_is_no_deeper_than_the_step_and_the_drafts_context_allow(tiny: Tiny) -> None:
    assert max(guesses(draft(tiny, 1, 1, 1), entry(TEXT, max_depth=2)).depths()) == 2
    long = [t % 64 for t in range(94)]  # the draft's context is 96
    assert max(guesses(draft(tiny, 1, 1, 1), entry(long)).depths()) == 2
    assert guesses(draft(tiny, 1, 1, 1), entry([*long, 1, 2])).num_nodes == 1


def test_a_request_that_ended_is_forgotten_and_its_id_may_come_again(tiny: Tiny) -> None:
    model = draft(tiny, 2, 2)
    guesses(model, entry(TEXT))
    model.observe([outcome(finished=True)])
    other = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]
    assert guesses(model, entry(other)).token_ids == guesses(draft(tiny, 2, 2), entry(other)).token_ids


A, B, C = b"98 76", b"98 76 54 32", b"98 76 54 32 10 11 12"  # hashes of TEXT's blocks of 4


def read(tiny: Tiny, model: DraftModel, monkeypatch: pytest.MonkeyPatch, step: PlanEntry) -> list[int]:
    """The rows of a step's first pass; its guesses equal those of a draft that runs everything."""
    with monkeypatch.context() as patch:
        passes = passes_of(model._runner, patch)
        tree = guesses(model, step)
    assert tree.token_ids == guesses(draft(tiny, 2, 2), step).token_ids
    return passes[0][0]


def test_a_request_starts_behind_known_blocks(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = draft(tiny, 2, 2)
    for text in (TEXT[:9], TEXT[:10]):  # blocks count once the text has gone past them
        guesses(model, entry(text, block_hashes=(A, B)))
        model.observe([outcome(text[-1])])
    model.observe([outcome(finished=True)])
    for name, text, hashes, expected in [
        ("same", TEXT[:10], (A, B), [1, 0]),
        ("longer", [*TEXT, 13], (A, B, C), [1, 0, 11, 12, 13]),
        ("ends with a block", TEXT[:8], (A, B), [5, 4, 3, 2]),  # the root is always run
        ("parts in block 1", [*TEXT[:6], 3, 3, 3], (A, b"other"), [5, 4, 3, 3, 3]),
        ("reuse is off", TEXT[:10], (), TEXT[:10]),
    ]:
        assert (
            read(tiny, model, monkeypatch, entry(text, request_id=name, block_hashes=hashes)) == expected
        ), name


def test_a_block_that_got_another_text_is_new(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = draft(tiny, 2, 2)
    for text in (TEXT[:9], TEXT[:10]):
        guesses(model, entry(text, block_hashes=(A, B)))
        model.observe([outcome(text[-1])])
    model.observe([outcome(finished=True)])
    other = [3, 1, 4, 1, 5, 9]
    assert read(tiny, model, monkeypatch, entry(other, request_id="o", block_hashes=(b"3 1 4 1",))) == other
    model.observe([outcome(request_id="o", finished=True)])
    assert (
        read(tiny, model, monkeypatch, entry(TEXT[:10], request_id="again", block_hashes=(A, B))) == TEXT[:10]
    )


POSITIONS = [*range(40)]
HASHES = [bytes([i]) for i in range(10)]


def step_of(name: str = "a", start: int = 0, **fields: Any) -> PlanEntry:
    settled: dict[str, Any] = {"block_table": range(10), "block_hashes": HASHES, "start": start, "end": 40}
    return plans.entry(POSITIONS, request_id=name, **{**settled, **fields})


def heard(texts: CachedTexts, start: int, count: int, **fields: Any) -> CachedText:
    """Return the text after `count` hidden states from `start` on; each state encodes its position."""
    step = step_of(start=start, **fields)
    states = torch.arange(start, start + count, dtype=torch.float32)[:, None, None]
    texts.receive_states(TextFeatures(step, start, TappedRows(states, range(count))))
    return texts.of(step, step.start)


def taken(texts: CachedTexts, text: CachedText, step: PlanEntry) -> list[int]:
    """Read all that waits, as a head does; the positions that were read."""
    texts.claim(text, step)
    count = text.unread.end - text.cached
    positions = [int(p) for part in text.unread.take(count) for p in part.copied().flatten()] if count else []
    text.cached += count
    return positions


def test_what_follows_is_read_in_order() -> None:
    texts = CachedTexts(block_size=4, max_unread=100)
    text = heard(texts, 0, 5)
    assert taken(texts, text, step_of()) == [0, 1, 2, 3, 4]
    heard(texts, 5, 2)
    assert taken(texts, heard(texts, 7, 1), step_of()) == [5, 6, 7]
    assert (text.origin, text.cached) == (0, 8)


def test_blocks_that_it_read_for_another_are_not_read_again() -> None:
    texts = CachedTexts(block_size=4, max_unread=100)
    text = heard(texts, 0, 10)
    taken(texts, text, step_of())
    texts.claim(text, step_of())  # as the next step does
    other = heard(texts, 8, 3, name="b")
    assert (other.origin, other.cached, other.unread.end) == (0, 8, 11)
    # The target found only two cached blocks, so the third one is computed again.
    assert heard(texts, 4, 3, name="c").cached == 4
    changed = [HASHES[0], b"other", *HASHES[2:]]
    assert heard(texts, 8, 3, name="d", block_hashes=changed).origin == 8
    texts.forget("a")
    assert heard(texts, 8, 3, name="e").cached == 8


def test_what_is_not_made_of_the_whole_text_is_for_nobody_else() -> None:
    texts = CachedTexts(block_size=4, max_unread=100)
    text = heard(texts, 5, 20)
    assert text.origin == 8
    taken(texts, text, step_of())
    texts.claim(text, step_of())
    assert heard(texts, 16, 3, name="b").origin == 16
