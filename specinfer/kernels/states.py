"""StateRows and StateMemory: the recurrent states of a pass, and the order in which its tokens change them.

A request has one state for each layer, that of its text's first `applied` tokens. A pass visits tokens in
this order:

    chain    tokens that are certain: accepted nodes of the last tree, then rows of text, the root last. They
             change the state, and the pass writes it once
    walk     the nodes of the tree, depth first, from a stack of states. They leave the state unchanged

The inputs of walked nodes are kept in a ring, where place p belongs to cache position applied + p. So a node
that is accepted is applied in the next pass, and a draft can walk through nodes of earlier passes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_REQUEST: Final = 5  # numbers of a request, as in cpu/recurrence.h
_VISIT: Final = 5
_SAVE: Final = 3
ZERO: Final = -1  # the source of a text that begins at position 0


@dataclass(slots=True)
class StateRows:
    """The visits of a pass, as int32 numbers in one order for all layers."""

    requests: array[int] = field(default_factory=lambda: array("i"))
    visits: array[int] = field(default_factory=lambda: array("i"))
    saves: array[int] = field(default_factory=lambda: array("i"))

    def add(
        self,
        *,
        slot: int,
        source: int,
        applied: int,
        start: int,
        first_row: int,
        rows: int,
        parents: Sequence[int] | None,
        saves: Sequence[tuple[int, int]] = (),
    ) -> int:
        """Add a request's visits; returns the number of tokens that its state has after the pass.

        Args:
            slot: the slot that is written.
            source: the slot that is read, or ZERO.
            applied: tokens of the text that the source has.
            start: cache position of the request's first row.
            first_row: number of that row in the pass.
            rows: its rows.
            parents: the whole tree, as in `runtime.batch.Rows`.
            saves: numbers of tokens, within the chain, and the slots to which their states are copied.
        """
        root = start + rows - (1 if parents is None else len(parents))
        end = root + 1
        first, chain = self.num_visits, end - applied
        replayed = min(start, end) - applied
        for place in range(replayed):
            self.visits.extend((-1, place, place - 1, 0, 1))
        for place in range(replayed, chain):
            self.visits.extend((first_row + place - replayed, -1, place - 1, 0, 1))
        if parents is not None:
            self._walk(parents, start - root, first_row, chain - 1)
        self.requests.extend((first, self.num_visits - first, chain, source, slot))
        for tokens, to in saves:
            if applied < tokens <= end:
                self.saves.extend((self.num_requests - 1, tokens - applied, to))
        return end

    def _walk(self, parents: Sequence[int], first: int, first_row: int, root: int) -> None:
        """Add the visits of nodes from `first` on, and of their ancestors, below the root's visit."""
        needed = [node >= first for node in range(len(parents))]
        below: list[list[int]] = [[] for _ in parents]
        for node in range(len(parents) - 1, 0, -1):
            if needed[node]:
                needed[parents[node]] = True
                below[parents[node]].append(node)
        begin = self.num_visits - (root + 1)
        waiting = [(node, root, 1) for node in below[0]]  # the last one is the first child
        while waiting:
            node, parent, depth = waiting.pop()
            row = first_row + node - first if node >= max(first, 1) else -1
            number = self.num_visits - begin
            self.visits.extend((row, node - 1, parent, depth, bool(below[node])))
            waiting += [(child, number, depth + 1) for child in below[node]]

    @property
    def num_requests(self) -> int:
        """Number of requests."""
        return len(self.requests) // _REQUEST

    @property
    def num_saves(self) -> int:
        """Number of copies of states."""
        return len(self.saves) // _SAVE

    @property
    def num_visits(self) -> int:
        """Number of visits."""
        return len(self.visits) // _VISIT

    @property
    def requests_R5(self) -> NDArray[np.int32]:
        """For each request: its first visit, its visits, those of its chain, the slots read and written."""
        return np.frombuffer(self.requests, dtype=np.int32).reshape(-1, _REQUEST)

    @property
    def visits_V5(self) -> NDArray[np.int32]:
        """For each visit: row or -1, place in the ring or -1, parent, depth in the walk, 1 with children.

        A parent is a visit of the same request, counted from its first; -1 is the state.
        """
        return np.frombuffer(self.visits, dtype=np.int32).reshape(-1, _VISIT)

    @property
    def saves_S3(self) -> NDArray[np.int32]:
        """For each copy of a state: its request, the visits before it, the slot written."""
        return np.frombuffer(self.saves, dtype=np.int32).reshape(-1, _SAVE)


@dataclass(frozen=True, slots=True)
class StateMemory:
    """States and rings of a model's recurrent layers, float32.

    A state holds its matrices, [heads, value blocks, key_size, 16], value columns in blocks of 16, then the
    last taps - 1 inputs of the convolution, oldest first, [taps - 1, channels].
    """

    states_LSF: Tensor  # [layers, slots, state_floats]
    rings_LRNF: Tensor  # [layers, requests' slots, nodes, input_floats]


@dataclass(frozen=True, slots=True)
class StatePass:
    """The recurrent states of one pass."""

    memory: StateMemory
    rows: StateRows
