"""Trees sized by cost leave the law of the text unchanged, by exact enumeration.

The production code drafts, sizes and merges: draft models over made-up logits, CostPolicy, Ensemble. Whether
a level is guessed may depend on every draw before it, never on the draws that are to be made.
"""

import pytest

from specinfer.speculate import ensemble
from specinfer.speculate.policy import choose
from specinfer.tree.draw import DrawRule

from .enumeration import Supports, far
from .sized_trees import PARAMS, VOCAB, Guarded, MadeUpRunner, Sized, Wayward

EXACT, SEEN = 1e-9, 1e-3
LENGTH = 2  # tokens, so that both levels of a tree count
IID, WITHOUT, POINT = DrawRule.IID, DrawRule.WITHOUT_REPLACEMENT, DrawRule.POINT_MASS


DRAFTS = {
    "a chain": [("a", IID, (1, 1))],
    "i.i.d. draws": [("a", IID, (2, 1))],
    "without replacement": [("a", WITHOUT, (2, 1))],
    "two drafts": [("a", IID, (1, 1)), ("b", WITHOUT, (2,))],
}


# Nothing in these is sampled: they are pruned by value.
PRUNED = {"top-k": [("a", POINT, (2, 1))], "nobody": []}


def play(drafts, pass_, monkeypatch, seed=5, sizes_by=Sized, **sizes):
    """The guesser after all texts of a world, and how far their law is from the target's."""
    world = Supports(vocab=VOCAB, params=PARAMS, seed=seed)
    sized = sizes_by(drafts, pass_, monkeypatch, **sizes)
    return sized, far(world, [sized], LENGTH)


@pytest.mark.thorough
@pytest.mark.parametrize("points", ["no", "first", "last"])
@pytest.mark.parametrize("drafts", [*DRAFTS.values(), *PRUNED.values()], ids=[*DRAFTS, *PRUNED])
@pytest.mark.parametrize("pass_", [0.01, 0.2])  # nothing is spared, and much
def test_the_law_of_the_text_is_the_targets(drafts, pass_, points, monkeypatch):
    assert play(drafts, pass_, monkeypatch, points=points)[1] < EXACT


@pytest.mark.parametrize("points", ["no", "first"])
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_a_guard_that_ends_guesses_behind_some_texts_leaves_the_law_as_it_is(drafts, points, monkeypatch):
    sized, far = play(drafts, 0.2, monkeypatch, sizes_by=Guarded, points=points)
    assert far < EXACT
    assert sized.held == {True, False}
    assert min(sized.depths) == 0, "nobody guesses behind some"
    assert max(sized.depths) > 0, "and somebody behind others"


@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_a_shortlist_of_logits_leaves_the_law_as_it_is(drafts, monkeypatch):
    made, launch = set(), MadeUpRunner.launch

    def watched(self, rows, *, few):
        made.add(few)
        return launch(self, rows, few=few)

    monkeypatch.setattr(MadeUpRunner, "launch", watched)
    monkeypatch.setattr(MadeUpRunner, "shortlist", 2)
    assert play(drafts, 0.01, monkeypatch)[1] < EXACT
    assert made == {True, False}, "texts with token 2 get all logits"


LEARNED = {
    **DRAFTS,
    "samples and learned": [("a", IID, (2, 1)), ("b", POINT, (1, 1))],
    "learned and samples": [("b", POINT, (1, 1)), ("a", WITHOUT, (2, 1))],
}


@pytest.mark.parametrize("drafts", LEARNED.values(), ids=LEARNED)
def test_below_which_nodes_a_draft_goes_on_may_depend_on_all_that_was_drawn(drafts, monkeypatch, caplog):
    sized, far = play(drafts, 0.01, monkeypatch, sizes_by=Wayward)
    assert far < EXACT
    assert any(some > 0 for some, _ in sized.parts)
    assert any(some < all_ for some, all_ in sized.parts)
    assert sized.shown == set(), "what would be drawn below an end is not there when it is chosen"
    assert not caplog.records, "it was asked to the end"


def only_samples(tree):
    """A mutant of `pinned_nodes`: nodes before a sample may be dropped."""
    return {draw.node for draw in tree.draws if draw.rule in (IID, WITHOUT)}


def test_dropping_a_guess_that_comes_before_samples_is_seen(monkeypatch):
    # Guesses before the samples fit only if both samples are the same token.
    monkeypatch.setattr(ensemble, "any_sampled", lambda draws: False)
    monkeypatch.setattr(choose, "pinned_nodes", only_samples)
    sizes = {"points": "first", "max_nodes": 4}
    assert play(DRAFTS["i.i.d. draws"], 0.01, monkeypatch, seed=8, **sizes)[1] > SEEN


@pytest.mark.thorough
@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_dropping_samples_for_their_value_is_seen(drafts, monkeypatch):
    monkeypatch.setattr(choose, "pinned_nodes", lambda tree: set())
    assert play(drafts, 0.01, monkeypatch)[1] > SEEN
