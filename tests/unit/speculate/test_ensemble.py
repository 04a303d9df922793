"""Several speculators guess for one request, and its nodes go to the best guesses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from specinfer.errors import ConfigError, SpeculatorError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_curve import CostCurve
from specinfer.speculate import decision as reasons
from specinfer.speculate.decision import Contribution, Decision
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.guard import PLAIN_FIRST
from specinfer.speculate.policy.policy import SpeculationPolicy, StepReport
from specinfer.speculate.speculator import AnySpeculator, LevelSpeculator, Outcome
from specinfer.speculation_config import SpeculationConfig
from specinfer.tree import Draw, DrawRule, TokenTree
from specinfer.tree.draw import Run, Runs
from specinfer.tree.token_tree import single_node
from tests import plans
from tests.unit.speculate.guessers import Fan, Levels, entry
from tests.unit.speculate.policy.priced import FREE


def test_all_may_fill_the_tree_and_the_likeliest_of_all_guesses_stay() -> None:
    for max_nodes, token_ids in (
        (9, (7, 10, 11, 12, 13, 14)),  # b's 11 and 12 are a's too, and cost nothing
        (6, (7, 10, 11, 12, 13, 14)),
        (4, (7, 11, 12, 14)),  # 13 is as likely as 12, and came later
        (3, (7, 11, 14)),
        (2, (7, 14)),
        (1, (7,)),
    ):
        a = Fan("a", [10, 11, 12], [0.1, 0.6, 0.1])
        b = Fan("b", [11, 13, 12], [0.2, 0.4, 0.4])
        c = Fan("c", [14], [0.9])
        ensemble = Ensemble([a, b, c], vocab=99, policy=SpeculationPolicy())
        (tree,) = ensemble.propose(plans.plan(entry(max_nodes)))
        assert a.offered == b.offered == c.offered == [max_nodes], max_nodes
        assert sorted(tree.token_ids) == sorted(token_ids), max_nodes
        tree.check_integrity()


def test_of_each_speculator_its_guesses_are_counted_verified_or_not() -> None:
    draft = Levels("draft", [10, 11], [0.9, 0.9])
    fans = Fan("fan", [10, 12, 13]), Fan("suffix", [20, 21, 22]), Fan("mute", [])
    speculators: list[AnySpeculator] = [*fans[:2], draft, fans[2]]
    ensemble = Ensemble(speculators, vocab=99, policy=SpeculationPolicy())
    assert ensemble.guessed_tokens == {"fan": 0, "suffix": 0, "draft": 0, "mute": 0}
    trees = ensemble.propose(plans.plan(entry(4), entry(4)))
    assert [tree.num_nodes for tree in trees] == [4, 4]
    assert ensemble.guessed_tokens == {"fan": 6, "suffix": 6, "draft": 4, "mute": 0}
    ensemble.propose(plans.plan(entry(4, speculators=("fan",))))
    assert ensemble.guessed_tokens == {"fan": 9, "suffix": 6, "draft": 4, "mute": 0}


def test_confidences_that_are_not_from_0_to_1_count_as_the_nearer_of_them() -> None:
    for odd in (math.nan, math.inf, -math.inf, 1.5, -1, 10**400):
        for kind in (Fan, Levels):
            ensemble = Ensemble([kind("odd", [5, 6], [0.9, odd])], vocab=99, policy=SpeculationPolicy())
            (tree,) = ensemble.propose(plans.plan(entry(9)))
            expected = [1.0, 0.9, (0.9 if kind is Levels else 1.0) * (odd > 0)]
            assert (tree.token_ids, tree.likelihoods()) == ((7, 5, 6), expected), (odd, kind)


class Reading(Fan):
    """Reads the target's hidden states after layer 2, and counts the steps whose choices it got."""

    taps = (2,)
    steps_seen = 0

    def see_choices(self, guessed: Sequence[TokenTree], chosen: Sequence[TokenTree]) -> None:
        self.steps_seen += 1


def test_where_nobody_may_guess_nobody_is_asked() -> None:
    head = Reading("head", [10])
    ensemble = Ensemble([head], vocab=99, policy=SpeculationPolicy())
    assert [tree.num_nodes for tree in ensemble.propose(plans.plan(entry(4, speculators=())))] == [1]
    assert (head.offered, head.steps_seen) == ([], 0)
    assert [len(one.contributions) for one in ensemble.explain()] == [1], "the step can be explained"
    ensemble.propose(plans.plan(entry(4, speculators=()), entry(4)))
    assert (head.offered, head.steps_seen) == ([4], 1)


