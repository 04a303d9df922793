"""Medusa's heads as a speculator: all levels of a tree from the hidden state of the token before its root.

    text      ... t(end-3)  t(end-2)   root   |
    heard                      h              |   head i guesses the token at position end + i

Of a text nothing but its last hidden state is kept. Where a request starts behind blocks that others left, up
to its last token, there is none yet: then its first tree is the root alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.runtime.features import TappedRows, TextFeatures
from specinfer.runtime.head_runner import MedusaRunner
from specinfer.speculate.drafts.draft_vocabulary import DraftVocabulary
from specinfer.speculate.drafts.growth import Growth, Guessed, Shape
from specinfer.speculate.drafts.one_pass import OnePassTrees
from specinfer.speculate.speculator import LevelSpeculator, Outcome
from specinfer.tree import TokenTree

_ROWS: Final = 2  # that a text counts as, by which a step's passes are priced (head_runner.py)


class MedusaDraft(LevelSpeculator):
    """A level speculator that is Medusa's heads: its trees are whole after their first level."""

    def __init__(
        self, name: str, runner: MedusaRunner, shape: Shape, *, vocabulary: DraftVocabulary | None = None
    ) -> None:
        """`shape` is of trees that are not grown best first, and says how it draws."""
        self.name = name
        self.taps: tuple[int, ...] = runner.model.head.taps
        self._runner = runner
        self._depth = runner.model.head.depth
        self._trees = OnePassTrees.of(name, runner.model, shape, vocabulary)
        self._last: dict[str, tuple[int, TappedRows]] = {}  # of each text: where it ends, its last state
        self._growths: list[Growth] = []  # of the step that is open, one per entry of its plan

    def most_nodes(self, request: Request) -> int:
        """A full tree of the request's expansion, or the most that is grown of any."""
        return self._trees.most_nodes(request)

    def begin(self, plan: StepPlan) -> list[int]:
        """Open a step; each entry that has a tree counts as the two rows that a text is priced as."""
        self._growths = [
            Growth.of(entry, self.name, min(entry.max_depth, self._depth)) for entry in plan.entries
        ]
        return [_ROWS * (self._state(entry) is not None) for entry in plan.entries]

    def see_choices(self, guessed: Sequence[TokenTree], chosen: Sequence[TokenTree]) -> None:
        """Guess about as much as is verified."""
        self._trees.see_choices(guessed, chosen)

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Grow the whole tree of each of these entries whose last state is known; none can go on."""
        growing: list[Growth] = []
        states: list[TappedRows] = []
        for i in below:
            growth = self._growths[i]
            state = self._state(growth.entry)
            if growth.limit > 0 and state is not None:
                growing.append(growth)
                states.append(state)
        if growing:
            levels = max(growth.limit for growth in growing)
            read_RD, logits_RU = self._runner.run(states, levels)
            guessed: list[Guessed] = [
                self._trees.guessed(growth, i * levels, levels) for i, growth in enumerate(growing)
            ]
            self._trees.grow(guessed, read_RD, logits_RU)
        return {}

    def tree(self, entry: int) -> TokenTree:
        """The tree of the plan's entry of that number."""
        return self._growths[entry].tree()

    def hear(self, texts: Sequence[TextFeatures]) -> None:
        """Keep the last hidden state of each text."""
        for features in texts:
            count = len(features.states)
            last = features.states.part(count - 1, count).to_keep()
            self._last[features.entry.request.request_id] = features.end, last

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Forget requests that ended."""
        for outcome in outcomes:
            if outcome.finished:
                self._last.pop(outcome.request_id, None)

    def _state(self, entry: PlanEntry) -> TappedRows | None:
        """The hidden state of the token before the entry's root; None: it has no tree, or nobody knows it."""
        end, state = self._last.get(entry.request.request_id, (0, None))
        return state if entry.has_tree and end == entry.end - 1 else None
