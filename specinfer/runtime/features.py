"""What a target's passes leave for heads: hidden states of the tokens that became text.

A head reads texts as they grow. Of a step's rows those of prompts' chunks, of roots and of accepted paths are
kept until it does; those of rejected nodes are not. What nobody reads is dropped, oldest first: a head may
miss the beginning of a text, but no part in the middle of what it has read.

A head that is asked in every step reads them where the pass has left them, and one that is not asked costs a
note of where they are: they are copied where keeping a whole pass for a few rows would take memory.

Shapes: T tokens of one text, N taps, D the target's hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from specinfer.plan import PlanEntry, StepPlan
from specinfer.runtime.flight import Flight
from specinfer.tree import TokenTree

_SMALL_PASS: Final = 64  # rows, of which some are kept by keeping all
_MOST_PASSES: Final = 64  # that are kept for one text


class TappedRows:
    """Hidden states of some rows of a pass, where the pass has left them: those of all its rows are kept."""

    __slots__ = ("_pass_TND", "_rows")

    def __init__(self, pass_TND: Tensor, rows: Sequence[int]) -> None:
        """`pass_TND` is contiguous, and nobody writes to it."""
        self._pass_TND = pass_TND
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, begin: int, end: int) -> TappedRows:
        """The rows from the begin-th on, up to the end-th."""
        return TappedRows(self._pass_TND, self._rows[begin:end])

    def copied(self) -> Tensor:
        """A copy of the rows alone, [T, N, D]."""
        return self._pass_TND.index_select(0, torch.tensor(self._rows, device=self._pass_TND.device))

    def addresses(self) -> list[int]:
        """Where each row lies, [N, D], while this is kept."""
        first, bytes_ = self._pass_TND.data_ptr(), self._pass_TND.stride(0) * self._pass_TND.element_size()
        return [first + row * bytes_ for row in self._rows]

    def to_keep(self) -> TappedRows:
        """The same rows, of a copy where most of a large pass is others'."""
        rows = self._pass_TND.size(0)
        return self if rows <= max(_SMALL_PASS, 2 * len(self)) else together([self])


def together(parts: Sequence[TappedRows]) -> TappedRows:
    """A copy of the rows of all parts, one part after another."""
    copied_TND = joined(parts)
    return TappedRows(copied_TND, range(len(copied_TND)))


def joined(parts: Sequence[TappedRows]) -> Tensor:
    """A copy of the rows of all parts alone, [T, N, D]."""
    return torch.cat([part.copied() for part in parts])


@dataclass(frozen=True, slots=True)
class TextFeatures:
    """The target's hidden states of some tokens of a text, from position `start` on."""

    entry: PlanEntry  # of the step whose pass they are from
    start: int
    states: TappedRows

    @property
    def end(self) -> int:
        """Behind the last position."""
        return self.start + len(self.states)


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
        """Their hidden states at these layers."""
        if not self.entries:
            return []
        pass_TND = flight.tapped(taps)
        return [
            TextFeatures(entry, entry.start, TappedRows(pass_TND, rows))
            for entry, rows in zip(self.entries, self.rows, strict=True)
        ]


def text_rows(plan: StepPlan, trees: Sequence[TokenTree], paths: Sequence[Sequence[int] | None]) -> TextRows:
    """Which rows of a step's pass over a plan and its trees became text.

    `paths` are the accepted nodes of each tree; None where the text ends with this step, so that nobody will
    read it.
    """
    found = TextRows([], [])
    accepted = iter(zip(trees, paths, strict=True))
    first = 0
    for entry in plan.entries:
        root = first + entry.end - entry.start - 1
        tree, path = next(accepted) if entry.has_tree else (None, ())
        if path is not None:
            found.entries.append(entry)
            found.rows.append([*range(first, root + 1), *(root + node for node in path)])
        first = root + (1 if tree is None else tree.num_nodes)
    return found


class UnreadFeatures:
    """Hidden states of one text that a head has not read: of the tokens first, first + 1, ..., end - 1."""

    __slots__ = ("_parts", "end", "first")

    def __init__(self, first: int) -> None:
        self.first = first
        self.end = first
        self._parts: list[TappedRows] = []

    def add(self, states: TappedRows) -> None:
        """Those of the tokens from `end` on."""
        self._parts.append(states.to_keep())
        self.end += len(states)
        if len(self._parts) > _MOST_PASSES:
            self._parts = [together(self._parts)]

    def take(self, count: int) -> list[TappedRows]:
        """The first `count`, which are gone then; there are so many."""
        taken: list[TappedRows] = []
        left = count
        while left:
            part = self._parts.pop(0)
            if len(part) > left:
                self._parts.insert(0, part.part(left, len(part)))
                part = part.part(0, left)
            taken.append(part)
            left -= len(part)
        self.first += count
        return taken

    def drop_before(self, position: int) -> None:
        """Forget those of tokens before `position`, which may lie behind all of them."""
        known = min(position, self.end) - self.first
        if known > 0:
            self.take(known)
        if position > self.end:
            self.first = self.end = position
