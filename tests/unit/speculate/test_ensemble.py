"""Several speculators share one request's budget of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specinfer.errors import ConfigError, SpeculatorError
from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy import FixedPolicy, StepReport
from specinfer.speculate.speculator import Outcome
from specinfer.tree import Draw, DrawRule, TokenTree, TreeBuilder
from tests import plans


class Fan:
    """Guesses `tokens` below the root, as many as it is offered nodes for, and notes the offer."""

    def __init__(self, name: str, tokens: Sequence[int]) -> None:
        self.name = name
        self._tokens = tokens
        self.offered: list[int] = []
        self.shown: list[PlanEntry] = []

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        self.shown.extend(plan.entries)
        return [self._tree(entry) for entry in plan.tree_entries]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        pass

    def _tree(self, entry: PlanEntry) -> TokenTree:
        self.offered.append(entry.max_nodes)
        builder = TreeBuilder(entry.token_ids[entry.end - 1], entry.max_nodes)
        for token in self._tokens:
            builder.add(0, token, self.name)
        return builder.build()


def entry(max_nodes: int, max_depth: int = 5, **fields: Any) -> PlanEntry:
    return plans.entry([3, 7], max_nodes=max_nodes, max_depth=max_depth, **fields)


@pytest.mark.parametrize(
    ("max_nodes", "offered", "token_ids"),
    [
        (9, ([9], [6], [5]), (7, 10, 11, 12, 13, 14)),  # b's 11 and 12 are a's too, and cost nothing
        (5, ([5], [2], [2]), (7, 10, 11, 12, 14)),  # b has room for one more and guesses 11, which is there
        (4, ([4], [1], [1]), (7, 10, 11, 12)),  # a fills the tree, the others have no room
        (3, ([3], [1], [1]), (7, 10, 11)),
    ],
)
def test_each_is_offered_what_its_predecessors_left(
    max_nodes: int, offered: tuple[list[int], ...], token_ids: tuple[int, ...]
) -> None:
    a, b, c = Fan("a", [10, 11, 12]), Fan("b", [11, 12, 13]), Fan("c", [14])
    (tree,) = Ensemble([a, b, c], vocab=99, policy=FixedPolicy()).propose(plans.plan(entry(max_nodes)))
    assert (a.offered, b.offered, c.offered) == offered
    assert tree.token_ids == token_ids
    assert tree.num_nodes <= max_nodes


def test_prompts_are_shown_and_only_trees_are_asked_for() -> None:
    fan = Fan("a", [10])
    reading = plans.entry([3, 7, 7, 7], rows=3, max_nodes=0, max_depth=0)
    step = plans.plan(entry(1, max_depth=0), reading, entry(8), entry(8, speculators=("b",)))
    trees = Ensemble([fan], vocab=99, policy=FixedPolicy()).propose(step)
    assert [tree.token_ids for tree in trees] == [(7,), (7, 10), (7,)]
    assert [(e.end, e.max_nodes) for e in fan.shown] == [(2, 1), (4, 0), (2, 8)]


def test_two_speculators_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="a name of its own"):
        Ensemble([Fan("a", [1]), Fan("a", [2])], vocab=99, policy=FixedPolicy())


UNSURE = Draw(0, 1, "wrong", DrawRule.POINT_MASS, confidence=None)  # type: ignore[arg-type]


class Wrong(Fan):
    """Gives back `trees`, whatever it is asked."""

    def __init__(self, *trees: TokenTree) -> None:
        super().__init__("wrong", [])
        self._trees = list(trees)
        self.asked = 0

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        self.asked += 1
        return self._trees


@pytest.mark.parametrize(
    ("trees", "complaint"),
    [
        ([], "gave 0 trees for 1 entries; propose returns one for each"),
        ([TokenTree((6,), (-1,))], "proposed a tree rooted at token 6; the last token is 7"),
        ([TokenTree((7, 1, 2, 3), (-1, 0, 0, 0))], "proposed a tree of 4 nodes; entry.max_nodes is 3"),
        ([TokenTree((7, 1, 2), (-1, 0, 1))], "proposed a tree of depth 2; entry.max_depth is 1"),
        ([TokenTree((7, 99), (-1, 0))], "proposed a tree with tokens outside the vocabulary of 99"),
        ([TokenTree((7, -1), (-1, 0))], "proposed a tree with tokens outside the vocabulary of 99"),
        ([TokenTree((7, 1), (-1, 0), (UNSURE,))], "with a draw whose confidence is no number"),
    ],
)
def test_a_speculator_that_breaks_its_contract_is_named_once_and_not_asked_again(
    trees: list[TokenTree], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, good = Wrong(*trees), Fan("good", [5])
    ensemble = Ensemble([wrong, good], vocab=99, policy=FixedPolicy())
    for _ in range(3):
        (tree,) = ensemble.propose(plans.plan(entry(3, max_depth=1)))
        assert tree.token_ids == (7, 5)
        ensemble.observe(StepReport([plans.outcome(5)]))
    assert wrong.asked == 1
    (record,) = caplog.records
    assert record.getMessage().startswith("speculator 'wrong' failed and is not asked again")
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], SpeculatorError)
    assert complaint in str(record.exc_info[1])


class Raising(Fan):
    """Works until `part` is called."""

    def __init__(self, part: str) -> None:
        super().__init__("raising", [9])
        setattr(self, part, self._fail)

    def _fail(self, *_: object) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("part", ["propose", "observe"])
def test_a_speculator_that_raises_is_muted_and_others_go_on(
    part: str, caplog: pytest.LogCaptureFixture
) -> None:
    ensemble = Ensemble([Raising(part), Fan("good", [5])], vocab=99, policy=FixedPolicy())
    seen = []
    for _ in range(3):
        seen += [tree.token_ids for tree in ensemble.propose(plans.plan(entry(9)))]
        ensemble.observe(StepReport([plans.outcome(5)]))
    first = (7, 5) if part == "propose" else (7, 9, 5)
    assert seen == [first, (7, 5), (7, 5)]
    assert len(caplog.records) == 1


class Broken(FixedPolicy):
    """A policy whose `part` raises, or gives this answer."""

    def __init__(self, part: str, answer: object) -> None:
        def fail(*_: object) -> object:
            if answer is None:
                raise ZeroDivisionError
            return answer

        setattr(self, part, fail)


@pytest.mark.parametrize(
    ("part", "answer"),
    [
        ("begin_step", None),
        ("show", None),
        ("choose_nodes", None),
        ("choose_nodes", []),
        ("choose_nodes", [TokenTree((8,), (-1,))]),
        ("observe", None),
    ],
)
def test_a_policy_that_fails_is_replaced(part: str, answer: object, caplog: pytest.LogCaptureFixture) -> None:
    ensemble = Ensemble([Fan("good", [5])], vocab=99, policy=Broken(part, answer))
    for _ in range(2):
        (tree,) = ensemble.propose(plans.plan(entry(9)))
        assert tree.token_ids == (7, 5)
        ensemble.observe(StepReport([plans.outcome(5)]))
    (record,) = caplog.records
    assert "the speculation policy Broken failed; trees have their configured size" in record.getMessage()