class Sampling(Fan):
    """Declares its guesses as samples."""

    rule = DrawRule.IID


def test_samples_have_their_turn_and_their_room_first() -> None:
    before, after = Fan("before", [10, 11, 12]), Fan("after", [13])
    first, second = Sampling("first", [11, 14]), Sampling("second", [11, 15, 16])
    ensemble = Ensemble([before, first, second, after], vocab=99, policy=SpeculationPolicy())
    (tree,) = ensemble.propose(plans.plan(entry(5)))
    offered = [fan.offered for fan in (before, first, second, after)]
    assert offered == [[5], [5], [3], [2]]  # nodes left by the samples 11, 14 and 15
    assert tree.token_ids == (7, 11, 14, 15, 10)  # and one of the others
    draws = [(tree.token_ids[draw.node], draw.speculator) for draw in tree.draws]
    assert draws == [
        *((11, "first"), (14, "first")),
        *((11, "second"), (15, "second")),
        *((10, "before"), (11, "before")),
    ]


def test_two_speculators_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="each needs a distinct name"):
        Ensemble([Fan("a", [1]), Fan("a", [2])], vocab=99, policy=SpeculationPolicy())


UNSURE = Draw(0, 1, "wrong", DrawRule.POINT_MASS, confidence=None)  # type: ignore[arg-type]


class Wrong(Fan):
    """Always returns `trees`."""

    def __init__(self, *trees: TokenTree) -> None:
        super().__init__("wrong", [])
        self._trees = list(trees)
        self.asked = 0

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        self.asked += 1
        return self._trees


class WrongLevels(LevelSpeculator):
    """The same, a level at a time."""

    name = "wrong"

    def __init__(self, *trees: TokenTree) -> None:
        self._trees = list(trees)
        self.asked = 0

    def begin(self, plan: StepPlan) -> list[int]:
        self.asked += 1
        return [1] * len(plan.entries)

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        return dict.fromkeys(below, (1,))

    def tree(self, entry: int) -> TokenTree:
        return self._trees[entry]


def drawn(**odd: Any) -> TokenTree:
    """A tree with one invalid draw."""
    fields: dict[str, Any] = {"parent": 0, "node": 1, "speculator": "wrong", "rule": DrawRule.POINT_MASS}
    return TokenTree((7, 1), (-1, 0), (Draw(**fields | odd),))


def columns(**odd: Any) -> TokenTree:
    """The same as a run."""
    whole = Run("wrong", DrawRule.POINT_MASS, [0], [1], [0.5], [1.0], 1)
    return TokenTree((7, 1), (-1, 0), Runs((whole._replace(**odd),)))


NO_TREES: list[tuple[list[TokenTree], str]] = [
    ([TokenTree((6,), (-1,))], "proposed a tree rooted at token 6; the last token is 7"),
    ([TokenTree((7,), (-1, 0))], "whose nodes do not come after their parents, (-1, 0)"),
    ([TokenTree((7, 1, 2, 3), (-1, 0, 0, 0))], "proposed a tree of 4 nodes; entry.max_nodes is 3"),
    ([TokenTree((7, 1, 2), (-1, 0, 1))], "proposed a tree of depth 2; entry.max_depth is 1"),
    ([TokenTree((7, 1, 2), (-1, 2, 0))], "whose nodes do not come after their parents, (-1, 2, 0)"),
    ([TokenTree((7, 1, 2), (-1, -1, 0))], "whose nodes do not come after their parents, (-1, -1, 0)"),
    ([TokenTree((7, 1), (-1,))], "whose nodes do not come after their parents, (-1,)"),
    ([TokenTree((7, 1), (-1, 1))], "whose nodes do not come after their parents, (-1, 1)"),
    ([TokenTree((7, 1), (-1, 0, 1, 1 << 20))], "whose nodes do not come after their parents, (-1, 0,"),
    ([TokenTree((7, 1 << 40), (-1, 0))], "proposed a tree with tokens outside the vocabulary of 99"),
    ([TokenTree((7, 99), (-1, 0))], "proposed a tree with tokens outside the vocabulary of 99"),
    ([TokenTree((7, -1), (-1, 0))], "proposed a tree with tokens outside the vocabulary of 99"),
    ([TokenTree((7, 1), (-1, 0), (UNSURE,))], "with a draw whose confidence is no number"),
    ([drawn(rule="point_mass")], "with a draw by 'point_mass', which is no DrawRule"),
    ([drawn(node=2)], "with a draw at none of its 2 nodes"),
    ([drawn(node=0)], "with a draw at none of its 2 nodes"),
    ([drawn(parent=2)], "with a draw at none of its 2 nodes"),
    ([drawn(parent=-1)], "with a draw at none of its 2 nodes"),
    ([drawn(node=1.0)], "with a draw whose nodes are no int"),
    ([columns(nodes=[1, 1])], "with draws in columns of (2, 1, 1, 2), and evidence of 1"),
    ([columns(confidences=[])], "with draws in columns of (1, 1, 0, 1), and evidence of 1"),
    ([columns(evidence=[])], "with draws in columns of (1, 1, 1, 1), and evidence of 0"),
    ([columns(laws=[])], "with draws in columns of (1, 1, 1, 0), and evidence of 1"),
    ([columns(nodes=np.array([1]))], "with a draw whose nodes are no int"),
    ([columns(parents=[], nodes=[], confidences=[], evidence=[])], "with a run of no draws"),
]


