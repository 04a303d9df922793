"""The guard forbids guesses, except for requests with a fixed size; and costs learn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from specinfer import SamplingParams
from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.cost_curve import CostCurve
from specinfer.runtime.cost_model import CostModel
from specinfer.sampling_params import SpeculationParams
from specinfer.speculate.ensemble import Ensemble, SharedTree
from specinfer.speculate.policy.allowance import WINDOW
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.guard import PLAIN_FIRST, Guard, PlainSteps
from specinfer.speculate.policy.policy import StepReport
from specinfer.speculate.speculator import Speculator
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.token_tree import Expansion
from tests import plans
from tests.oracles.plain_policy import PlainPolicy
from tests.unit.speculate.policy.priced import Reckless, sized

CURVE = CostCurve((1, 100), (1.0, 2.0))
OWN_SIZE = SpeculationParams(max_nodes=9)


class Asked(Speculator):
    """Guesses one wrong token, and records the requests."""

    name = "asked"

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.knows = True  # a token

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        self.asked.extend(entry.request.request_id for entry in plan.entries)
        trees = []
        for entry in plan.tree_entries:
            builder = TreeBuilder(entry.token_ids[entry.end - 1], entry.max_nodes)
            if self.knows:
                builder.add(0, 50, self.name, confidence=0.5)
            trees.append(builder.build())
        return trees


def entry(name: str = "r", *, overrides: SpeculationParams | None = None, **fields: Any) -> PlanEntry:
    params = SamplingParams(temperature=0, speculation=overrides)
    return plans.entry([*range(20), 7], request_id=name, params=params, **fields)


class Driven:
    """An ensemble of one guesser under a guarded policy, whose steps take the seconds a test says."""

    def __init__(self) -> None:
        self.guesser = Asked()
        self.target = CostModel(CURVE)
        self.draft = CostModel(CostCurve((1, 100), (0.25, 1.0)))
        self.policy = Reckless(self.target, self.draft)
        self.ensemble = Ensemble([self.guesser], vocab=99, policy=self.policy, clock=lambda: 0.0)

    def step(
        self,
        *entries: PlanEntry,
        seconds: float = 1.0,
        propose: float = 0.0,
        tokens: int = 1,
        plain: float = 1.0,
    ) -> list[str]:
        """Run one step that takes `seconds` if a speculator guesses; return its requests."""
        self.guesser.asked = []
        plan = plans.plan(*(entries or (entry(),)))
        trees = self.ensemble.propose(plan)
        assert len(trees) == len(plan.tree_entries)
        stages = {"propose": propose, "target_forward": seconds}
        if not self.guesser.asked and math.isfinite(seconds) and seconds > 0:
            stages = {"propose": 0.0, "target_forward": plain}
        outcomes = [plans.outcome(*range(tokens), request_id=e.request.request_id) for e in plan.tree_entries]
        self.ensemble.observe(StepReport(outcomes, stages))
        return self.guesser.asked

    @property
    def guard(self) -> Guard:
        return self.policy.guard

    def until_off(self, *entries: PlanEntry, **took: float) -> int:
        """Steps that lose, until the guard has had enough."""
        for step in range(1000):
            self.step(*entries, **took)
            if not self.guard.allowance.guessing:
                return step
        raise AssertionError("never off")


def test_who_has_a_size_of_its_own_is_guessed_for_all_the_same() -> None:
    driven = Driven()
    for _ in range(PLAIN_FIRST):
        driven.step(seconds=1.0)
    driven.until_off(propose=9.0)  # which leaves nothing to try a new request with
    both = entry("asking", overrides=OWN_SIZE), entry()
    assert [driven.step(*both) for _ in range(10)] == 10 * [["asking"]]


def test_a_step_without_a_guess_loses_what_looking_for_one_took() -> None:
    """This holds however slow the machine is: a step without guesses would be as slow."""
    driven = Driven()
    for _ in range(PLAIN_FIRST):
        driven.step()
    driven.guesser.knows = False
    for _ in range(4 * WINDOW):
        driven.step(seconds=1.5)
    assert driven.guard.allowance.guessing
    assert driven.until_off(propose=0.5) < 4 * WINDOW


def test_the_first_steps_are_plain_then_one_in_two_hundred_and_three_after_a_change() -> None:
    steps, plain = PlainSteps(), []
    for number in range(640):
        slowness = 1.0 if number < 500 else 2.0  # than which the multiple becomes another one
        if steps.due(slowness):
            plain.append(number)
            steps.learn(slowness, 1.5 / slowness)
        else:
            steps.since += 1
    assert plain == [0, 1, 2, 3, 4, 205, 406, 500, 509, 518]
    assert [*steps.multiples] == 3 * [0.75]


def test_the_last_five_count_and_none_that_is_no_number() -> None:
    steps = PlainSteps()
    for multiple in (9.0, 1.2, 1.1, 1.3, 900.0, 0.7, float("inf"), 0.0):
        steps.learn(1.0, multiple)
    assert [*steps.multiples] == [1.2, 1.1, 1.3, 900.0, 0.7]


# A plain policy.


_Answer = TypeVar("_Answer", bool, Sequence[int])

ROOT, TOKENS = 7, 4  # so few that guesses often agree
WIDTHS = (2, 1, 2)
TARGETS = (
    CostCurve((1, 8, 64), (1.0, 1.05, 2.0)),
    CostCurve((1, 4, 12), (1.0, 1.1, 3.0)),
    CostCurve((1, 2), (1.0, 1.6)),
)
DRAFT = CostCurve((1, 16), (0.05, 0.2))


class Run:
    """Run steps in which both policies get the same calls; `kinds` collects their answers."""

    def __init__(self, seed: int, requests: int, rule: DrawRule) -> None:
        self.chance = np.random.default_rng(seed)
        self.requests, self.rule = requests, rule
        expansion = Expansion(WIDTHS)
        target = TARGETS[seed % len(TARGETS)]
        self.tested = sized(target, DRAFT, WIDTHS)
        self.plain = PlainPolicy(target, DRAFT, expansion)
        self.kinds = set[str]()

    def step(self) -> None:
        entries = [self._entry(n) for n in range(self.requests)]
        shared = [SharedTree(entry) for entry in entries]
        for one in shared:
            one.add(self._guesses("ngram"))
            one.add(self._guesses("suffix"))
        for policy in self._both:
            policy.begin_step(plans.plan(*entries))
        guessed = [one.tree for one in shared]
        unread = [int(self.chance.choice([1, 2, 2, 300])) for _ in entries]
        asked = "draft", entries, unread, guessed
        starts = self._same(*(policy.worth_starting(*asked) for policy in self._both))
        drawn = self._drafted(entries, [i for i, start in enumerate(starts) if start])
        for i, tree in drawn.items():
            if self.chance.random() < 0.9:  # else what it drew is not to be used
                shared[i].add(tree)
        trees = [one.tree for one in shared]
        chosen, wanted = (policy.choose_nodes(trees) for policy in self._both)
        assert [shape(tree) for tree in chosen] == [shape(tree) for tree in wanted]
        for whole, part in zip(trees, chosen, strict=True):
            self.kinds.add("all" if part is whole else "none" if part.num_nodes == 1 else "some")
        outcomes = [
            plans.outcome(*self.chance.integers(TOKENS // 2, size=3).tolist(), request_id=str(n))
            for n in range(self.requests)
        ]
        for policy in self._both:
            policy.observe(StepReport(outcomes))

    def _drafted(self, entries: Sequence[PlanEntry], which: list[int]) -> dict[int, TokenTree]:
        builders = {i: TreeBuilder(ROOT, entries[i].max_nodes) for i in which if entries[i].max_nodes > 1}
        below: dict[int, Sequence[int]] = dict.fromkeys(builders, (0,))
        waiting: dict[int, list[int]] = {i: [] for i in builders}  # nodes without children, of any depth
        while below:
            for i, nodes in below.items():
                for node in nodes:
                    self._draw(builders[i], node, waiting[i])
            ends = {i: tuple(waiting[i]) for i in below if waiting[i] and not builders[i].full}
            question = [entries[i] for i in ends], [builders[i].build() for i in ends], [*ends.values()]
            if not ends:
                break
            chosen = self._same(*(policy.worth_deepening("draft", *question) for policy in self._both))
            below = {i: nodes for i, nodes in zip(ends, chosen, strict=True) if nodes}
            for i, nodes in below.items():
                waiting[i] = [node for node in waiting[i] if node not in nodes]
        return {i: builder.build() for i, builder in builders.items() if len(builder.parents) > 1}

    def _draw(self, builder: TreeBuilder, node: int, waiting: list[int]) -> None:
        """Children of a node, as many as its level has."""
        depth = len(builder.path_tokens(node))
        for token in self.chance.permutation(TOKENS)[: WIDTHS[depth]].tolist():
            if not builder.full:
                sure = float(self.chance.uniform(0.01, 0.99))
                child = builder.add(node, token, "draft", self.rule, confidence=sure)
                if child is not None and depth + 1 < len(WIDTHS):
                    waiting.append(child)

    @property
    def _both(self) -> tuple[CostPolicy, PlainPolicy]:
        return self.tested, self.plain

    def _same(self, tested: list[_Answer], plain: list[_Answer]) -> list[_Answer]:
        assert tested == plain
        self.kinds.update("going" if answer else "ending" for answer in tested)
        return tested

    def _entry(self, n: int) -> PlanEntry:
        wish = SpeculationParams(max_nodes=5) if self.chance.random() < 0.2 else None
        heat = float(self.chance.choice([0.0, 0.4, 0.5, 1.0, 1.4]))
        params = SamplingParams(temperature=heat, speculation=wish)
        text = [*range(20), ROOT]
        one = plans.entry(
            text,
            request_id=str(n),
            params=params,
            prediction=(1,) * (n % 2),
            rows=int(self.chance.integers(1, 3)),
        )
        return replace(
            one, max_nodes=int(self.chance.choice([1, 5, 16])), room=int(self.chance.integers(1, 99))
        )

    def _guesses(self, name: str, root: int = ROOT) -> TokenTree:
        builder = TreeBuilder(root)
        for _ in range(int(self.chance.integers(6))):
            parent = int(self.chance.integers(len(builder.parents)))
            sure = float(self.chance.choice([0.02, 0.3, 0.5, 0.9, 0.99]))
            builder.add(parent, int(self.chance.integers(TOKENS)), name, confidence=sure)
        return builder.build()


def shape(tree: TokenTree) -> tuple[object, ...]:
    places = [(draw.parent, draw.node, draw.speculator, draw.confidence) for draw in tree.draws]
    return tree.token_ids, tree.parents, places


@pytest.mark.few(2)
@pytest.mark.parametrize("rule", [DrawRule.POINT_MASS, DrawRule.IID])
@pytest.mark.parametrize("requests", [1, 3])
def test_it_decides_as_the_plain_policy_does(requests: int, rule: DrawRule) -> None:
    kinds = set[str]()
    for seed in (*range(6), 10, 33):
        run = Run(seed, requests, rule)
        for _ in range(25):
            run.step()
        kinds |= run.kinds
    assert kinds == {"going", "ending", "all", "some", "none"}, "all of it was asked"
