"""Speculators that guess what they are told to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specinfer.plan import PlanEntry, StepPlan
from specinfer.speculate.speculator import Outcome
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from tests import plans


class Fan:
    """Guesses `tokens` below the root, as many as it is offered nodes for, and notes the offer."""

    rule = DrawRule.POINT_MASS

    def __init__(self, name: str, tokens: Sequence[int], confidences: Sequence[float] = ()) -> None:
        self.name = name
        self._tokens = tokens
        self._confidences = confidences or [0.5] * len(tokens)
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
        for token, confidence in zip(self._tokens, self._confidences, strict=True):
            if self.rule is DrawRule.POINT_MASS or not builder.full:
                builder.add(0, token, self.name, self.rule, confidence=confidence)
        return builder.build()


def entry(max_nodes: int, max_depth: int = 5, **fields: Any) -> PlanEntry:
    return plans.entry([3, 7], max_nodes=max_nodes, max_depth=max_depth, **fields)


class Levels(Fan):
    """A draft that guesses `tokens` one below the other, and notes what the policy was shown before."""

    def begin(self, plan: StepPlan) -> list[int]:
        self._builders = [TreeBuilder(e.token_ids[e.end - 1], e.max_nodes) for e in plan.entries]
        return [1] * len(plan.entries)

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        for i in below:
            last = len(self._builders[i].parents) - 1
            token, confidence = self._tokens[last], self._confidences[last]
            self._builders[i].add(last, token, self.name, confidence=confidence)
        nodes = {i: len(self._builders[i].parents) for i in below}
        return {i: (count - 1,) for i, count in nodes.items() if count <= len(self._tokens)}

    def tree(self, entry: int) -> TokenTree:
        return self._builders[entry].build()


class Following(Fan):
    """Guesses nothing of its own, and `tokens` one below the other after whatever others guess."""

    def __init__(self, name: str, tokens: Sequence[int], confidence: float = 0.5) -> None:
        super().__init__(name, [])
        self._follow = tokens
        self._sure = confidence
        self.asked: list[tuple[tuple[int, ...], int]] = []

    def extend(self, entry: PlanEntry, path: Sequence[int], most: int) -> TokenTree:
        self.asked.append((tuple(path), most))
        builder = TreeBuilder(path[-1], most)
        node: int | None = 0
        for token in self._follow:
            node = builder.add(node, token, self.name, confidence=self._sure) if node is not None else None
        return builder.build()
