"""A pass of a model in flight: it is asked for answers, and keeps its logits to itself.

`Flight` says what may be asked, wherever the pass has run; `HostFlight` answers from host memory. `Launch` is
a pass that may still be on its way.

What most callers want of a row is one token, the model's own choice there. A row of logits is a third of a
megabyte at a large vocabulary, and of a tree's rows a walk asks few. So the output layer makes rows in
blocks, the likeliest nodes first and the others when somebody asks, and few blocks are held at a time:

    rows of the pass     0  1  2  3  4  5  6  7  8  9     what the output layer reads is kept of all
    likeliest first      0  5  1  6  2 | 7  3  8  4  9
                         with the pass | when somebody asks for one of them

A row's logits do not depend on the block it is in (models/language_model.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import wraps
from threading import Event
from typing import Final, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.processors.changes import Changes, RowChanges
from specinfer.verify.logprobs import Scores, score
from specinfer.verify.scan import ASK, Ask, Likeliest, LogitBlock, LogitType, Scan, no_likeliest

_FEWEST_BESIDE: Final = 16  # rows for which there must be room beside the likeliest, or these make room
MOST_BYTES: Final = 32 << 20  # of logits that a flight holds; more only where a single row is larger
_TYPES: Final[dict[torch.dtype, LogitType]] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_FEW_ROWS: Final = 16  # asked together: one more question costs as much as ten answers
BLOCK_ROWS: Final = 64  # made together where not all are asked for: weights are read once for these


# Asked of a block: which rows of the question these are, the block, and where they are in it.
_Question = Callable[[NDArray[np.int64], LogitBlock, NDArray[np.int64]], None]


def rows_at_once(vocab: int, dtype: torch.dtype) -> int:
    """The most rows of a pass whose logits are made all together, whoever may be asked for them."""
    return min(BLOCK_ROWS, _most_rows(vocab, dtype))


def _most_rows(vocab: int, dtype: torch.dtype) -> int:
    return max(1, MOST_BYTES // (vocab * dtype.itemsize))


_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


def inference(call: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """`call` in PyTorch's inference mode, which is entered only where the caller is not in it.

    Entering takes some 25 us in caches that a pass has swept, and a step calls half a dozen of these.
    """

    @wraps(call)
    def without_gradients(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        if torch.is_inference_mode_enabled():
            return call(*args, **kwargs)
        with torch.inference_mode():
            return call(*args, **kwargs)

    return without_gradients


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """PyTorch computes with so many threads meanwhile, where the calling thread asks it to."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Flight(Protocol):
    """The rows of one pass that want logits; each is known by its place among them.

    Only `row` and `copy` bring logits to the caller. All of it may wait for the pass.
    """

    @property
    def vocab(self) -> int:
        """Logits of a row."""
        ...

    @property
    def scan(self) -> Scan:
        """Reads rows that the caller has changed, exactly as the flight reads its own."""
        ...

    @property
    def at_once(self) -> int:
        """The most rows that are asked together at no cost, though not every answer will be used."""
        ...

    def choices(
        self, rows: Sequence[int], asks: Sequence[Ask], changes: Sequence[RowChanges] | None = None
    ) -> list[int]:
        """The model's own choice at each row, as `verify.scan.choice` makes it of the row with its changes.

        `verify.scan.NO_TOKEN` where the largest logit is not finite.
        """
        ...

    def likeliest(self, rows: Sequence[int], n: int, temperatures: Sequence[float]) -> Likeliest:
        """The n >= 1 likeliest tokens at each row, and its mass at a temperature; see `verify.scan.Scan`."""
        ...

    def scores(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> Scores:
        """The figures of one token at each row, and of the `top` likeliest there; see `verify.logprobs`."""
        ...

    def row(self, row: int) -> NDArray[np.float32]:
        """One row of logits, [vocab]; not to be written to."""
        ...

    def copy(self, row: int, into: NDArray[np.float32]) -> None:
        """Write one row of logits to `into`, [vocab]."""
        ...

    def tapped(self, layers: Sequence[int]) -> Tensor:
        """What these layers were given, contiguous [T, N, D] of all rows of the pass; not to be written to.

        It lies where the model does. Raises KeyError where one has no tap.
        """
        ...


class Launch:
    """A pass that was started: a flight, or one that a thread will bring."""

    __slots__ = ("_flight", "stopped")

    def __init__(self, flight: Flight | Future[Flight], stopped: Event | None = None) -> None:
        """`stopped` is what a pass asks that may be told to end; see `stop`."""
        self._flight = flight
        self.stopped = stopped or Event()

    def flight(self) -> Flight:
        """The pass's answers; waits for its end, and raises what the pass raised."""
        return self._flight.result() if isinstance(self._flight, Future) else self._flight

    def stop(self) -> None:
        """Have the pass end behind the layer that computes, and wait for its end, however it ends.

        An interrupt ends the wait; the pass ends all the same.
        """
        self.stopped.set()
        if isinstance(self._flight, Future):
            wait([self._flight])


class HostFlight:
    """A Flight that makes logits in host memory, where its scan reads them."""

    __slots__ = (
        "_blocks",
        "_count",
        "_head",
        "_hidden_RD",
        "_most_rows",
        "_order",
        "_taps",
        "_whole",
        "scan",
        "vocab",
    )

    def __init__(
        self,
        hidden_RD: Tensor,
        head: Callable[[Tensor], Tensor],
        vocab: int,
        scan: Scan,
        *,
        likelihoods: Callable[[], Sequence[float]] | None = None,
        taps: tuple[Sequence[int], Tensor] | None = None,
        logits_RV: Tensor | None = None,
    ) -> None:
        """Make the first block of logits, or take those of all rows.

        Args:
            hidden_RD: what `head` reads of each row; its dtype is that of logits.
            head: the output layer, [R, D] -> [R, V]; a row's logits depend on that row alone.
            vocab: V, or more where the output layer is pruned.
            scan: reads logits.
            likelihoods: says how likely each row is asked for, [R]; None: all will be.
            taps: layers, and what they were given, [T, N, D]; see `tapped`.
            logits_RV: what `head` makes of all rows, if it is known.
        """
        self.scan = scan
        self.vocab = vocab
        self._hidden_RD = hidden_RD
        self._head = head
        self._taps = taps
        self._count = count = hidden_RD.size(0)  # `len` is Python's own, and slower
        self._most_rows = _most_rows(vocab, hidden_RD.dtype)
        self._order: NDArray[np.int64] | None = None  # likeliest first; None: all rows alike
        if likelihoods is not None and count > BLOCK_ROWS:
            self._order = np.argsort(-np.array(likelihoods()), kind="stable")
        self._whole: LogitBlock | None = None  # all rows, as of all but large passes
        self._blocks: list[_Block] = []  # or some of them, the first with the likeliest
        if logits_RV is not None:
            self._whole = _in_host_memory(logits_RV)
        elif count:
            self._make(np.zeros(0, dtype=np.int64))

    @property
    def at_once(self) -> int:
        """As Flight says: an answer takes microseconds where the logits of all rows are there."""
        return _FEW_ROWS if self._whole is not None else 0

    @property
    def held_bytes(self) -> int:
        """The bytes of logits that are held now."""
        blocks = [block.logits for block in self._blocks] if self._whole is None else [self._whole]
        return sum(block.nbytes for block in blocks)

    def row(self, row: int) -> NDArray[np.float32]:
        """As Flight says."""
        found: list[NDArray[np.float32]] = []
        self._ask(np.array([row]), lambda _, block, there: found.append(block[int(there[0])]))
        return found[0]

    def copy(self, row: int, into: NDArray[np.float32]) -> None:
        """As Flight says."""
        self._ask(np.array([row]), lambda _, block, there: block.copy(int(there[0]), into))

    def choices(
        self, rows: Sequence[int], asks: Sequence[Ask], changes: Sequence[RowChanges] | None = None
    ) -> list[int]:
        """As Flight says."""
        changed = changes if changes is not None and any(len(row.ids) for row in changes) else None
        if changed is None and (whole := self._whole) is not None:  # the usual case
            self._check(rows)
            return self.scan.chosen(whole, rows, asks)
        asked, places = np.array(asks, dtype=ASK), np.array(rows, dtype=np.int64)
        chosen = np.empty(len(rows), dtype=np.int64)

        def choose(places: NDArray[np.int64], block: LogitBlock, there: NDArray[np.int64]) -> None:
            here = None if changed is None else Changes.of([changed[place] for place in places.tolist()])
            chosen[places] = self.scan.choices(block, there, asked[places], here)

        self._ask(places, choose)
        return chosen.tolist()

    def likeliest(self, rows: Sequence[int], n: int, temperatures: Sequence[float]) -> Likeliest:
        """As Flight says."""
        asked, found = np.array(temperatures, dtype=np.float64), no_likeliest(len(rows), n)

        def look(places: NDArray[np.int64], block: LogitBlock, there: NDArray[np.int64]) -> None:
            part = self.scan.likeliest(block, there, n, asked[places])
            found.ids[places], found.values[places] = part.ids, part.values
            found.found[places], found.masses[places] = part.found, part.masses

        self._ask(np.array(rows, dtype=np.int64), look)
        return found

    def scores(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> Scores:
        """As Flight says; a block of logits is reduced to these before the next one is made."""
        asked, found = np.array(tokens, dtype=np.int64), Scores.empty(len(rows), top)

        def read(places: NDArray[np.int64], block: LogitBlock, there: NDArray[np.int64]) -> None:
            found.put(places, score(block, there, asked[places], top, self.scan))

        self._ask(np.array(rows, dtype=np.int64), read)
        return found

    def tapped(self, layers: Sequence[int]) -> Tensor:
        """As Flight says."""
        known, tapped_TND = self._taps or ((), self._hidden_RD)
        if tuple(layers) == tuple(known):
            return tapped_TND
        if missing := set(layers) - set(known):
            raise KeyError(f"layers {sorted(missing)} have no taps; {list(known)} have")
        places = torch.tensor([known.index(layer) for layer in layers], device=tapped_TND.device)
        return tapped_TND.index_select(1, places)

    def _ask(self, rows: NDArray[np.int64], question: _Question) -> None:
        """Ask every block that holds some of these rows; blocks are made on the way, and older ones dropped.

        Raises IndexError for a row the pass has not.
        """
        self._check(rows.tolist())
        left = np.arange(len(rows))
        if (whole := self._whole) is not None:
            question(left, whole, rows)
            return
        for place in range(len(self._blocks)):  # no name of a block: it would outlive one that is dropped
            left = self._blocks[place].ask(rows, left, question)
        while len(left):
            self._make(np.unique(rows[left]))
            left = self._blocks[-1].ask(rows, left, question)

    def _check(self, rows: Sequence[int]) -> None:
        if rows and not 0 <= min(rows) <= max(rows) < self._count:
            raise IndexError(f"got rows {min(rows)} .. {max(rows)} of a pass with logits of {self._count}")

    @inference
    def _make(self, wanted: NDArray[np.int64]) -> None:
        """Make a block of some `wanted` rows, none of them held, filled up with the likeliest others.

        The first block holds the likeliest of all, so it stays as long as there is room beside it.
        """
        count, blocks = self._count, self._blocks
        size = min(self._most_rows, count if self._order is None else BLOCK_ROWS)
        if size >= count:
            self._whole = _in_host_memory(self._head(self._hidden_RD))
            return
        wanted = wanted[:size]
        if blocks and (beside := self._most_rows - len(blocks[0].rows)) >= _FEWEST_BESIDE:
            wanted = wanted[:beside]
        while blocks and self._most_rows - self._held_rows < len(wanted):
            blocks.pop()
        candidates = np.arange(count) if self._order is None else self._order
        others = candidates[~np.isin(candidates, np.concatenate([wanted, *(block.rows for block in blocks)]))]
        rows = np.sort(np.concatenate([wanted, others])[: min(size, self._most_rows - self._held_rows)])
        chosen = torch.from_numpy(rows).to(self._hidden_RD.device)
        blocks.append(_Block(_in_host_memory(self._head(self._hidden_RD.index_select(0, chosen))), rows))

    @property
    def _held_rows(self) -> int:
        return sum(len(block.rows) for block in self._blocks)


class _Block:
    """Logits of some rows of a pass."""

    __slots__ = ("logits", "rows")

    def __init__(self, logits: LogitBlock, rows: NDArray[np.int64]) -> None:
        self.logits = logits
        self.rows = rows  # of the pass, ascending

    def ask(self, rows: NDArray[np.int64], left: NDArray[np.int64], question: _Question) -> NDArray[np.int64]:
        """Ask about those of rows[left] that are here; the part of `left` that is not."""
        wanted = rows[left]
        places = np.searchsorted(self.rows, wanted).clip(max=len(self.rows) - 1)
        here: NDArray[np.bool_] = self.rows[places] == wanted
        if here.any():
            question(left[here], self.logits, places[here])
        elsewhere: NDArray[np.int64] = left[~here]
        return elsewhere


def _in_host_memory(logits_RV: Tensor) -> LogitBlock:
    kind = _TYPES.get(logits_RV.dtype)
    if kind is None:
        raise TypeError(f"logits must be of float32 or bfloat16, got {logits_RV.dtype}")
    rows_RV = (logits_RV if logits_RV.is_cpu else logits_RV.cpu()).contiguous()

    def show() -> NDArray[np.float32] | NDArray[np.uint16]:
        shown: NDArray[np.float32] | NDArray[np.uint16]
        shown = (rows_RV if kind == "float32" else rows_RV.view(torch.uint16)).numpy()
        return shown

    return LogitBlock.lying_at(rows_RV.data_ptr(), kind, (rows_RV.size(0), rows_RV.size(1)), show)
