"""The tensors of a folder as they are stored, out of which quantized matrices are put together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Final, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from specinfer.errors import ModelFileError

_T = TypeVar("_T")
FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Of activations and of caches, which are not quantized the way these are for.
_UNUSED: Final = (
    *(".input_scale", ".input_scale_ub", ".input_zero_point", ".activation_scale"),
    *(".output_scale", ".output_zero_point", ".q_scale", ".k_scale", ".v_scale", ".kv_scale"),
)


class StoredTensor(Protocol):
    """A tensor of a folder, however its numbers are stored."""

    @property
    def path(self) -> Path:
        """The file it is in, or the first of several."""
        ...

    @property
    def dtype(self) -> torch.dtype | None:
        """That of its numbers in the file; None: they are quantized."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape as the decoder has it."""
        ...

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop, on the CPU."""
        ...


class FileTensor(StoredTensor, Protocol):
    """A tensor as a file has it."""

    def stacked(self) -> StoredTensor:
        """The same with the first two of three dimensions or more as one: rows of all experts."""
        ...


class Pieces:
    """Stored tensors that no matrix has been made of yet."""

    def __init__(self, folder: Path, tensors: Mapping[str, FileTensor]) -> None:
        self._folder = folder
        self.rest = {name: one for name, one in tensors.items() if not name.endswith(_UNUSED)}

    def stems(self, end: str) -> list[str]:
        """What precedes `end` in the names that have it."""
        return [name.removesuffix(end) for name in self.rest if name.endswith(end)]

    def take(
        self, name: str, dtypes: Collection[torch.dtype], shape: Sequence[int | None] | None = None
    ) -> FileTensor:
        """A tensor, of one of these types, and of this shape where there is a number.

        Raises ModelFileError naming the tensor where it is missing or another.
        """
        if (found := self.optional(name, dtypes, shape)) is None:
            raise ModelFileError(
                f"{self._folder} lacks tensor {name!r}, without which a quantized matrix cannot be read; "
                "the model is incomplete, get it again"
            )
        return found

    def optional(
        self, name: str, dtypes: Collection[torch.dtype], shape: Sequence[int | None] | None = None
    ) -> FileTensor | None:
        """The same of a tensor that need not be there."""
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
    """The last few things that were made, by key: what several threads read piece by piece is made once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._kept: OrderedDict[Hashable, _T] = OrderedDict()  # the last one that was used comes last

    def get(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What that key stands for."""
        with self._lock:
            found = self._kept.pop(key) if key in self._kept else make()
            self._kept[key] = found
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return found

    def drop(self, key: Hashable) -> None:
        """Forget it: no more of it will be read."""
        with self._lock:
            self._kept.pop(key, None)


def whole(tensor: StoredTensor) -> Tensor:
    """All of a tensor; of a single number [1]."""
    return tensor.read_rows(0, tensor.shape[0] if tensor.shape else 1)
