"""What a target's passes leave for heads: hidden states of the tokens that became text.

A head reads texts as they grow. Of a step's rows those of prompts' chunks, of roots and of accepted paths are
kept until it does; those of rejected nodes are not. What nobody reads is dropped, oldest first: a head may
miss the beginning of a text, but no part in the middle of what it has read.

Shapes: T tokens of one text, N taps, D the target's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.batch import Rows
from specinfer.runtime.flight import Flight


@dataclass(frozen=True, slots=True)
class TextFeatures:
    """The target's hidden states of some tokens of a text, [T, N, D], from position `start` on."""

    entry: PlanEntry  # of the step whose pass they are from
    start: int
    taps_TND: Tensor

    @property
    def end(self) -> int:
        """Behind the last position."""
        return self.start + len(self.taps_TND)


@dataclass(frozen=True, slots=True)
class TextRows:
    """Which rows of a pass became text, request by request."""

    entries: list[PlanEntry]
    rows: list[list[int]]

    def of_those(self, wanted: Callable[[PlanEntry], bool]) -> TextRows:
        """The rows of the texts whose entries are wanted."""
        chosen = [i for i, entry in enumerate(self.entries) if wanted(entry)]
        return TextRows([self.entries[i] for i in chosen], [self.rows[i] for i in chosen])

    def features(self, flight: Flight, taps: Sequence[int]) -> list[TextFeatures]:
        """Copies of their hidden states at these layers."""
        if not self.entries:
            return []
        chosen = torch.tensor([*chain.from_iterable(self.rows)])
        tapped = [flight.hidden(tap) for tap in taps]
        copied_TND = torch.stack([h.index_select(0, chosen.to(h.device)) for h in tapped], dim=1)
        parts = torch.split(copied_TND, [len(rows) for rows in self.rows])
        return [
            TextFeatures(entry, entry.start, part) for entry, part in zip(self.entries, parts, strict=True)
        ]


def text_rows(plan: StepPlan, rows: Sequence[Rows], paths: Sequence[Sequence[int] | None]) -> TextRows:
    """Which rows of a step's pass became text.

    `rows` are those of each entry, and `paths` the accepted nodes of each of `plan.tree_entries`' trees; None
    where the text ends with this step, so that nobody will read it.
    """
    found = TextRows([], [])
    accepted = iter(paths)
    first = 0
    for entry, part in zip(plan.entries, rows, strict=True):
        path = next(accepted) if entry.has_tree else ()
        root = first + entry.end - entry.start - 1
        if path is not None:
            found.entries.append(entry)
            found.rows.append([*range(first, root + 1), *(root + node for node in path)])
        first += len(part.token_ids)
    return found


class UnreadFeatures:
    """Hidden states of one text that a head has not read: of the tokens first, first + 1, ..., end - 1."""

    __slots__ = ("_parts", "end", "first")

    def __init__(self, first: int) -> None:
        self.first = first
        self.end = first
        self._parts: list[Tensor] = []  # [T, N, D] each

    def add(self, taps_TND: Tensor) -> None:
        """Those of the tokens from `end` on."""
        self._parts.append(taps_TND)
        self.end += len(taps_TND)

    def take(self, count: int) -> Tensor:
        """The first `count`, [count, N, D], which are gone then; there are so many."""
        taken: list[Tensor] = []
        left = count
        while left:
            part = self._parts.pop(0)
            taken.append(part[:left])
            if len(part) > left:
                self._parts.insert(0, part[left:])
            left -= len(taken[-1])
        self.first += count
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def drop_before(self, position: int) -> None:
        """Forget those of tokens before `position`, which may lie behind all of them."""
        known = min(position, self.end) - self.first
        if known > 0:
            self.take(known)
        if position > self.end:
            self.first = self.end = position
