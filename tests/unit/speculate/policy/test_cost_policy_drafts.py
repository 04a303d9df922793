"""How deep a draft is worth its passes, and which texts are worth its reading."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specinfer.plan import PlanEntry
from specinfer.runtime.cost_curve import CostCurve
from specinfer.sampling_params import SpeculationParams
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.policy import StepReport
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.token_tree import single_node
from tests.plans import outcome, plan
from tests.unit.speculate.policy.priced import FREE, chain, entry, sized


def go_on(policy: CostPolicy, entries: Sequence[PlanEntry], trees: Sequence[TokenTree]) -> list[bool]:
    """For which entries a draft goes on below the last node of a tree."""
    chosen = policy.worth_deepening("draft", entries, trees, [(tree.num_nodes - 1,) for tree in trees])
    return [bool(nodes) for nodes in chosen]


def started(
    policy: CostPolicy,
    entries: Sequence[PlanEntry],
    *,
    unread: int = 1,
    guessed: Sequence[TokenTree] | None = None,
) -> list[bool]:
    """For which entries of a step that begins the draft starts."""
    policy.begin_step(plan(*entries))
    guessed = guessed or [single_node(7) for _ in entries]
    return policy.worth_starting("draft", entries, [unread] * len(entries), guessed)


def depths(
    policy: CostPolicy,
    *entries: PlanEntry,
    trees: Sequence[TokenTree] | None = None,
    unread: int = 1,
    rule: DrawRule = DrawRule.POINT_MASS,
) -> list[int]:
    """The levels each entry is drafted for, where each guess is one the draft is sure of."""
    reached = [*map(int, started(policy, entries, unread=unread, guessed=trees))]
    going = [i for i, starts in enumerate(reached) if starts]
    while going:
        grown = [chain(*reached[i] * [0.9], speculator="draft", rule=rule) for i in going]
        deeper = go_on(policy, [entries[i] for i in going], grown)
        going = [i for i, goes_on in zip(going, deeper, strict=True) if goes_on]
        for i in going:
            reached[i] += 1
        going = [i for i in going if reached[i] < 4]
    return reached


def teach(policy: CostPolicy, levels: int, steps: int = 200) -> None:
    """Trees of four levels; the first `levels` are accepted."""
    for _ in range(steps):
        policy.begin_step(plan(entry()))
        policy.choose_nodes([chain(*4 * [0.9], speculator="draft")])
        policy.observe(StepReport([outcome(*range(10, 10 + levels), 99)]))


QUICK = CostCurve((1, 1000), (0.1, 0.1))


@pytest.mark.parametrize("rule", [DrawRule.POINT_MASS, DrawRule.IID])
@pytest.mark.parametrize(
    ("levels", "draft", "depth"),
    [
        (4, QUICK, 4),
        (0, QUICK, 0),
        (4, CostCurve((1, 1000), (0.9, 0.9)), 4),  # dear, and nearly always right: 5 tokens in 4.6 s
        (4, CostCurve((1, 1000), (1.5, 1.5)), 0),  # a pass of the draft costs more than a token does
    ],
)
def test_a_draft_goes_as_deep_as_its_levels_have_been_worth(
    levels: int, draft: CostCurve, depth: int, rule: DrawRule
) -> None:
    policy = sized(FREE, draft)
    teach(policy, levels)
    mss = SpeculationParams(verifier="mss") if rule is DrawRule.IID else None
    assert depths(policy, entry(temperature=float(mss is not None), overrides=mss), rule=rule) == [depth]


@pytest.mark.parametrize("rule", [DrawRule.POINT_MASS, DrawRule.IID])
def test_a_draft_goes_on_below_what_it_is_sure_of(rule: DrawRule) -> None:
    policy = sized(FREE, CostCurve((1, 4), (0.15, 0.6)))
    entries = [entry("a"), entry("b")]
    assert started(policy, entries) == [True, True]
    #  3.04 tokens in 1.3 s; below the first guess .7 tokens more in .15 s, below the other .04
    sure, unsure = (chain(confidence, speculator="draft", rule=rule) for confidence in (0.99, 0.05))
    assert go_on(policy, entries, [sure, unsure]) == [True, False]


def test_a_drafts_level_is_charged_what_it_takes() -> None:
    # After a level there are 1.88 tokens in 1 + s seconds, and the next brings .88 x .7 in s seconds: that is
    # worth it up to s = .487.
    def goes_on(seconds: float) -> bool:
        policy, asked = sized(FREE, CostCurve((1, 1000), (seconds, seconds))), [entry()]
        assert started(policy, asked) == [True]
        return go_on(policy, asked, [chain(0.9, speculator="draft")])[0]

    assert [goes_on(seconds) for seconds in (0.45, 0.48, 0.5, 0.54)] == [True, True, False, False]


def test_after_a_shift_few_steps_are_lost_to_a_draft_that_is_right_no_more() -> None:
    policy, asked = sized(FREE, CostCurve((1, 1000), (0.3, 0.3))), [entry()]
    teach(policy, 4, steps=500)

    def passes() -> int:
        """The draft's decision in a step without an accepted guess."""
        [levels] = depths(policy, *asked)
        drawn = chain(*levels * [0.9], speculator="draft")
        policy.choose_nodes([drawn])
        policy.observe(StepReport([outcome(99)]))
        return levels

    spent = [passes() for _ in range(164)]
    assert spent[0] == 4
    assert sum(0.3 * levels for levels in spent[64:]) < 0.05 * 100, "behind 64 steps within 5% of plain steps"


def test_a_draft_that_was_not_worth_it_is_tried_again_as_its_counts_fade() -> None:
    policy = sized(FREE, CostCurve((1, 1000), (0.5, 0.5)))
    teach(policy, 0)
    tried = 0
    for _ in range(1000):
        starts = started(policy, [entry()])
        drawn = chain(0.9, speculator="draft") if starts == [True] else single_node(7)
        policy.choose_nodes([drawn])
        policy.observe(StepReport([outcome(99)], {"target_forward": 1.0}))
        tried += starts[0]
    assert 5 <= tried <= 20, "each costs half a second of the 1000 s the steps take"
    teach(policy, 4)
    assert depths(policy, entry()) == [4], "and is worth it again once it guesses right"
