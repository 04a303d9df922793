"""What a draft finds out of places at which it was not asked, when it reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.plan import PlanEntry
from specinfer.processors.pipeline import Processors
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.runner import ModelRunner
from specinfer.speculate.drafts import hindsight
from specinfer.speculate.drafts.draft_model import DraftModel
from specinfer.speculate.drafts.growth import Shape
from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.draft_costs import DraftCosts
from specinfer.speculate.policy.fixed_policy import FixedPolicy
from specinfer.speculate.policy.speculation_policy import StepReport
from specinfer.speculate.speculator import LevelOutcome, Outcome
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.expansion import Expansion
from tests import plans
from tests.engines import Tiny, write_tiny
from tests.unit.speculate.policy import priced

PROMPT = [9, 8, 7, 6, 5, 4]
GREEDY = SamplingParams(temperature=0)
WARM = SamplingParams(temperature=0.9)
SAMPLED = SamplingParams(temperature=0.9, speculation={"verifier": "mss"})
SHAPED = Shape(Expansion((2, 2, 2, 2)), DrawRule.COUPLED)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return write_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=64, max_context=96)


class Asking(FixedPolicy):
    """Asks drafts in the steps of these numbers, for their first level alone."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.now = steps, -1
        self.unread: list[int] = []
        self.told: list[list[tuple[int, int | None]]] = []

    def worth_starting(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        unread: Sequence[int],
        guessed: Sequence[TokenTree],
    ) -> list[bool]:
        self.now += 1
        self.unread += unread
        return [self.now in self.steps] * len(entries)

    def worth_deepening(
        self,
        speculator: str,
        entries: Sequence[PlanEntry],
        trees: Sequence[TokenTree],
        ends: Sequence[Sequence[int]],
    ) -> list[Sequence[int]]:
        return [() for _ in entries]

    def observe(self, report: StepReport) -> None:
        self.told.append([(one.level, one.choice) for one in report.hindsight.get("draft", ())])


def model(tiny: Tiny, shape: Shape, max_rows: int = 96) -> DraftModel:
    runner = ModelRunner(tiny.similar, num_blocks=60, block_size=4)
    return DraftModel("draft", runner, shape, max_rows=max_rows)


def entry(text: Sequence[int], params: SamplingParams = GREEDY, **fields: Any) -> PlanEntry:
    prompt, answer = list(text[: len(PROMPT)]), text[len(PROMPT) :]
    return plans.entry(prompt, answer, params=params, block_table=tuple(range(30)), **fields)


def play(
    draft: DraftModel, answer: Sequence[int], policy: Asking, params: SamplingParams = GREEDY, **fields: Any
) -> None:
    """A step for each token of the answer, which is its only one."""
    ensemble = Ensemble([draft], vocab=64, policy=policy)
    for count, token in enumerate(answer):
        ensemble.propose(plans.plan(entry([*PROMPT, *answer[:count]], params, **fields)))
        ensemble.observe(StepReport([Outcome("r", (token,), finished=False)], {"commit": 1.0}))


def guessed(tiny: Tiny, text: Sequence[int], shape: Shape, params: SamplingParams) -> list[int]:
    """The children that a new draft draws below the last token of a text."""
    policy = Asking(0)
    (tree,) = Ensemble([model(tiny, shape)], vocab=64, policy=policy).propose(plans.plan(entry(text, params)))
    return [tree.token_ids[draw.node] for draw in tree.draws]


def written(tiny: Tiny, length: int, shape: Shape, params: SamplingParams) -> list[int]:
    """An answer of which the draft would guess most places, first, second and not at all."""
    answer: list[int] = []
    for place in range(length):
        drawn = guessed(tiny, [*PROMPT, *answer], shape, params)
        which = (0, 0, 1, 0, 9, 0)[place % 6]
        answer.append(drawn[which] if which < len(drawn) else 63)
    return answer


