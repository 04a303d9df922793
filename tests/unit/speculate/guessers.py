"""Speculators with given guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.batch import Rows
from specinfer.runtime.flight import Flight
from specinfer.runtime.runner import ModelRunner
from specinfer.speculate.speculator import LevelSpeculator, Speculator
from specinfer.tree import DrawRule, TokenTree, TreeBuilder
from tests import plans


class Fan(Speculator):
    """Guesses `tokens` below the root, up to its node budget, and records the budget."""

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

    def _tree(self, entry: PlanEntry) -> TokenTree:
        self.offered.append(entry.max_nodes)
        builder = TreeBuilder(entry.token_ids[entry.end - 1], entry.max_nodes)
        for token, confidence in zip(self._tokens, self._confidences, strict=True):
            if self.rule is DrawRule.POINT_MASS or not builder.full:
                builder.add(0, token, self.name, self.rule, confidence=confidence)
        return builder.build()


def entry(max_nodes: int, max_depth: int = 5, **fields: Any) -> PlanEntry:
    return plans.entry([3, 7], max_nodes=max_nodes, max_depth=max_depth, **fields)


class Levels(LevelSpeculator):
    """A draft that guesses the chain `tokens`."""

    def __init__(self, name: str, tokens: Sequence[int], confidences: Sequence[float] = ()) -> None:
        self.name = name
        self._tokens = tokens
        self._confidences = confidences or [0.5] * len(tokens)

    def begin(self, plan: StepPlan) -> list[int]:
        self._builders = [TreeBuilder(e.token_ids[e.end - 1], e.max_nodes) for e in plan.entries]
        return [1] * len(plan.entries)

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        for i in below:
            last = len(self._builders[i].parents) - 1
            token, confidence = self._tokens[last], self._confidences[last]
            self._builders[i].add(last, token, self.name, confidence=confidence)
        nodes = {i: len(self._builders[i].parents) for i in below if not self._builders[i].full}
        return {i: (count - 1,) for i, count in nodes.items() if count <= len(self._tokens)}

    def tree(self, entry: int) -> TokenTree:
        return self._builders[entry].build()


def passes_of(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The token ids that each request has in each pass that follows, as they come."""
    launch, passes = runner.launch, list[list[list[int]]]()

    def noting(rows: Sequence[Rows], **options: Any) -> Flight:
        passes.append([[*part.token_ids] for part in rows])
        return launch(rows, **options)

    monkeypatch.setattr(runner, "launch", noting)
    return passes
