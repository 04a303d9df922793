"""How deep a draft is worth its passes, and which texts are worth its reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from specinfer.plan import PlanEntry
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.draft_costs import DraftCosts, LevelOutcome
from specinfer.speculate.policy.estimator import Estimator
from specinfer.speculate.policy.native_knowledge import NativeKnowledge
from specinfer.speculate.policy.native_weighing import NativeWeighing
from specinfer.speculate.policy.plain_weighing import PlainWeighing
from specinfer.speculate.policy.speculation_policy import StepReport
from specinfer.speculate.policy.weighing import Weighing
from specinfer.speculation_params import SpeculationParams
from specinfer.tree import DrawRule, TokenTree, merge
from specinfer.tree.expansion import Expansion
from specinfer.tree.token_tree import single_node
from tests.kernels import library_or_skip
from tests.operations import lines_run
from tests.plans import outcome, plan
from tests.unit.speculate.policy.priced import FREE, chain, entry


def sized(target: CostCurve, draft: CostCurve, expansion: tuple[int, ...] = (1, 1, 1, 1)) -> CostPolicy:
    return CostPolicy(target, {"draft": DraftCosts(draft, Expansion(expansion))})


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


def teach(policy: CostPolicy, levels: int, steps: int = 100) -> None:
    """Trees of four levels of which the first `levels` become text."""
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
        (0.7, 1),
        (0.1, 4),
    ],  # of n-grams' seven tokens; a draft's pass takes a fifth of the target's
)
def test_the_surer_others_are_on_a_drafts_way_the_sooner_it_stops(sure: float, deepest: int) -> None:
    policy = sized(FREE, CostCurve((1, 1000), (0.2, 0.2)))
    teach(policy, 4)
    same_way = chain(*7 * [sure], speculator="ngram")
    assert depths(policy, entry(), trees=[same_way]) == [deepest]


@pytest.mark.parametrize(("speculator", "dearest"), [("ngram", 0.51), ("draft", 0.23)])
def test_a_draft_is_sooner_asked_beside_guesses_that_its_first_level_would_test(
    speculator: str, dearest: float
) -> None:
    # With a guess as likely as not 1.5 tokens are expected in 1 s, and a draft's level of s seconds brings
    # .35 more: worth it up to s = .233. The odds of what no draft has guessed count half, and .35 times: that
    # is 1.15 tokens and .60 more, up to s = .519.
    def starts(seconds: float) -> bool:
        policy = sized(FREE, CostCurve((1, 1000), (seconds, seconds)))
        return depths(policy, entry(), trees=[chain(0.5, speculator=speculator)])[0] > 0

    assert starts(dearest)
    assert not starts(dearest + 0.02)


def test_a_drafts_level_is_charged_what_it_takes() -> None:
    # After a level there are 1.88 tokens in 1 + s seconds, and the next brings .88 x .7 in s seconds: that is
    # worth it up to s = .487.
    def goes_on(seconds: float) -> bool:
        policy, asked = sized(FREE, CostCurve((1, 1000), (seconds, seconds))), [entry()]
        assert started(policy, asked) == [True]
        return go_on(policy, asked, [chain(0.9, speculator="draft")])[0]

    assert [goes_on(seconds) for seconds in (0.45, 0.48, 0.5, 0.54)] == [True, True, False, False]


def test_after_a_shift_few_steps_are_lost_to_a_draft_that_is_right_no_more() -> None:
    costs = DraftCosts(CostCurve((1, 1000), (0.3, 0.3)), Expansion((1, 1, 1, 1)))
    policy, asked = (
        CostPolicy(FREE, {"draft": costs}, PlainWeighing(Estimator(), {"draft": costs})),
        [entry()],
    )
    teach(policy, 4, steps=500)

    def passes() -> int:
        """Of the draft in a step of which no guess becomes text."""
        [levels] = depths(policy, *asked)
        drawn = chain(*levels * [0.9], speculator="draft")
        policy.choose_nodes([drawn])
        policy.observe(StepReport([outcome(99)]))
        return levels

    spent = [passes() for _ in range(164)]
    assert spent[0] == 4
    assert sum(0.3 * levels for levels in spent[64:]) < 0.05 * 100, "behind 64 steps within 5% of plain steps"


def test_what_came_of_a_requests_guesses_is_forgotten_with_it() -> None:
    costs = DraftCosts(QUICK, Expansion((1, 1, 1, 1)))
    policy, told = CostPolicy(FREE, {"draft": costs}), entry().request.request_id
    teach(policy, 4, steps=20)
    costs.learn(LevelOutcome("other", 0, None))
    assert costs.rate(0, told) != costs.rate(0)
    policy.begin_step(plan(entry()))
    policy.choose_nodes([chain(*4 * [0.9], speculator="draft")])
    policy.observe(StepReport([replace(outcome(10, 99), finished=True)]))
    assert costs.rate(0, told) == costs.rate(0), "with what its last step has taught"


@pytest.mark.parametrize(("native", "least", "of_a_node"), [(False, 1900, 62), (True, 1100, 4)])
def test_deciding_runs_few_lines_of_python(native: bool, least: int, of_a_node: int) -> None:
    def weighing(drafts: Mapping[str, DraftCosts]) -> Weighing | None:
        if not native:
            return None
        return NativeWeighing(library_or_skip(), NativeKnowledge(logistics=False), drafts)

    def lines(nodes: int, requests: int = 1) -> int:
        """Those of a step with a draft that grows three levels beside n-grams of so many nodes."""
        costs = [CostModel(name, curve) for name, curve in (("target", FREE), ("draft", QUICK))]
        drafts = {"draft": DraftCosts(costs[1], Expansion((1, 1, 1, 1)))}
        policy = CostPolicy(costs[0], drafts, weighing(drafts))
        asked = [entry(str(i)) for i in range(requests)]
        known = chain(*nodes * [0.5], speculator="ngram")
        drawn = [chain(*depth * [0.9], speculator="draft") for depth in range(1, 4)]
        whole = merge([known, drawn[-1]])
        committed = [outcome(10, 11, 99, request_id=str(i)) for i in range(requests)]

        def step() -> None:
            started(policy, asked, guessed=[known] * requests)
            for tree in drawn:
                go_on(policy, asked, [tree] * requests)
            policy.choose_nodes([whole] * requests)
            policy.observe(StepReport(committed))

        step()
        return lines_run(step)

    few, more = lines(1), lines(31)
    assert few <= least
    assert more - few <= 30 * of_a_node
    assert lines(31, requests=8) <= 8 * more


def test_reading_a_long_text_has_to_be_worth_it() -> None:
    dear = CostCurve((1, 1000), (0.1, 100.1))  # a tenth of a second for each token that is read
    policy = sized(FREE, dear)
    teach(policy, 4)
    assert depths(policy, entry(room=5000), unread=500)[0] > 0
    assert depths(policy, entry(room=10), unread=500) == [0]


def test_a_prompt_is_not_read_where_others_have_guessed_most_of_late() -> None:
    def reads(prediction: tuple[int, ...]) -> bool:
        """Whether the draft reads the last chunk of a prompt, where nobody can guess yet."""
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


def test_what_was_not_worth_it_is_tried_again_for_a_hundredth_of_the_time() -> None:
    policy = sized(FREE, CostCurve((1, 1000), (0.5, 0.5)))
    teach(policy, 0)
    tried = [tuple(started(policy, [entry("a"), entry("b")])) for _ in range(1000)]
    assert set(tried) == {(False, False), (True, False)}
    assert 15 <= tried.count((True, False)) <= 21  # each costs half a second of the 1000 s the steps take
    teach(policy, 4)
    assert depths(policy, entry()) == [4], "and is worth it again once it guesses right"
