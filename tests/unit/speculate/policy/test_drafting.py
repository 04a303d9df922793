"""Start of a draft: the cost of reading is weighed against the expected gain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specinfer.plan import PlanEntry
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.policy.acceptance import AcceptanceRates
from specinfer.speculate.policy.choose import StepCosts
from specinfer.speculate.policy.drafting import (
    Drafting,
    GrowingGuesses,
    PricedDraft,
    children_each,
    keep_largest,
    useful_levels,
)
from specinfer.tree import TokenTree
from specinfer.tree.token_tree import Expansion, single_node
from tests.unit.speculate.policy.priced import entry, unlearning


class Starting:
    """When a draft starts whose pass takes `level` seconds, and `row` more for each row; a step takes 1 s."""

    def __init__(self, level: float, row: float) -> None:
        curve = CostCurve((1, 1000), (level, level + 999 * row))
        self.acceptance = AcceptanceRates({"draft": 1})
        self.levels = self.acceptance.levels["draft"]
        self.drafting = Drafting(PricedDraft(unlearning("draft", curve), Expansion((1,))), self.levels)

    def for_one(self, one: PlanEntry, unread: int) -> bool:
        """Whether it starts for one request, where others have guessed nothing."""
        growing = GrowingGuesses(one, single_node(7), self.acceptance)
        step = StepCosts(passes=[1.0], prompts=0.0, row=0.0, tokens=1.0)
        [start] = self.drafting.starts([one], [unread], {one.request.request_id: growing}, step)
        return start


def predicted(one: PlanEntry) -> PlanEntry:
    return replace(one, request=replace(one.request, prediction=(1, 2)))


def prompt(room: int = 100) -> PlanEntry:
    """The last chunk of a prompt, where no speculator can guess yet."""
    return replace(entry(room=room, rows=9), max_nodes=1)


@pytest.mark.parametrize(
    ("reading", "room", "plain", "with_prediction"),
    [  # expected tokens per step: .7 for 1 request, .21 for 8; so 41 and 2.5 in 100 tokens, a second each
        (2.0, 100, True, True),
        (10.0, 100, True, False),
        (18.0, 100, True, False),
        (50.0, 100, False, False),
        (10.0, 20, False, False),
        (0.3, 2, True, False),
        (0.0, 1, False, False),  # one without speculators, and a last one that needs no guess
    ],
)
def test_who_brings_a_prediction_is_thought_to_need_a_draft_less(
    reading: float, room: int, plain: bool, with_prediction: bool
) -> None:
    def reads(one: PlanEntry) -> bool:
        return Starting(0.01, reading / 500).for_one(one, unread=500)

    assert (reads(prompt(room)), reads(predicted(prompt(room)))) == (plain, with_prediction)


@pytest.mark.parametrize(
    ("best", "rate", "price", "levels"),
    [(0.8, 0.5, 0.1, 4.0), (0.1, 0.5, 0.1, 1.0), (0.05, 0.9, 0.1, 1.0), (0.5, 0.0, 0.1, 1.0)],
)
def test_levels_are_useful_until_they_bring_less_than_they_cost(
    best: float, rate: float, price: float, levels: float
) -> None:
    assert useful_levels(best, rate, price) == pytest.approx(levels)
    assert useful_levels(best, 1.0, price) < 300


def test_of_many_ends_the_best_go_on_where_room_is_short() -> None:
    assert keep_largest([0.1, 0.5, 0.5, 0.4], 2) == [0.0, 0.5, 0.5, 0.0]
    assert keep_largest([0.1, 0.5, 0.5], 0) == [0.0, 0.5, 0.0]
    tree = TokenTree((7, 1, 2, 3, 4), (-1, 0, 0, 0, 1))
    assert (children_each(tree), children_each(TokenTree((7,), (-1,)))) == (2.0, 1.0)
