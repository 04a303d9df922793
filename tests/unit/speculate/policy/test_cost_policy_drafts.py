"""How deep a draft is worth its passes, and which texts are worth its reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from specinfer.plan import PlanEntry
from specinfer.runtime.cost_curve import CostCurve
from specinfer.sampling_params import SpeculationParams
from specinfer.speculate.policy.acceptance import AcceptanceRates
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.drafting import PricedDraft
from specinfer.speculate.policy.policy import StepReport
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.expansion import Expansion
from specinfer.tree.token_tree import single_node
from tests import plans
from tests.plans import outcome, plan
from tests.unit.speculate.policy.priced import FREE, chain, entry, sized, unlearning


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


@pytest.mark.parametrize(("rule", "goes_on"), [(DrawRule.POINT_MASS, True), (DrawRule.IID, False)])
def test_of_samples_every_node_is_a_row(rule: DrawRule, goes_on: bool) -> None:
    # The next level brings 8 guesses: the likeliest alone is worth its row, all of them are not.
    policy = sized(CostCurve((1, 3, 4), (1.0, 1.0, 1.3)), QUICK, (1, 8))
    asked = [entry()]
    assert started(policy, asked) == [True]
    assert go_on(policy, asked, [chain(0.9, speculator="draft", rule=rule)]) == [goes_on]


def test_in_a_batch_the_targets_rows_are_dear() -> None:
    policy = sized(CostCurve((1, 8, 9), (1.0, 1.0, 2.0)), QUICK)
    teach(policy, 4)
    assert depths(policy, entry()) == [4]
    assert depths(policy, *(entry(str(i)) for i in range(2))) == 2 * [3]
    assert depths(policy, *(entry(str(i)) for i in range(8))) == 8 * [0]


def test_what_another_has_guessed_already_needs_no_draft() -> None:
    policy = sized(FREE, CostCurve((1, 1000), (0.5, 0.5)))
    teach(policy, 4)
    known = chain(*4 * [0.999], speculator="prediction")
    assert depths(policy, entry(), trees=[single_node(7)]) == [4]
    assert depths(policy, entry(), trees=[known]) == [0]


@pytest.mark.parametrize(
    ("sure", "deepest"),
    [
        (0.998, 0),
        (0.9, 0),
        (0.7, 4),
        (0.1, 4),
    ],  # seven tokens of n-grams; a draft's pass takes a fifth of the target's
)
def test_the_surer_others_are_on_a_drafts_way_the_sooner_it_stops(sure: float, deepest: int) -> None:
    policy = sized(FREE, CostCurve((1, 1000), (0.2, 0.2)))
    teach(policy, 4)
    same_way = chain(*7 * [sure], speculator="ngram")
    assert depths(policy, entry(), trees=[same_way]) == [deepest]


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


def test_reading_a_long_text_has_to_be_worth_it() -> None:
    dear = CostCurve((1, 1000), (0.1, 100.1))  # a tenth of a second for each token that is read
    policy = sized(FREE, dear)
    teach(policy, 4)
    assert depths(policy, entry(room=5000), unread=500)[0] > 0
    assert depths(policy, entry(room=10), unread=500) == [0]


def test_a_prompt_is_not_read_where_others_have_guessed_most_of_late() -> None:
    def reads(prediction: tuple[int, ...]) -> bool:
        """Return whether the draft reads the last chunk of a prompt, where no speculator can guess yet."""
        reading = replace(entry("new", room=60, rows=9), max_nodes=1)
        request = replace(reading.request, prediction=prediction)
        return started(policy, [replace(reading, request=request)], unread=500)[0]

    policy = sized(FREE, CostCurve((1, 1000), (0.004, 4.004)))
    teach(policy, 4)
    assert reads((1, 2))
    predicted = entry()
    predicted = replace(predicted, request=replace(predicted.request, prediction=(1, 2)))
    for _ in range(12):
        depths(policy, predicted, trees=[chain(*4 * [0.999], speculator="prediction")])
    assert not reads((1, 2)), "it would seldom be asked"
    assert reads(()), "texts without a prediction are others"
    for _ in range(60):
        depths(policy, predicted)
    assert reads((1, 2)), "the predictions have been of no use"


def test_a_text_that_has_no_row_for_a_guess_is_not_read_for_it() -> None:
    policy = sized(FREE, QUICK)
    teach(policy, 4)
    full = replace(entry(), max_nodes=1)
    assert depths(policy, entry(), unread=2)[0] > 0
    assert depths(policy, full, unread=2) == [0], "it can be read when there is one"


def test_who_has_no_known_price_is_let_go_on_anywhere() -> None:
    policy = sized(FREE, CostCurve((1, 1000), (9.0, 9.0)))
    assert started(policy, [entry()]) == [False]
    assert policy.worth_starting("own", [entry()], [1], [single_node(7)]) == [True]
    tree = chain(0.01, 0.01, speculator="own")
    assert policy.worth_deepening("own", [entry()], [tree], [(1, 2)]) == [(1, 2)]
    assert policy.choose_nodes([tree])[0].num_nodes <= 3
    policy.observe(StepReport([outcome(10, 99)]))


def test_who_asks_for_an_expansion_is_drafted_for() -> None:
    policy = sized(FREE, CostCurve((1, 1000), (9.0, 9.0)))
    asking = entry("a", overrides=SpeculationParams(expansion=Expansion((1, 1))))
    teach(policy, 0)
    assert started(policy, [asking, entry("b")]) == [True, False]
    assert go_on(policy, [asking], [chain(0.01, speculator="draft")]) == [True]


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


def test_counts_of_a_draft_that_may_not_guess_stay() -> None:
    policy = sized(FREE, CostCurve((1, 1000), (0.5, 0.5)))
    teach(policy, 4)
    known = policy.acceptance.levels["draft"].all.to_json()
    for _ in range(400):  # requests that exclude the draft
        policy.begin_step(plan(entry()))
        policy.choose_nodes([single_node(7)])
        policy.observe(StepReport([outcome(99)], {"target_forward": 1.0}))
    assert policy.acceptance.levels["draft"].all.to_json() == known


@pytest.mark.parametrize(("divides_budget", "most", "ends"), [(False, 32, 4), (True, 32, 1), (True, 700, 4)])
def test_the_levels_of_a_tree_that_may_be_deep_share_its_nodes(
    divides_budget: bool, most: int, ends: int
) -> None:
    """Rows are free, so all ends are worth theirs; 28 more nodes have to do for 20 levels or so."""
    cheap = PricedDraft(unlearning("draft", CostCurve((1, 9), (0.01, 0.01))), Expansion((1,)))
    target, acceptance = unlearning("target", FREE), AcceptanceRates({"draft": 48})
    policy = CostPolicy(target, {"draft": cheap}, acceptance, divides_budget=divides_budget)
    one = replace(entry(), max_nodes=most)
    assert started(policy, [one]) == [True]
    builder = TreeBuilder(root=7)
    for token, sure in enumerate((0.5, 0.2, 0.15, 0.1)):
        builder.add(0, 10 + token, "draft", confidence=sure)
    [chosen] = policy.worth_deepening("draft", [one], [builder.build()], [(1, 2, 3, 4)])
    assert chosen == [*range(1, 1 + ends)]


@pytest.mark.parametrize(("cached", "starts"), [(20, True), (0, False)])
def test_a_part_of_a_prompt_is_read_beside_its_target_whatever_the_guard_can_afford(
    cached: int, starts: bool
) -> None:
    """Tokens 20 to 79 of 100 are computed; who lacks those before them is late, and has no allowance."""
    policy = CostPolicy.by_curves(
        CostCurve((1, 100), (1.0, 1.5)),
        {"draft": CostCurve((1, 100), (0.05, 5.0))},  # reading these takes more than two plain steps
        SpeculationConfig(),
        measured=True,
        known=True,
    )
    text = [*range(100)]
    part = plans.entry(text, start=20, end=80, max_nodes=0, room=100)
    policy.begin_step(plans.plan(part))
    assert policy.worth_starting("draft", [part], [len(text) - cached], []) == [starts]
