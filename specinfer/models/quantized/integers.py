"""Matrices of small integers: scale * (level - zero), with a scale and a zero per group of a row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.kernels.layout import GROUP, int4_rows
from specinfer.models.quantized.pieces import LastFew, StoredTensor, whole

_UNSET: Final = -1  # in a list of groups that was never filled in


class LevelRows(NamedTuple):
    """Rows of such a matrix."""

    levels: Tensor  # uint8 [rows, inner]
    scales: Tensor  # [rows, groups]
    zeros: Tensor  # uint8 [rows, groups]


class IntegerMatrix:
    """A matrix of levels: a StoredTensor."""

    dtype: torch.dtype | None = None

    def __init__(
        self,
        path: Path,
        shape: tuple[int, int],
        bits: int,
        scales: StoredTensor,
        read: Callable[[int, int], LevelRows],
        *,
        groups: int,
        group_of: Tensor | None = None,
    ) -> None:
        """A row's `groups` have equal length and are contiguous unless `group_of`, int64 [inner], is given.

        `scales` are all the scales, in any order.
        """
        self.path = path
        self.shape: tuple[int, ...] = shape
        self._bits = bits
        self._scales = scales
        self._read = read
        self._size = shape[1] // groups
        self._group_of = group_of

    def read_rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop, float32: products of a difference and a float16 or bfloat16 scale are exact."""
        levels, scales, zeros = self._read(start, stop)
        if self._group_of is not None:
            scales, zeros = scales[:, self._group_of], zeros[:, self._group_of]
            return levels.float().sub_(zeros).mul_(scales)
        groups = levels.view(*scales.shape, self._size).float()
        return groups.sub_(zeros[..., None]).mul_(scales[..., None].float()).flatten(1)

    def int4_reader(self) -> Callable[[int, int], Tensor] | None:
        """A reader of rows for `int4_rows` without rounding; None if int4 cannot represent them."""
        if self._bits > 4 or self._group_of is not None:
            return None
        inner = self.shape[1]
        if self._size % GROUP and self._size != inner:
            return None
        if self._scales.dtype != torch.float16:
            scales = whole(self._scales)
            if not bool(torch.equal(scales.half().to(scales.dtype), scales)):
                return None
        missing, times = -inner % GROUP, -(-self._size // GROUP)

        def read(start: int, stop: int) -> Tensor:
            levels, scales, zeros = self._read(start, stop)
            return int4_rows(
                F.pad(levels, (0, missing)),
                scales.repeat_interleave(times, 1),
                zeros.repeat_interleave(times, 1),
            )

        return read


class TransposedTensor:
    """A transposed matrix of a file, which is in memory as a whole while it is read."""

    def __init__(self, tensor: StoredTensor, last: LastFew[Tensor]) -> None:
        """`last` caches the folder's matrices in memory."""
        self._tensor, self._last = tensor, last

    def rows(self, start: int, stop: int) -> Tensor:
        """Columns start..stop of the file's matrix, as rows."""
        transposed = self._last.get(id(self), lambda: whole(self._tensor).T.contiguous())
        if stop == len(transposed):
            self._last.drop(id(self))
        return transposed[start:stop]


def unpacked(words: Tensor, bits: int) -> Tensor:
    """int32 [..., words] as uint8 [..., words * 32 / bits]; the lowest bits come first."""
    octets = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], words.shape[-1] * 4)
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return (octets[..., None] >> shifts).bitwise_and_((1 << bits) - 1).flatten(-2)


def order_of_groups(name: str, index: StoredTensor, groups: int) -> Tensor | None:
    """The group of each element of a row, int64; None if groups are contiguous.

    Raises ModelFileError for an invalid group.
    """
    found = whole(index).long()
    if bool((found == _UNSET).all()):
        return None
    if not 0 <= int(found.min()) <= int(found.max()) < groups:
        raise ModelFileError(
            f"{index.path}: tensor {name!r} has groups from {int(found.min())} to {int(found.max())}; "
            f"there are {groups}. The file is damaged, get it again"
        )
    return None if torch.equal(found, torch.arange(len(found)) // (len(found) // groups)) else found
