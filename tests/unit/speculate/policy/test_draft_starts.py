"""Who starts a draft: what reading takes is weighed against all that it will bring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from specinfer.plan import PlanEntry
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.policy.draft_costs import DraftCosts, LevelOutcome
from specinfer.speculate.policy.draft_starts import DraftStarts, Guessed
from specinfer.speculate.policy.guesses import Guesses
from specinfer.speculate.policy.weighing import Expected, StepCosts
from specinfer.tree import TokenTree
from specinfer.tree.expansion import Expansion
from specinfer.tree.token_tree import single_node
from tests.unit.speculate.policy.priced import chain, entry

NOBODY = single_node(7)  # guesses below this root


def draft(level: float, row: float) -> DraftCosts:
    """One whose pass takes `level` seconds, and `row` more for each row."""
    return DraftCosts(CostCurve((1, 1000), (level, level + 999 * row)), Expansion((1,)))


def starts(
    who: DraftStarts,
    one: PlanEntry,
    unread: int,
    tree: TokenTree = NOBODY,
    rate: float = 0.9,
    row: float = 0.0,
) -> bool:
    """Whether it starts for this request, below whose root others have guessed `tree`; a step takes 1 s."""
    step = without_drafts([one], Guesses(tree, [1.0, *(tree.num_nodes - 1) * [rate]]), row)
    [start] = who.which([one], [unread], step)
    return start


def without_drafts(entries: Sequence[PlanEntry], guesses: Guesses, row: float = 0.0) -> Guessed:
    """A step of a second in which others have guessed so much for each of these."""
    count = len(entries)
    expected = Expected(float(count), 0, 0.0, count * [guesses.left(0)], count * [sum(guesses.probabilities)])
    numbers = {one.request.request_id: n for n, one in enumerate(entries)}
    return Guessed(StepCosts([1.0], 0, 0, 0.0, float(count)), expected, numbers, row)


def predicted(one: PlanEntry) -> PlanEntry:
    return replace(one, request=replace(one.request, prediction=(1, 2)))


def prompt(room: int = 100) -> PlanEntry:
    """The last chunk of a prompt, behind which nobody can guess yet."""
    return replace(entry(room=room, rows=9), max_nodes=1)


@pytest.mark.parametrize(
    ("reading", "room", "plain", "with_prediction"),
    [  # .7 tokens a step are hoped for beside 1, or .21 beside 8: of 100 tokens 41 and 2.5, a second each
        (2.0, 100, True, True),
        (10.0, 100, True, False),
        (18.0, 100, True, False),
        (50.0, 100, False, False),
        (10.0, 20, False, False),
        (0.3, 2, True, False),
        (0.0, 1, False, False),  # one for which nobody guesses, and a last one that needs no guess
    ],
)
def test_who_brings_a_prediction_is_thought_to_need_a_draft_less(
    reading: float, room: int, plain: bool, with_prediction: bool
) -> None:
    def reads(one: PlanEntry) -> bool:
        return starts(DraftStarts(draft(0.01, reading / 500)), one, unread=500)

    assert (reads(prompt(room)), reads(predicted(prompt(room)))) == (plain, with_prediction)


@pytest.mark.parametrize(
    ("level", "row", "reads"), [(0.1, 0.0, True), (0.25, 0.0, True), (0.45, 0.0, False), (0.25, 0.2, False)]
)
def test_no_prompt_is_read_for_levels_that_would_not_be_worth_their_passes(
    level: float, row: float, reads: bool
) -> None:
    costs = draft(level, 0.0)
    for _ in range(50):
        for choice in (None, 0, None):
            costs.learn(LevelOutcome("other", 0, choice))
    assert 0.3 < costs.rate(0).any < 0.38
    assert starts(DraftStarts(costs), prompt(), unread=50, row=row) is reads


def test_a_text_whose_steps_make_many_tokens_has_few_steps_to_read_it_for() -> None:
    known = chain(*8 * [0.9], speculator="ngram")
    slow, quick = (DraftStarts(draft(0.01, 0.025)) for _ in range(2))
    for _ in range(60):  # others leave as much to the draft, and make 1.3 tokens a step, or 3.4
        starts(slow, entry(room=100), unread=500, tree=chain(0.9, speculator="ngram"), rate=0.3)
        starts(quick, entry(room=100), unread=500, tree=known, rate=0.999)
        starts(quick, entry(room=100), unread=500)
        starts(quick, entry(room=100), unread=500)
    assert starts(slow, entry(room=100), unread=500)
    assert not starts(quick, entry(room=100), unread=500)


def test_a_text_is_not_read_for_one_step_in_which_nobody_else_guesses() -> None:
    known = chain(0.9, speculator="prediction")
    seldom, often = (DraftStarts(draft(0.01, 0.03)) for _ in range(2))
    for _ in range(60):
        starts(seldom, entry(room=100), unread=500, tree=known, rate=0.999)
        starts(often, entry(room=100), unread=500, tree=known, rate=0.001)
    assert not starts(seldom, entry(room=100), unread=500)
    assert starts(often, entry(room=100), unread=500)
    assert starts(seldom, entry(room=100), unread=2), "what is read already costs nothing more"


def test_a_request_is_known_by_what_came_of_its_own_guesses_and_forgotten() -> None:
    costs = draft(0.5, 0.0)
    for _ in range(40):
        costs.learn(LevelOutcome("good", 0, 0))
        costs.learn(LevelOutcome("bad", 0, None))
    of_all = costs.rate(0).first
    assert costs.rate(0, "bad").first < of_all - 0.2 < of_all + 0.2 < costs.rate(0, "good").first
    assert costs.rate(0, "new").first == of_all
    who = DraftStarts(costs)
    good, bad = (
        replace(e, request=replace(e.request, request_id=name))
        for e in [entry(room=100)]
        for name in ("good", "bad")
    )
    assert [starts(who, one, unread=1) for one in (good, bad)] == [True, False]
    costs.forget("bad")
    assert costs.rate(0, "bad").first == of_all


def test_a_request_is_known_by_what_came_of_others_at_its_temperature() -> None:
    costs = draft(0.5, 0.0)
    for n in range(40):
        costs.learn(LevelOutcome(f"greedy {n}", 0, 0), 0.0)
        costs.learn(LevelOutcome(f"hot {n}", 0, None), 1.5)
    of_all = costs.rate(0).first
    greedy, hot = (costs.rate(0, "new", heat).first for heat in (0.0, 1.2))
    assert hot < of_all - 0.2 < of_all + 0.2 < greedy
    assert costs.rate(0, "new", 0.7).first == of_all, "of which there was none"
    who = DraftStarts(costs)
    assert [starts(who, entry(room=100, temperature=heat), unread=1) for heat in (0.0, 1.5)] == [True, False]
    costs.learn(LevelOutcome("new", 0, 0), 1.5)
    others = costs.rate(0, "another", 1.5).first
    assert costs.rate(0, "new", 1.5).first == pytest.approx((16 * others + 1) / 17), "its own beside these"


def test_a_draft_comes_back_to_hot_texts_while_it_starts_for_greedy_ones() -> None:
    costs = draft(0.1, 0.0)
    for n in range(60):
        costs.learn(LevelOutcome(f"greedy {n}", 0, 0), 0.0)
        costs.learn(LevelOutcome(f"hot {n}", 0, None), 1.5)
    who, started = DraftStarts(costs), 0
    for n in range(3000):
        both = entry(f"greedy {n // 50}", room=100), entry(f"hot {n // 50}", room=100, temperature=1.5)
        told = who.which(both, [2, 2], without_drafts(both, Guesses(NOBODY, [1.0])))
        for one, start in zip(both, told, strict=True):
            if start:  # and now it is always right
                costs.learn(LevelOutcome(one.request.request_id, 0, 0), one.request.params.temperature)
        started += told[1]
    assert told == [True, True]
    assert started > 2000


@pytest.mark.parametrize(("tokens", "reads"), [(2, False), (4, True)])
def test_nothing_is_read_for_a_last_token_that_needs_no_guess(tokens: int, reads: bool) -> None:
    """Others guess nearly all that the draft would: .3 seconds of reading are too much for one such step."""
    costs = draft(0.01, 0.3 / 500)
    for _ in range(60):
        costs.learn(LevelOutcome("other", 0, 0))
    known, one = chain(0.9, speculator="prediction"), replace(entry(), room=tokens)
    assert starts(DraftStarts(costs), one, unread=500, tree=known, rate=0.9) is reads


def test_a_text_that_would_take_long_to_read_keeps_no_other_from_starting() -> None:
    costs = draft(0.01, 0.01)
    long, short = (
        replace(e, request=replace(e.request, request_id=name))
        for e in [entry(room=5)]
        for name in ("long", "short")
    )
    for _ in range(40):
        costs.learn(LevelOutcome("long", 0, 0))  # whose level would bring more
        costs.learn(LevelOutcome("short", 0, None))
        costs.learn(LevelOutcome("short", 0, 0))
    step = without_drafts([long, short], Guesses(NOBODY, [1.0]))
    assert DraftStarts(costs).which([long, short], [900, 2], step) == [False, True]
