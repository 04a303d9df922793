"""A policy of anybody's is asked as long as it gives answers: one that does not is replaced for good."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specinfer.plan import StepPlan
from specinfer.speculate.policy.decision import Appraisal
from specinfer.speculate.policy.fixed_policy import FixedPolicy
from specinfer.speculate.policy.speculation_policy import StepReport
from specinfer.speculate.policy.trusted_policy import TrustedPolicy
from specinfer.tree.merging import keep
from specinfer.tree.token_tree import single_node
from tests import plans
from tests.unit.speculate.policy.priced import chain, entry

ENTRY, TREE = entry("r"), chain(0.5, 0.5)
PLAN = plans.plan(ENTRY)
ASKED = {
    "begin_step": (PLAN,),
    "worth_starting": ("draft", [ENTRY], [1], [TREE]),
    "worth_deepening": ("draft", [ENTRY], [TREE], [[1, 2]]),
    "choose_nodes": ([TREE],),
    "appraise": ([TREE],),
    "observe": (StepReport([plans.outcome(5)]),),
}


class Answering(FixedPolicy):
    """Answers `part` like that; an exception is raised."""

    def __init__(self, part: str, answer: object) -> None:
        super().__init__()

        def give(*_: object) -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

        setattr(self, part, give)


@pytest.mark.parametrize(
    ("part", "answer"),
    [
        *[(part, ZeroDivisionError()) for part in ASKED],
        ("begin_step", None),
        ("begin_step", StepPlan(())),
        ("begin_step", plans.plan(entry("another"))),
        ("worth_starting", []),
        ("worth_starting", [True, True]),
        ("worth_deepening", []),
        ("worth_deepening", [[0]]),  # which is no end
        ("worth_deepening", [[2, 2]]),
        ("choose_nodes", []),
        ("choose_nodes", [single_node(8)]),
        ("choose_nodes", [chain(0.5, 0.5, 0.5)]),
        ("appraise", Appraisal([[1.0]], 0.0, 1.0)),
    ],
)
def test_what_is_no_answer_is_logged_once_and_nobody_asks_again(
    part: str, answer: object, caplog: pytest.LogCaptureFixture
) -> None:
    trusted = TrustedPolicy(Answering(part, answer))
    usual = getattr(FixedPolicy(), part)(*ASKED[part])
    assert [getattr(trusted, part)(*ASKED[part]) for _ in range(2)] == [usual, usual]
    (record,) = caplog.records
    said = "the speculation policy Answering failed; trees are no longer sized by what they cost"
    assert record.getMessage() == said


@pytest.mark.parametrize(
    ("part", "answer"),
    [
        ("begin_step", plans.plan(replace(ENTRY, speculators=()))),
        ("worth_starting", [False]),
        ("worth_deepening", [[2]]),
        ("worth_deepening", [[]]),
        ("choose_nodes", [keep(TREE, [0, 1])]),
        ("appraise", Appraisal([[1.0, 0.5, 0.2]], 0.0, 1.0)),
    ],
)
def test_answers_are_handed_on(part: str, answer: object, caplog: pytest.LogCaptureFixture) -> None:
    assert getattr(TrustedPolicy(Answering(part, answer)), part)(*ASKED[part]) is answer
    assert not caplog.records


def test_from_then_on_another_policy_decides_all() -> None:
    trusted = TrustedPolicy(Answering("observe", ZeroDivisionError()), Answering("worth_starting", [False]))
    assert trusted.worth_starting("draft", [ENTRY], [1], [TREE]) == [True]
    trusted.observe(StepReport([plans.outcome(5)]))
    assert trusted.worth_starting("draft", [ENTRY], [1], [TREE]) == [False]
