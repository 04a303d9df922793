"""Flight: the results of a model's pass, which reads logits where they are.

Most callers need one token of a row, the model's choice. A row of logits has a third of a megabyte at a large
vocabulary, and verification reads few rows of a tree. So the output layer makes logits in blocks of rows, the
likeliest nodes first and the others on demand, and few blocks are held at a time:

    rows of the pass     0  1  2  3  4  5  6  7  8  9     the output layer's input is kept for all
    likeliest first      0  5  1  6  2 | 7  3  8  4  9
                         with the pass | when one of them is read

A row's logits do not depend on the block it is in (models/language_model.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Final, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.processors.changes import Changes, RowChanges
from specinfer.verify.logprobs import Scores, score
from specinfer.verify.scan import (
    SAMPLE_REQUEST,
    Likeliest,
    LogitBlock,
    LogitType,
    SampleRequest,
    Scan,
    no_likeliest,
)

_MIN_ROWS_BESIDE: Final = 16  # rows that must fit beside the block of the likeliest, which is else dropped
MAX_BYTES: Final = 32 << 20  # logits held by a flight, except that a single row may be larger
_TYPES: Final[dict[torch.dtype, LogitType]] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
BLOCK_ROWS: Final = 64  # rows made together if not all are needed, so that weights are read once for them


# Callback for a block: indices into the requested rows, the block's logits, and the rows' indices in it.
_Visitor = Callable[[NDArray[np.int64], LogitBlock, NDArray[np.int64]], None]


def rows_at_once(vocab: int, dtype: torch.dtype) -> int:
    """Return the maximum rows of a pass for which all logits are made at once."""
    return min(BLOCK_ROWS, _max_rows(vocab, dtype))


def _max_rows(vocab: int, dtype: torch.dtype) -> int:
    return max(1, MAX_BYTES // (vocab * dtype.itemsize))


_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


def inference(call: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """Decorate `call` to run in PyTorch's inference mode, entered only if it is not active.

    Entering takes about 25 us after a pass has evicted the CPU caches, and a step calls six such functions.
    """

    @wraps(call)
    def without_gradients(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        if torch.is_inference_mode_enabled():
            return call(*args, **kwargs)
        with torch.inference_mode():
            return call(*args, **kwargs)

    return without_gradients


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set PyTorch's number of threads for the calling thread during the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Flight:
    """The rows with logits of one pass, numbered in order; it makes and scans them in host memory.

    Only `row` and `copy` transfer logits to the caller. Every method may wait for the pass.
    """

    __slots__ = (
        "_blocks",
        "_count",
        "_head",
        "_hidden_RD",
        "_max_rows",
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
            hidden_RD: the input of `head` for each row; its dtype is that of logits.
            head: the output layer, [R, D] -> [R, V]; a row's logits depend on that row alone.
            vocab: V, or more where the output layer is pruned.
            scan: reads logits.
            likelihoods: the probability that each row is read, [R]; None: all are.
            taps: layers and their inputs, [T, N, D]; see `tapped`.
            logits_RV: the result of `head` for all rows, if it is known.
        """
        self.scan = scan
        self.vocab = vocab
        self._hidden_RD = hidden_RD
        self._head = head
        self._taps = taps
        self._count = count = hidden_RD.size(0)  # faster than `len`, which PyTorch implements in Python
        self._max_rows = _max_rows(vocab, hidden_RD.dtype)
        self._order: NDArray[np.int64] | None = None  # rows, likeliest first; None: in order
        if likelihoods is not None and count > BLOCK_ROWS:
            self._order = np.argsort(-np.array(likelihoods()), kind="stable")
        self._whole: LogitBlock | None = None  # all rows, except for large passes
        self._blocks: list[_Block] = []  # blocks of rows, the first with the likeliest
        if logits_RV is not None:
            self._whole = _in_host_memory(logits_RV)
        elif count:
            self._make(np.zeros(0, dtype=np.int64))

    def row(self, row: int) -> NDArray[np.float32]:
        """Return one row of logits, [vocab]; the caller may not write to it."""
        found: list[NDArray[np.float32]] = []
        self._visit(np.array([row]), lambda _, block, there: found.append(block[int(there[0])]))
        return found[0]

    def copy(self, row: int, into: NDArray[np.float32]) -> None:
        """Write one row of logits to `into`, [vocab]."""
        self._visit(np.array([row]), lambda _, block, there: block.copy(int(there[0]), into))

    def choices(
        self,
        rows: Sequence[int],
        requests: Sequence[SampleRequest],
        changes: Sequence[RowChanges] | None = None,
    ) -> list[int]:
        """Return the model's choice at each row after its changes, as `verify.scan.choice` does.

        It is `verify.scan.NO_TOKEN` if the largest logit is not finite.
        """
        changed = changes if changes is not None and any(len(row.ids) for row in changes) else None
        if changed is None and (whole := self._whole) is not None:  # the usual case
            self._check(rows)
            return self.scan.chosen(whole, rows, requests)
        request_array, places = np.array(requests, dtype=SAMPLE_REQUEST), np.array(rows, dtype=np.int64)
        chosen = np.empty(len(rows), dtype=np.int64)

        def choose(places: NDArray[np.int64], block: LogitBlock, there: NDArray[np.int64]) -> None:
            here = None if changed is None else Changes.of([changed[place] for place in places.tolist()])
            chosen[places] = self.scan.choices(block, there, request_array[places], here)

        self._visit(places, choose)
        return chosen.tolist()

    def likeliest(self, rows: Sequence[int], n: int, temperatures: Sequence[float]) -> Likeliest:
        """Return the n >= 1 likeliest tokens at each row, and its mass; see `verify.scan.Scan`."""
        temperature_array, found = np.array(temperatures, dtype=np.float64), no_likeliest(len(rows), n)

        def look(places: NDArray[np.int64], block: LogitBlock, there: NDArray[np.int64]) -> None:
            part = self.scan.likeliest(block, there, n, temperature_array[places])
            found.ids[places], found.values[places] = part.ids, part.values
            found.found[places], found.masses[places] = part.found, part.masses

        self._visit(np.array(rows, dtype=np.int64), look)
        return found

    def scores(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> Scores:
        """Return the scores of one token at each row and of the `top` likeliest; see `verify.logprobs`.

        Each block of logits is reduced before the next one is made.
        """
        token_array, found = np.array(tokens, dtype=np.int64), Scores.empty(len(rows), top)

        def read(places: NDArray[np.int64], block: LogitBlock, there: NDArray[np.int64]) -> None:
            found.put(places, score(block, there, token_array[places], top, self.scan))

        self._visit(np.array(rows, dtype=np.int64), read)
        return found

    def tapped(self, layers: Sequence[int]) -> Tensor:
        """Return the inputs of these layers, contiguous [T, N, D], for all rows of the pass.

        The tensor is on the model's device and may not be written. Raises KeyError for a layer without a tap.
        """
        known, tapped_TND = self._taps or ((), self._hidden_RD)
        if tuple(layers) == tuple(known):
            return tapped_TND
        if missing := set(layers) - set(known):
            raise KeyError(f"layers {sorted(missing)} have no taps; {list(known)} have")
        places = torch.tensor([known.index(layer) for layer in layers], device=tapped_TND.device)
        return tapped_TND.index_select(1, places)

    def _visit(self, rows: NDArray[np.int64], visitor: _Visitor) -> None:
        """Call `visitor` for every block with some of these rows; makes missing blocks, drops old ones.

        Raises IndexError for a row that the pass does not have.
        """
        self._check(rows.tolist())
        left = np.arange(len(rows))
        if (whole := self._whole) is not None:
            visitor(left, whole, rows)
            return
        for place in range(len(self._blocks)):  # by index, as a variable would keep a dropped block alive
            left = self._blocks[place].visit(rows, left, visitor)
        while len(left):
            self._make(np.unique(rows[left]))
            left = self._blocks[-1].visit(rows, left, visitor)

    def _check(self, rows: Sequence[int]) -> None:
        if rows and not 0 <= min(rows) <= max(rows) < self._count:
            raise IndexError(f"got rows {min(rows)} .. {max(rows)} of a pass with logits of {self._count}")

    @inference
    def _make(self, wanted: NDArray[np.int64]) -> None:
        """Make a block of some `wanted` rows that are not held, filled up with the likeliest other rows.

        The first block has the likeliest rows of all, so it is kept while another block fits beside it.
        """
        count, blocks = self._count, self._blocks
        size = min(self._max_rows, count if self._order is None else BLOCK_ROWS)
        if size >= count:
            self._whole = _in_host_memory(self._head(self._hidden_RD))
            return
        wanted = wanted[:size]
        if blocks and (beside := self._max_rows - len(blocks[0].rows)) >= _MIN_ROWS_BESIDE:
            wanted = wanted[:beside]
        while blocks and self._max_rows - self._held_rows < len(wanted):
            blocks.pop()
        candidates = np.arange(count) if self._order is None else self._order
        others = candidates[~np.isin(candidates, np.concatenate([wanted, *(block.rows for block in blocks)]))]
        rows = np.sort(np.concatenate([wanted, others])[: min(size, self._max_rows - self._held_rows)])
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

    def visit(self, rows: NDArray[np.int64], left: NDArray[np.int64], visitor: _Visitor) -> NDArray[np.int64]:
        """Call `visitor` for those of rows[left] in this block; returns the part of `left` that is not."""
        wanted = rows[left]
        places = np.searchsorted(self.rows, wanted).clip(max=len(self.rows) - 1)
        here: NDArray[np.bool_] = self.rows[places] == wanted
        if here.any():
            visitor(left[here], self.logits, places[here])
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

    return LogitBlock.from_address(rows_RV.data_ptr(), kind, (rows_RV.size(0), rows_RV.size(1)), show)
