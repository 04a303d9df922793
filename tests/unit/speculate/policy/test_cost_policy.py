"""Which nodes are worth their rows, and for how long a draft is worth its passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest

from specinfer.plan import PlanEntry
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate.policy.acceptance import MAX_LOG_ODDS, AcceptanceRates
from specinfer.speculate.policy.choose import path_probabilities
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.drafting import children_each, keep_largest, useful_levels
from specinfer.speculate.policy.policy import StepReport
from specinfer.tree import DrawRule, TokenTree, TreeBuilder, merge
from specinfer.tree.merging import keep
from specinfer.tree.token_tree import single_node
from tests.plans import outcome, plan
from tests.unit.speculate.policy.priced import DEAR, FREE, HALF, chain, entry, sized


def fitted(curve: CostCurve, trees: Sequence[TokenTree], *entries: PlanEntry) -> list[int]:
    """The nodes left of each tree, the root included."""
    policy = sized(curve)
    policy.begin_step(plan(*(entries or (entry(str(i)) for i in range(len(trees))))))
    return [tree.num_nodes for tree in policy.choose_nodes(trees)]


SURE, UNSURE = (
    chain(*6 * [0.9]),
    chain(*6 * [0.5]),
)  # probabilities .88 .78 .68 .60 .53 .47 and .50 .25 .13 ...


def test_a_node_has_to_bring_what_its_row_costs() -> None:
    for curve, trees, left in (
        (FREE, [SURE, UNSURE], [7, 7]),
        (DEAR, [SURE, UNSURE], [1, 1]),  # a row costs a token's time and brings less than a token
        (HALF, [SURE], [4]),  # 3.34 tokens in 2.5 s; with another row 3.94 in 3 s
        (HALF, [UNSURE], [1]),  # 1.5 tokens in 1.5 s are no faster than 1 in 1 s
        (HALF, [SURE, UNSURE], [3, 1]),  # 3.66 tokens in 2.5 s; with the next best, .68, 4.34 in 3 s
        (HALF, [UNSURE, SURE], [1, 3]),
        (HALF, [single_node(7), single_node(7)], [1, 1]),
    ):
        assert fitted(curve, trees) == left, (curve, trees)


@pytest.mark.parametrize(
    ("rule", "left"),
    [(DrawRule.POINT_MASS, 1), (DrawRule.COUPLED, 1), (DrawRule.IID, 7), (DrawRule.WITHOUT_REPLACEMENT, 7)],
)
def test_sampled_draws_are_never_dropped_for_their_value(rule: DrawRule, left: int) -> None:
    assert fitted(DEAR, [chain(*6 * [0.5], rule=rule)]) == [left]


def test_every_guess_whose_parent_became_text_is_learnt_from_verified_or_not() -> None:
    policy = sized(HALF)

    def step(*committed: int) -> int:
        policy.begin_step(plan(entry()))
        (tree,) = policy.choose_nodes([UNSURE])
        policy.observe(StepReport([outcome(*committed)]))
        return tree.num_nodes

    assert step(10) == 1, "the first guess was right, and was not verified"
    assert step(10, 11, 99) == 2, "so the next time it is"
    assert [step(99) for _ in range(50)][-1] == 1
    assert [step(*range(10, 16), 99) for _ in range(200)][-1] == 7


def test_a_step_that_was_cut_short_teaches_nothing() -> None:
    policy = sized(HALF)
    for _ in range(50):
        policy.begin_step(plan(entry()))
        policy.choose_nodes([UNSURE])
    policy.observe(StepReport([outcome(finished=True), outcome(1, 2, request_id="another")]))
    policy.begin_step(plan(entry()))
    assert policy.choose_nodes([UNSURE])[0].num_nodes == 1


def test_of_all_trees_within_the_requests_nodes_the_fastest_are_chosen() -> None:
    random = np.random.default_rng(3)
    for curve in (FREE, DEAR, HALF, CostCurve((1, 3, 12), (1.0, 1.1, 3.0))):
        for _ in range(10):
            asked = [replace(entry(str(i)), max_nodes=int(random.integers(1, 5))) for i in range(2)]
            trees = [wild(random, int(random.integers(0, 5))) for _ in asked]
            policy = sized(curve)
            policy.begin_step(plan(*asked))
            chosen = policy.choose_nodes(trees)
            assert rate(curve, chosen) == pytest.approx(
                max(
                    rate(curve, parts)
                    for parts in product(
                        *(subtrees(t, e.max_nodes) for t, e in zip(trees, asked, strict=True))
                    )
                )
            )
            for tree, one in zip(chosen, asked, strict=True):
                tree.check_integrity()
                assert tree.num_nodes <= one.max_nodes


def wild(random: np.random.Generator, nodes: int) -> TokenTree:
    builder = TreeBuilder(root=7)
    for node in range(nodes):
        name = f"s{random.integers(2)}"
        builder.add(
            int(random.integers(node + 1)), 10 + node, name, confidence=float(random.uniform(0.05, 0.95))
        )
    return builder.build()


def subtrees(tree: TokenTree, most: int) -> list[TokenTree]:
    nodes = range(1, tree.num_nodes)
    return [
        keep(tree, [0, *chosen])
        for count in range(min(most, tree.num_nodes))
        for chosen in combinations(nodes, count)
        if all(tree.parents[node] in (0, *chosen) for node in chosen)
    ]


def rate(curve: CostCurve, trees: Sequence[TokenTree]) -> float:
    """Return tokens per second of a tree, with the prior probability of each node."""
    tokens = sum(sum(path_probabilities(AcceptanceRates().node_rates(tree), tree.parents)) for tree in trees)
    return tokens / float(curve.seconds([sum(tree.num_nodes for tree in trees)])[0])


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


@pytest.mark.parametrize(
    ("best", "rate", "price", "levels"),
    [(0.8, 0.5, 0.1, 4.0), (0.1, 0.5, 0.1, 1.0), (0.05, 0.9, 0.1, 1.0), (0.5, 0.0, 0.1, 1.0)],
)
def test_levels_are_useful_for_a_while(best: float, rate: float, price: float, levels: float) -> None:
    assert useful_levels(best, rate, price) == pytest.approx(levels)
    assert useful_levels(best, 1.0, price) < 300


def test_of_many_ends_the_best_go_on_where_room_is_short() -> None:
    assert keep_largest([0.1, 0.5, 0.5, 0.4], 2) == [0.0, 0.5, 0.5, 0.0]
    assert keep_largest([0.1, 0.5, 0.5], 0) == [0.0, 0.5, 0.0]
    tree = TokenTree((7, 1, 2, 3, 4), (-1, 0, 0, 0, 1))
    assert (children_each(tree), children_each(TokenTree((7,), (-1,)))) == (2.0, 1.0)


# Acceptance rates.


def probabilities(acceptance: AcceptanceRates, tree: TokenTree) -> list[float]:
    return path_probabilities(acceptance.node_rates(tree), tree.parents)


RIGHT, WRONG = (10, 99), (99,)  # texts that go on as a chain's first guess says, or not


def test_results_of_guesses_decide_soon() -> None:
    acceptance = AcceptanceRates()
    for i in range(200):
        acceptance.learn(chain(0.9), RIGHT if i % 5 == 0 else WRONG, 0.0)
    assert probabilities(acceptance, chain(0.9))[1] == pytest.approx(0.2, abs=0.1)
    assert probabilities(acceptance, chain(0.9, speculator="other"))[1] > 0.8  # those of others are theirs
    assert acceptance.outcomes == 200


def test_confidences_that_mean_little_become_a_flat_curve() -> None:
    acceptance, random = AcceptanceRates(), np.random.default_rng(0)
    for sure in random.choice([0.1, 0.5, 0.9], size=3000).tolist():
        acceptance.learn(chain(sure), RIGHT if random.random() < 0.6 else WRONG, 0.0)
    rates = [probabilities(acceptance, chain(sure))[1] for sure in (0.1, 0.5, 0.9)]
    assert rates == pytest.approx([0.6] * 3, abs=0.15)


def test_of_two_that_agree_the_more_hopeful_is_believed() -> None:
    tree = merge([chain(0.5, speculator="a"), chain(0.9, speculator="b")])
    assert tree.num_nodes == 2
    assert probabilities(AcceptanceRates(), tree)[1] == probabilities(AcceptanceRates(), chain(0.9))[1]


@pytest.mark.parametrize(("sure", "sign"), [(1.0, 1), (0.0, -1), (float("nan"), -1), (7.0, 1)])
def test_certainty_is_not_taken_at_its_word(sure: float, sign: int) -> None:
    likely = 1 / (1 + math.exp(-sign * MAX_LOG_ODDS))
    assert probabilities(AcceptanceRates(), chain(sure))[1] == pytest.approx(likely)


@pytest.mark.parametrize("level", range(3))
def test_levels_are_counted_where_all_above_held_the_text(level: int) -> None:
    acceptance = AcceptanceRates({"draft": 3})
    text = (*range(10, 10 + level), 99)
    for _ in range(60):
        acceptance.learn(chain(0.5, 0.5, 0.5, speculator="draft"), text, 0.0)
    rates = [rate.first for rate in acceptance.levels["draft"].rates(0.0)]
    assert [rate > 0.9 for rate in rates[:level]] == [True] * level
    assert rates[level] < 0.1
    assert not acceptance.levels["draft"].counts[0, level + 1 :].any()


def test_a_request_is_known_by_the_results_of_others_at_its_temperature() -> None:
    levels = AcceptanceRates({"draft": 1}).levels["draft"]
    for _ in range(40):
        levels.learn(0, 0, 0.0)
        levels.learn(0, None, 1.5)
    of_all = levels.usual_rates()[0].first
    assert levels.rates(1.2)[0].first < of_all - 0.2 < of_all + 0.2 < levels.rates(0.0)[0].first
    assert levels.rates(0.7)[0].first == of_all, "nothing was seen there"