@pytest.mark.parametrize("params", [GREEDY, WARM, SAMPLED], ids=["greedy", "coupled", "samples"])
def test_it_tells_what_trees_at_all_places_would_have_come_to(tiny: Tiny, params: SamplingParams) -> None:
    answer = written(tiny, 14, SHAPED, params)
    policy = Asking(1, 12, 13)
    play(model(tiny, SHAPED), answer, policy, params)
    # Asked when 1 token of the answer was there, and the next time when 12 were.
    drawn = {place: guessed(tiny, [*PROMPT, *answer[:place]], SHAPED, params) for place in range(2, 12)}
    came = {place: drawn[place].index(t) if (t := answer[place]) in drawn[place] else None for place in drawn}
    wanted = [
        (level, came[place])
        for place in drawn
        for level in range(4)
        if all(came.get(above) is not None for above in range(place - level, place))
    ]
    assert policy.told[12] == wanted
    assert [*map(len, policy.told)] == [0] * 12 + [len(wanted), 0]
    assert {choice for _, choice in wanted} == {0, 1, None}
    assert max(level for level, _ in wanted) > 0


def test_a_wider_level_and_those_below_it_are_not_told_of(tiny: Tiny) -> None:
    shape = SHAPED._replace(expansion=Expansion((1, 1, 3, 1)))
    answer: list[int] = []
    for _ in range(9):
        answer += guessed(tiny, [*PROMPT, *answer], shape, GREEDY)
    policy = Asking(0, 8)
    play(model(tiny, shape), answer, policy)
    assert policy.told[8] == [(0, 0), *[(0, 0), (1, 0)] * 6]


