"""The stored tensors of a folder, from which quantized matrices are assembled."""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Final, Generic, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.files import read_exactly
from specinfer.kernels.file_blocks import StoredRows

_T = TypeVar("_T")
FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Scales of activations and of KV caches, which are not quantized here.
_UNUSED: Final = (
    *(".input_scale", ".input_scale_ub", ".input_zero_point", ".activation_scale"),
    *(".output_scale", ".output_zero_point", ".q_scale", ".k_scale", ".v_scale", ".kv_scale"),
)


class StoredTensor(Protocol):
    """A tensor of a folder in any storage format."""

    @property
    def path(self) -> Path:
        """Its file, or the first of several."""

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of its numbers in the file; None if it is quantized."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape in the decoder."""

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop, on the CPU."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of a tensor in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    row_bytes: int

    def joined(self) -> Self:
        """The tensor with its first two dimensions merged: matrices of experts concatenated by rows."""
        experts, rows, *rest = self.shape
        return replace(self, shape=(experts * rows, *rest), row_bytes=math.prod(rest) * self.dtype.itemsize)

    def stored(self, name: str, rows: Sequence[int] | None = None) -> StoredRows:
        """The place of these rows in the file; None: all rows."""
        kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}.get(self.dtype, "F64")
        return StoredRows(self.path, name, kind, self.offset, self.row_bytes, rows or range(self.shape[0]))

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop, on the CPU, in the file's dtype; raises ModelFileError if the file ends."""
        if not (stop - start) * self.row_bytes:  # empty tensors cannot be viewed as another dtype
            return torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        data = np.empty((stop - start) * self.row_bytes, dtype=np.uint8)
        read_exactly(self.path, self.offset + start * self.row_bytes, data.data)
        return torch.from_numpy(data).view(self.dtype).view(stop - start, *self.shape[1:])


@dataclass(frozen=True, slots=True)
class MadeTensor:
    """A StoredTensor whose rows a function makes, float32."""

    path: Path
    shape: tuple[int, ...]
    read_rows: Callable[[int, int], Tensor]
    dtype: torch.dtype | None = None


class Pieces:
    """The stored tensors that are not part of a matrix yet."""

    def __init__(self, folder: Path, tensors: Mapping[str, TensorEntry]) -> None:
        self._folder = folder
        self.rest = {name: one for name, one in tensors.items() if not name.endswith(_UNUSED)}

    def stems(self, end: str) -> list[str]:
        """The stems of the names that end with `end`."""
        return [name.removesuffix(end) for name in self.rest if name.endswith(end)]

    def take(
        self, name: str, dtypes: Collection[torch.dtype], shape: Sequence[int | None] | None = None
    ) -> TensorEntry:
        """Remove and return a tensor of one of these dtypes and of this shape, where None is any size.

        Raises ModelFileError, with the tensor's name, if it is missing or different.
        """
        if (found := self.optional(name, dtypes, shape)) is None:
            raise ModelFileError(
                f"{self._folder} lacks tensor {name!r}, without which a quantized matrix cannot be read; "
                "the model is incomplete, get it again"
            )
        return found

    def optional(
        self, name: str, dtypes: Collection[torch.dtype], shape: Sequence[int | None] | None = None
    ) -> TensorEntry | None:
        """Like `take`, but returns None if the tensor is missing."""
        found = self.rest.pop(name, None)
        if found is None:
            return None
        if found.dtype not in dtypes:
            wanted = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
            raise ModelFileError(
                f"{found.path}: tensor {name!r} is of type {str(found.dtype).removeprefix('torch.')}; "
                f"expected {wanted}. config.json and weights belong to different models, get both again"
            )
        if shape is not None and not _fits(found.shape, shape):
            wanted = ", ".join("any" if one is None else str(one) for one in shape)
            raise ModelFileError(
                f"{found.path}: tensor {name!r} has shape {list(found.shape)}; expected [{wanted}]. "
                "config.json and weights belong to different models, get both again"
            )
        return found


def _fits(found: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(found) == len(wanted) and all(
        there is None or one == there for one, there in zip(found, wanted, strict=True)
    )


class LastFew(Generic[_T]):
    """A cache of the last few values by key; threads that read a value piece by piece share it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = Lock()
        self._kept: OrderedDict[Hashable, _T] = OrderedDict()  # least recently used first

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """The value of that key; makes it if it is missing."""
        with self._lock:
            found = self._kept.pop(key) if key in self._kept else make()
            self._kept[key] = found
            if len(self._kept) > self._limit:
                self._kept.popitem(last=False)
        return found

    def drop(self, key: Hashable) -> None:
        """Remove a value that is not read again."""
        with self._lock:
            self._kept.pop(key, None)


def whole(tensor: StoredTensor) -> Tensor:
    """All of a tensor; [1] for a single number."""
    return tensor.read_rows(0, tensor.shape[0] if tensor.shape else 1)