@pytest.mark.parametrize(
    ("kind", "trees", "complaint"),
    [
        (Wrong, [], "gave 0 trees for 1 entries; propose must return one for each"),
        *((kind, *case) for kind in (Wrong, WrongLevels) for case in NO_TREES),
    ],
)
def test_a_speculator_that_breaks_its_contract_is_named_once_and_not_asked_again(
    kind: type[Wrong | WrongLevels], trees: list[TokenTree], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    curves = {"wrong": CostCurve((1, 1000), (0.01, 0.01))}  # a policy that weighs trees gets no bad one
    policy = CostPolicy.by_curves(FREE, curves, SpeculationConfig(), measured=False)
    wrong, good = kind(*trees), Fan("good", [5])
    ensemble = Ensemble([wrong, good], vocab=99, policy=policy)
    for step in range(9):  # the first steps are plain
        (tree,) = ensemble.propose(plans.plan(entry(3, max_depth=1, room=100)))
        assert tree.token_ids == ((7,) if step < PLAIN_FIRST else (7, 5))
        ensemble.observe(StepReport([plans.outcome(5)], {"target_forward": 1.0}))
    assert wrong.asked == 1
    (record,) = caplog.records
    assert record.getMessage().startswith("speculator 'wrong' failed and pauses")
    assert isinstance(record.exc_info[1], SpeculatorError)
    assert complaint in str(record.exc_info[1])


def test_a_retired_speculator_never_runs_again_whatever_the_policy() -> None:
    levels: list[Mapping[int, Sequence[int]]] = []

    class Levels(WrongLevels):
        def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
            levels.append(below)
            return {}

    speculator = Levels(TokenTree((7,), (-1,)))
    ensemble = Ensemble([speculator], vocab=99, policy=SpeculationPolicy())
    for retired in (False, True):
        speculator.retired = retired
        ensemble.propose(plans.plan(entry(3, max_depth=1, room=100)))
    assert levels == [{0: (0,)}], "in the first step alone"


class Forgetful(Fan):
    """Raises in `observe`."""

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        raise ZeroDivisionError


def test_a_speculator_that_raises_is_muted_and_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    ensemble = Ensemble([Forgetful("raising", [9]), Fan("good", [5])], vocab=99, policy=SpeculationPolicy())
    seen = []
    for _ in range(3):
        seen += [tree.token_ids for tree in ensemble.propose(plans.plan(entry(9)))]
        ensemble.observe(StepReport([plans.outcome(5)]))
    assert seen == [(7, 9, 5), (7, 5), (7, 5)]
    assert len(caplog.records) == 1


class Flaky(Fan):
    """Fails as long as `broken`."""

    broken = True

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        if self.broken:
            raise MemoryError
        return super().propose(plan)


class FlakyPolicy(SpeculationPolicy):
    """Likewise."""

    broken = True

    def choose_nodes(self, trees: Sequence[TokenTree]) -> list[TokenTree]:
        if self.broken:
            raise MemoryError
        return [single_node(tree.token_ids[0]) for tree in trees]


def test_what_failed_is_tried_again_after_longer_and_longer_pauses(caplog: pytest.LogCaptureFixture) -> None:
    flaky, policy = Flaky("flaky", [9]), FlakyPolicy()
    ensemble = Ensemble([flaky, Fan("good", [5])], vocab=99, policy=policy)

    def run(steps: int) -> list[tuple[int, ...]]:
        seen = []
        for _ in range(steps):
            seen += [tree.token_ids for tree in ensemble.propose(plans.plan(entry(9)))]
            ensemble.observe(StepReport([plans.outcome(5)]))
        return seen

    assert run(33 + 65) == [(7, 5)] * 98  # two failures, and pauses of 32 and 64 steps
    assert ensemble.failures == {"flaky": 2, "policy": 2}
    assert ensemble.num_paused == 2
    assert len(caplog.records) == 2
    flaky.broken = False
    assert run(1) == [(7, 9, 5)]
    assert ensemble.failures == {"flaky": 2, "policy": 3}
    policy.broken = False
    assert run(129)[-2:] == [(7, 9, 5), (7,)]
    assert ensemble.num_paused == 0
    flaky.broken = True
    run(1)
    assert (ensemble.failures["flaky"], ensemble.num_paused, len(caplog.records)) == (3, 1, 2)


class RaisingPolicy(SpeculationPolicy):
    """Raises at one question."""

    def __init__(self, question: str) -> None:
        self.question = question

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "question"):
            raise ZeroDivisionError
        return object.__getattribute__(self, name)