def test_so_many_places_at_most_are_looked_at_the_last_ones(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = written(tiny, 12, SHAPED, GREEDY)
    whole, part = Asking(0, 11), Asking(0, 11)
    play(model(tiny, SHAPED), answer, whole)
    monkeypatch.setattr(hindsight, "MOST_PLACES", 3)
    play(model(tiny, SHAPED), answer, part)
    firsts = [choice for level, choice in whole.told[11] if level == 0]
    assert len(firsts) == 10
    assert [choice for level, choice in part.told[11] if level == 0] == firsts[-3:]


def test_a_text_that_is_read_over_several_steps_is_looked_at_as_it_is_read(tiny: Tiny) -> None:
    answer = written(tiny, 12, SHAPED, GREEDY)
    at_once, in_parts = Asking(0, 11), Asking(0, 10, 11)
    play(model(tiny, SHAPED), answer, at_once)
    play(model(tiny, SHAPED, max_rows=6), answer, in_parts)
    assert in_parts.unread[11] == 11 - 6, "six rows were read in the step before"
    levels = [[c for level, c in told if level == 0] for told in (in_parts.told[10], in_parts.told[11])]
    assert levels[0] + levels[1] == [c for level, c in at_once.told[11] if level == 0]
    assert min(map(len, levels)) > 0


def test_of_prompts_and_what_was_there_before_nothing_is_told(tiny: Tiny) -> None:
    policy = Asking(1)
    play(model(tiny, SHAPED), [1, 2], policy)
    assert policy.unread == [len(PROMPT), len(PROMPT) + 1]
    assert policy.told == [[], []], "nor of the first token of the answer"


def test_where_parameters_change_logits_nothing_is_told(tiny: Tiny) -> None:
    params = SamplingParams(temperature=0, frequency_penalty=0.5)
    processors = Processors(params, PROMPT, vocab=64, ending=frozenset())
    policy = Asking(0, 5)
    play(model(tiny, SHAPED), [1, 2, 3, 4, 5, 6], policy, params, processors=processors)
    assert policy.unread[-1] == 5
    assert policy.told[-1] == []


def test_a_text_without_a_tree_is_looked_at_in_its_own_rows(tiny: Tiny) -> None:
    answer = written(tiny, 12, SHAPED, GREEDY)
    whole = Asking(0, 11)
    play(model(tiny, SHAPED), answer, whole)
    for fields in ({"max_nodes": 1}, {"max_nodes": 2}, {"max_depth": 0}):
        draft, policy = model(tiny, SHAPED), Asking(0, 10, 11)
        ensemble = Ensemble([draft], vocab=64, policy=policy)
        for count, token in enumerate(answer):
            here = fields if count == 10 else {}
            ensemble.propose(plans.plan(entry([*PROMPT, *answer[:count]], **here)))
            ensemble.observe(StepReport([Outcome("r", (token,), finished=False)], {"commit": 1.0}))
        told, wanted = policy.told[10], whole.told[11]
        assert told == wanted[: len(told)], fields
        assert bool(told) == (fields == {"max_nodes": 2}), "what follows the last row is not known"


def test_an_answer_that_is_read_anew_in_chunks_is_looked_at_once(tiny: Tiny) -> None:
    answer = written(tiny, 12, SHAPED, GREEDY)
    whole = Asking(0, 11)
    play(model(tiny, SHAPED), answer, whole)
    draft, policy = model(tiny, SHAPED), Asking(0, 10, 11)
    ensemble = Ensemble([draft], vocab=64, policy=policy)
    for count, token in enumerate(answer[:10]):
        ensemble.propose(plans.plan(entry([*PROMPT, *answer[:count]])))
        ensemble.observe(StepReport([Outcome("r", (token,), finished=False)], {"commit": 1.0}))
    text = [*PROMPT, *answer[:11]]
    chunk = replace(entry(text), start=0, end=len(PROMPT) + 7, max_nodes=0, incarnation=1)
    last = replace(entry(text), start=len(PROMPT) + 7, incarnation=1)
    for one in (chunk, last):
        ensemble.propose(plans.plan(one))
        ensemble.observe(StepReport([], {"commit": 1.0}))
    firsts = [c for level, c in whole.told[11] if level == 0]
    in_chunks = [[c for level, c in told if level == 0] for told in policy.told[10:]]
    assert in_chunks[0] + in_chunks[1] == firsts
    assert min(map(len, in_chunks)) > 0


def test_before_a_text_may_end_nothing_is_told(tiny: Tiny) -> None:
    answer = written(tiny, 12, SHAPED, GREEDY)
    whole, part = Asking(0, 11), Asking(0, 11)
    play(model(tiny, SHAPED), answer, whole)
    play(model(tiny, SHAPED), answer, part, SamplingParams(temperature=0, min_tokens=5))
    firsts = [[c for level, c in told.told[11] if level == 0] for told in (whole, part)]
    assert (len(firsts[0]), len(firsts[1])) == (10, 6), "the sixth token is the first that may end it"
    assert firsts[1] == firsts[0][-6:]


def test_it_is_told_of_the_request_whose_text_was_read() -> None:
    texts = {"right": [*PROMPT, 5, 6, 7, 8], "wrong": [*PROMPT, 9, 9, 9, 9]}
    seen = hindsight.Hindsight("draft", SHAPED)
    seen.begin([entry(PROMPT, request_id=name) for name in texts])
    for name, text in texts.items():
        one = entry(text, request_id=name)
        start = len(PROMPT)
        assert seen.look_at(one, start, len(text) - 1) == 3
        for site in seen.sites(one):
            token = texts["right"][site.position]  # what the draft would have guessed, whatever the text
            site.builder.add(site.node, token, "draft", DrawRule.COUPLED, confidence=0.9)
    assert [*dict.fromkeys(told.request_id for told in seen.outcomes())] == ["right", "wrong"]
    for name, choice in (("right", 0), ("wrong", None)):
        assert {told.choice for told in seen.outcomes() if told.request_id == name} == {choice}


def test_the_policy_counts_it_as_it_counts_trees() -> None:
    counted, told = (DraftCosts(CostCurve((1, 2), (1.0, 1.0)), Expansion((1, 1, 1))) for _ in range(2))
    found = [(0, 0), (0, 0), (1, 0), (0, None), (1, None), (2, None), (0, 1)]
    outcomes = [LevelOutcome("a", level, choice) for level, choice in found]
    for outcome in outcomes:
        counted.learn(outcome, 1.5)
    policy = CostPolicy(CostCurve((1, 2), (1.0, 1.0)), {"draft": told})
    policy.begin_step(plans.plan(priced.entry("a", temperature=1.5)))
    policy.observe(StepReport([], {"commit": 1.0}, hindsight={"draft": outcomes}))
    assert told.to_json() == counted.to_json()
    assert told.rate(0, "a") == counted.rate(0, "a") != told.rate(0, "b")
    assert told.rate(0) != DraftCosts(CostCurve((1, 2), (1.0, 1.0)), Expansion((1, 1, 1))).rate(0)
