"""Where drafts' guesses end in likely tokens, those that look guesses up go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specinfer.plan import PlanEntry
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.fixed_policy import FixedPolicy
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from tests import plans
from tests.unit.speculate.guessers import Fan, Following, Levels, entry


def extended(
    asked: PlanEntry, *confidences: float, follow: Sequence[int] = (20, 21)
) -> tuple[TokenTree, list[tuple[tuple[int, ...], int]]]:
    """What becomes of a draft's chain 10, 11, ... beside n-grams that know 10 and 15, and a suffix tree."""
    known, goes_on = Fan("ngram", [10, 15]), Following("suffix", follow)
    draft = Levels("draft", range(10, 10 + len(confidences)), confidences)
    ensemble = Ensemble([known, goes_on, draft], vocab=99, policy=FixedPolicy())
    (tree,) = ensemble.propose(plans.plan(asked))
    tree.check_integrity()
    return tree, goes_on.asked


def test_where_a_drafts_guesses_end_in_likely_tokens_others_go_on() -> None:
    tree, asked = extended(entry(9), 0.9, 0.8)
    assert asked == [((10, 11), 4)]  # 3 tokens more are worth guessing: 5 in all
    assert {tree.path_tokens(node) for node in range(1, tree.num_nodes)} == {
        *((10,), (10, 11), (15,)),
        *((10, 11, 20), (10, 11, 20, 21)),
    }
    assert [draw.speculator for draw in tree.draws if tree.token_ids[draw.node] >= 20] == ["suffix"] * 2


@pytest.mark.parametrize(
    ("asked", "confidences", "why"),
    [
        (entry(9), (0.5, 0.5), "a quarter is not likely enough"),
        (entry(9, max_depth=2), (0.9, 0.9), "nothing deeper is worth guessing"),
        (entry(9, speculators=("draft", "ngram")), (0.9, 0.9), "it may not guess for this request"),
        (entry(9, speculators=("ngram", "suffix")), (0.9, 0.9), "n-grams' own ends are no draft's"),
    ],
)
def test_other_ends_are_left_alone(asked: PlanEntry, confidences: tuple[float, ...], why: str) -> None:
    tree, told = extended(asked, *confidences)
    assert told == [], why
    assert max(tree.token_ids) < 20


def test_extensions_take_no_better_guess_its_room() -> None:
    tree, _ = extended(entry(5), 0.9, 0.8)
    assert {tree.path_tokens(node) for node in range(1, tree.num_nodes)} == {
        *((10,), (10, 11), (15,)),  # .9, .72, .5
        (10, 11, 20),  # .36, and 21 below it .18
    }


@pytest.mark.parametrize("follow", [(99,), (-1,)])
def test_who_extends_by_what_is_no_tree_is_not_asked_again(
    follow: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    tree, _ = extended(entry(9), 0.9, 0.8, follow=follow)
    assert sorted(tree.token_ids) == [7, 10, 11, 15]
    assert [r.getMessage() for r in caplog.records] == [
        "speculator 'suffix' failed and is not asked again; texts go on without it"
    ]


class Samples(Following):
    """Extends by what it says it has sampled."""

    def extend(self, entry: PlanEntry, path: Sequence[int], most: int) -> TokenTree:
        builder = TreeBuilder(path[-1], most)
        builder.add(0, 20, self.name, DrawRule.IID)
        return builder.build()


def test_extensions_are_point_masses(caplog: pytest.LogCaptureFixture) -> None:
    ensemble = Ensemble([Samples("wrong", []), Levels("draft", [10], [0.9])], vocab=99, policy=FixedPolicy())
    (tree,) = ensemble.propose(plans.plan(entry(9)))
    assert tree.token_ids == (7, 10)
    assert caplog.records[0].exc_info is not None
    assert "extends by samples" in str(caplog.records[0].exc_info[1])


class Ending:
    """A request's processors of which only its end counts."""

    bans = False
    ending = frozenset({11, 20})


def test_nothing_is_guessed_behind_the_end_of_a_text() -> None:
    processors: Any = Ending()
    assert max(extended(entry(9, processors=processors), 0.9, 0.8)[0].token_ids) == 15  # 11 ends it
    tree, _ = extended(entry(9, processors=processors), 0.9)
    assert (10, 20) in {tree.path_tokens(node) for node in range(tree.num_nodes)}
    assert 21 not in tree.token_ids
