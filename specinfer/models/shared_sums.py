"""Embedding tables in memory, on the disk or divided among ranks, and products divided among ranks."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import NativeProduct
from specinfer.transport.group import Group


class EmbeddingTable:
    """Embeddings of all tokens, [V, D]; `whole` is None if they are not in memory."""

    __slots__ = ("whole",)

    def __init__(self, whole: Tensor | None) -> None:
        self.whole = whole

    def rows(self, token_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """A table [N, D] with the embeddings of these tokens, and their rows in it, [T]."""
        assert self.whole is not None, "a table that is elsewhere reads its rows there"
        return self.whole, token_ids_T


class ShardedTable(EmbeddingTable):
    """Embeddings divided by token among ranks; `rows` exchanges data between all of them."""

    __slots__ = ("_count", "_first", "_group", "_own_VD")

    def __init__(self, own_VD: Tensor, first: int, count: int, group: Group) -> None:
        """`own_VD` has the tokens `first`, first + 1, ... of `count` tokens."""
        super().__init__(None)
        self._own_VD = own_VD
        self._first = first
        self._count = count
        self._group = group

    def rows(self, token_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Implements EmbeddingTable.rows; a row's bits come from the rank that has it, others add zeros.

        Raises IndexError for a token that is not in the table.
        """
        if len(token_ids_T) and not 0 <= int(token_ids_T.min()) <= int(token_ids_T.max()) < self._count:
            raise IndexError(f"token ids must be 0 .. {self._count - 1}")
        places_T = token_ids_T - self._first
        mine_T = (places_T >= 0) & (places_T < len(self._own_VD))
        rows_TD = self._own_VD.new_zeros(len(token_ids_T), self._own_VD.shape[1])
        rows_TD[mine_T] = self._own_VD[places_T[mine_T]]
        whole_TD = self._group.total(rows_TD.view(torch.int32)).view(rows_TD.dtype)
        return whole_TD, torch.arange(len(token_ids_T))


def exact_sum(own: NativeProduct, group: Group, x: Tensor) -> Tensor:
    """The product of a matrix divided by columns among ranks; every rank gets the whole result.

    x [rows, columns of this rank] -> [rows, channels] in x's dtype. Ranks agree on the quantization scale of
    each row, and add integers, so the bits are those of the whole matrix.
    """
    maxima = group.maximum(own.maxima(x))
    return own.finished(group.total(own.partials(x, maxima)), maxima, x.dtype)


def branch_sum(own: NativeProduct, parts: SumParts, group: Group, x: Tensor) -> Tensor:
    """The same for floats: each rank adds fixed branches of the sum, and all of them join these branches."""
    branches = torch.zeros(len(parts.all_branches), len(x), own.channels)
    branches[parts.place] = own.branches(x)
    # The bits of each branch come from the rank that has it, others add zeros.
    whole = group.total(branches.view(torch.int32)).view(torch.float32)
    return own.joined(whole, x.dtype)


Decode = Callable[[NDArray[np.uint8]], Tensor]  # bytes of rows [N, bytes of a row] -> their elements [N, D]


class TableOnDisk(EmbeddingTable):
    """Embeddings whose rows are read from a file when tokens use them.

    Frequent rows stay in the page cache, which shrinks when memory is short.
    """

    __slots__ = ("__weakref__", "_count", "_decode", "_number", "_offset", "_path", "_row_bytes", "_state")

    def __init__(self, path: Path, offset: int, count: int, row_bytes: int, decode: Decode) -> None:
        """The table has `count` rows, from byte `offset` of the file on; raises OSError."""
        super().__init__(None)
        self._path = path
        self._offset = offset
        self._count = count
        self._row_bytes = row_bytes
        self._decode = decode
        self._number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._number).atexit = False
        self._state = self._current()

    def rows(self, token_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """See EmbeddingTable.

        Raises IndexError for a token outside the table, ModelFileError if the file cannot be read or was
        changed.
        """
        ids, places = np.unique(token_ids_T.numpy(), return_inverse=True)
        if len(ids) and not 0 <= ids[0] <= ids[-1] < self._count:
            raise IndexError(f"token ids must be 0 .. {self._count - 1}")
        octets = np.empty((len(ids), self._row_bytes), dtype=np.uint8)
        offsets = [self._offset + token * self._row_bytes for token in ids.tolist()]
        try:
            read = [os.preadv(self._number, [row.data], at) for row, at in zip(octets, offsets, strict=True)]
            changed = self._current() != self._state
        except OSError as error:
            raise ModelFileError(
                f"{self._path} cannot be read ({error.strerror}); check the disk it is on"
            ) from error
        if changed or sum(read) != octets.nbytes:
            raise ModelFileError(f"{self._path} was changed while it was in use; load the model again")
        return self._decode(octets), torch.from_numpy(places.reshape(-1).astype(np.int64, copy=False))

    def _current(self) -> tuple[int, int]:
        found = os.fstat(self._number)
        return found.st_size, found.st_mtime_ns