@pytest.mark.parametrize(
    "question", ["begin_step", "worth_starting", "worth_deepening", "choose_nodes", "appraise", "observe"]
)
def test_a_policy_that_raises_is_logged_once(question: str, caplog: pytest.LogCaptureFixture) -> None:
    ensemble = Ensemble([Levels("draft", [10, 11])], vocab=99, policy=RaisingPolicy("none"))
    ensemble._policy = RaisingPolicy(question)
    for step in range(3):
        (tree,) = ensemble.propose(plans.plan(entry(4)))
        assert step == 0 or tree.token_ids == (7,), "a draft without a policy has no limit of its cost"
        ensemble.explain()
        ensemble.observe(StepReport([plans.outcome(10)], {"target_forward": 1.0}))
    (record,) = caplog.records
    assert record.getMessage().startswith("the speculation policy RaisingPolicy failed")


# Decisions.


class Broken(Fan):
    """Raises when it is called."""

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        raise ZeroDivisionError


class NotWorthIt(SpeculationPolicy):
    """Starts no draft."""

    def worth_starting(self, speculator: str, entries: Sequence[PlanEntry], *more: Any) -> list[bool]:
        return [False] * len(entries)


def decided(
    *speculators: AnySpeculator, policy: SpeculationPolicy | None = None, **fields: Any
) -> tuple[Decision, TokenTree]:
    """Return the decision of a one-request step, and its tree."""
    ensemble = Ensemble(speculators, vocab=99, policy=policy or SpeculationPolicy(), clock=lambda: 0.0)
    [tree] = ensemble.propose(plans.plan(entry(**{"max_nodes": 9, **fields})))
    [decision] = ensemble.explain()
    return decision, tree


def test_all_are_named_in_their_order_with_what_was_kept_of_their_guesses() -> None:
    decision, tree = decided(
        *(Fan("a", [10, 11], 2 * [0.9]), Fan("none", []), Levels("b", [10, 12, 13], 3 * [0.9])), max_nodes=4
    )
    assert tree.token_ids == (7, 10, 11, 12)
    assert decision.contributions == (
        Contribution("a", reasons.GUESSED, drawn=2, verified=2, levels=1),
        Contribution("none", reasons.NO_GUESS),
        Contribution("b", reasons.GUESSED, drawn=3, verified=2, levels=3),
    )
    assert decision.expected_tokens is decision.guess_seconds is decision.seconds is None
    assert decision.requests == 1


def test_why_a_draft_has_not_guessed() -> None:
    for fields, policy, why in (
        ({"speculators": ("free",)}, SpeculationPolicy(), reasons.REQUEST),
        ({"max_nodes": 1}, SpeculationPolicy(), reasons.ROOM),
        ({}, NotWorthIt(), reasons.COST),
        ({}, SpeculationPolicy(), reasons.GUESSED),
    ):
        decision, _ = decided(Fan("free", []), Levels("draft", [10]), policy=policy, **fields)
        assert decision.contributions[1].reason == why, fields


def test_who_has_failed_is_told_of() -> None:
    ensemble = Ensemble([Broken("bad", []), Fan("good", [5])], vocab=99, policy=SpeculationPolicy())
    for _ in range(2):
        ensemble.propose(plans.plan(entry(9)))
        [decision] = ensemble.explain()
        assert [one.reason for one in decision.contributions] == [reasons.FAILED, reasons.GUESSED]
