"""The cost policy decides as the plain one does, whatever is guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest

from specinfer import SamplingParams
from specinfer.plan import PlanEntry
from specinfer.runtime.cost_curve import CostCurve
from specinfer.sampling_params import SpeculationParams
from specinfer.speculate.ensemble import SharedTree
from specinfer.speculate.policy.cost_policy import CostPolicy
from specinfer.speculate.policy.policy import StepReport
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from specinfer.tree.token_tree import Expansion
from tests import plans
from tests.oracles.plain_policy import PlainPolicy
from tests.unit.speculate.policy.priced import sized

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
