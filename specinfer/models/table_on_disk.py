"""Embeddings that stay in a file: tokens read their rows when a pass needs them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.models.shared_sums import EmbeddingTable

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
