"""Hidden-state cache for draft heads.

A head reads texts as they grow. The rows of prefill chunks, roots and accepted paths are kept until the head
reads them; rows of rejected nodes are not. The oldest unread states are dropped first: a head may miss the
start of a text, but reads a contiguous part.

A head that runs in every step reads states in the memory of the pass. For a head that does not run only their
addresses are stored; they are copied if few rows would keep a whole pass in memory.

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

_SMALL_PASS: Final = 64  # rows; a pass of this size is kept whole for any of its rows
_MAX_PASSES: Final = 64  # maximum passes kept for one text


class TappedRows:
    """Hidden states of some rows of a pass, as a view that keeps the whole pass in memory."""

    __slots__ = ("_pass_TND", "_rows")

    def __init__(self, pass_TND: Tensor, rows: Sequence[int]) -> None:
        """View `rows` of `pass_TND`, which is contiguous and is never written."""
        self._pass_TND = pass_TND
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def part(self, begin: int, end: int) -> TappedRows:
        """Return the rows begin..end-1."""
        return TappedRows(self._pass_TND, self._rows[begin:end])

    def copied(self) -> Tensor:
        """Return a copy of these rows, [T, N, D]."""
        return self._pass_TND.index_select(0, torch.tensor(self._rows, device=self._pass_TND.device))

    def addresses(self) -> list[int]:
        """Return the address of each row, [N, D], valid while this object exists."""
        first, bytes_ = self._pass_TND.data_ptr(), self._pass_TND.stride(0) * self._pass_TND.element_size()
        return [first + row * bytes_ for row in self._rows]

    def compact(self) -> TappedRows:
        """Return these rows, copied if they are a small part of a large pass."""
        rows = self._pass_TND.size(0)
        return self if rows <= max(_SMALL_PASS, 2 * len(self)) else merged([self])


def merged(parts: Sequence[TappedRows]) -> TappedRows:
    """Return a copy of the rows of all parts, in order."""
    copied_TND = joined(parts)
    return TappedRows(copied_TND, range(len(copied_TND)))


def joined(parts: Sequence[TappedRows]) -> Tensor:
    """Return the rows of all parts as one tensor, [T, N, D]."""
    return torch.cat([part.copied() for part in parts])


@dataclass(frozen=True, slots=True)
class TextFeatures:
    """The target's hidden states of consecutive tokens of a text, from position `start` on."""

    entry: PlanEntry  # of the pass's step
    start: int
    states: TappedRows

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.states)


@dataclass(frozen=True, slots=True)
class TextRows:
    """The committed rows of a pass, by request."""

    entries: list[PlanEntry]
    rows: list[list[int]]

    def where(self, wanted: Callable[[PlanEntry], bool]) -> TextRows:
        """Return the rows of texts whose entries are `wanted`."""
        chosen = [i for i, entry in enumerate(self.entries) if wanted(entry)]
        return TextRows([self.entries[i] for i in chosen], [self.rows[i] for i in chosen])

    def features(self, flight: Flight, taps: Sequence[int]) -> list[TextFeatures]:
        """Return their hidden states at these layers."""
        if not self.entries:
            return []
        pass_TND = flight.tapped(taps)
        return [
            TextFeatures(entry, entry.start, TappedRows(pass_TND, rows))
            for entry, rows in zip(self.entries, self.rows, strict=True)
        ]


def text_rows(plan: StepPlan, trees: Sequence[TokenTree], paths: Sequence[Sequence[int] | None]) -> TextRows:
    """Return the committed rows of a step's pass over a plan and its trees.

    `paths` are the accepted nodes of each tree, or None for a text that ends with this step.
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
    """Unread hidden states of one text, for the tokens first, first + 1, ..., end - 1."""

    __slots__ = ("_parts", "end", "first")

    def __init__(self, first: int) -> None:
        self.first = first
        self.end = first
        self._parts: list[TappedRows] = []

    def add(self, states: TappedRows) -> None:
        """Append the states of the tokens from `end` on."""
        self._parts.append(states.compact())
        self.end += len(states)
        if len(self._parts) > _MAX_PASSES:
            self._parts = [merged(self._parts)]

    def take(self, count: int) -> list[TappedRows]:
        """Remove and return the first `count` states; needs at least `count`."""
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
        """Drop the states of tokens before `position`, which may be after `end`."""
        known = min(position, self.end) - self.first
        if known > 0:
            self.take(known)
        if position > self.end:
            self.first = self.end = position
