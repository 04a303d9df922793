"""Matrices of small numbers times scales: FP8, LLM.int8, MXFP4 (gpt-oss), and levels of integers.

MXFP4 has 4-bit floats, two per byte, with a power of two for every 32. Levels have a scale and a zero per
group of a row: scale * (level - zero).

Source: transformers' finegrained_fp8, fbgemm_fp8 and mxfp4 integrations, bitsandbytes' int8 dequantization,
the OCP Microscaling Formats specification.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.errors import ModelError, ModelFileError
from specinfer.kernels.layout import GROUP, int4_rows
from specinfer.models.fields import Fields
from specinfer.models.quantized.pieces import FLOATS, MadeTensor, Pieces, StoredTensor, whole

_FLOAT8: Final = (torch.float8_e4m3fn,)
_SCALES: Final = (*FLOATS, torch.float8_e8m0fnu)


def scaled_by(
    values: StoredTensor,
    scales: StoredTensor,
    block: tuple[int, int],
    *,
    zeros: StoredTensor | None = None,
    factor: float = 1.0,
) -> MadeTensor:
    """A matrix whose blocks are (values - zeros) * scales.

    `block` is the number of rows and columns that share a scale; the last ones may be smaller. Scales are
    [blocks of rows, blocks of columns], without dimensions of size 1. Everything is multiplied by `factor`.
    """
    (channels, inner), (high, wide) = values.shape, block

    def spread(of_blocks: StoredTensor, start: int, stop: int) -> Tensor:
        """Expand one number per block to the elements of these rows, or to a dimension of size 1."""
        if high >= channels:
            each = whole(of_blocks).float().view(1, -1)
        else:
            first = start // high
            blocks = of_blocks.read_rows(first, -(-stop // high)).float()
            each = blocks.view(len(blocks), -1)[torch.arange(start, stop) // high - first]
        return each if each.shape[1] == 1 else each.repeat_interleave(wide, 1)[:, :inner]

    def read_rows(start: int, stop: int) -> Tensor:
        rows = values.read_rows(start, stop).float()
        if zeros is not None:
            rows -= spread(zeros, start, stop)
        rows *= spread(scales, start, stop)
        return rows if factor == 1 else rows.mul_(factor)

    return MadeTensor(values.path, values.shape, read_rows)


def scaled(
    name: str,
    values: StoredTensor,
    scales: StoredTensor,
    block: tuple[int, int] | None,
    zeros: StoredTensor | None = None,
) -> MadeTensor:
    """A matrix with scales per block, or by their shape per group, per channel or for the whole matrix.

    `name` is the tensor of the scales. Raises ModelError if they fit none of these.
    """
    channels, inner = values.shape
    shape = tuple(size for size in scales.shape if size != 1)
    if block is not None and scales.shape == (-(-channels // block[0]), -(-inner // block[1])):
        return scaled_by(values, scales, block, zeros=zeros)
    if not shape:
        return scaled_by(values, scales, (channels, inner), zeros=zeros)
    if scales.shape in ((channels, 1), (channels,)):
        return scaled_by(values, scales, (1, inner), zeros=zeros)
    if len(shape) == 2 and shape[0] == channels and inner % shape[1] == 0:
        return scaled_by(values, scales, (1, inner // shape[1]), zeros=zeros)
    blocks = f", with blocks of {block[0]} x {block[1]}" if block else ""
    raise ModelError(
        f"{scales.path}: tensor {name!r} has shape {list(scales.shape)} for a matrix "
        f"{channels} x {inner}{blocks}; config.json and weights belong to different models, get both again"
    )


def fp8(settings: Fields, pieces: Pieces) -> dict[str, StoredTensor]:
    """The matrices of a model in FP8 (E4M3) by name; `settings` is the quantization_config.

    Scales are per block, channel or matrix. Raises ModelError and its subclasses as the others.
    """
    block, found = block_of(settings, "weight_block_size"), dict[str, StoredTensor]()
    for name in [name for name, one in pieces.rest.items() if one.dtype in _FLOAT8]:
        values = pieces.take(name, _FLOAT8, (None, None))
        beside = next((end for end in ("_scale_inv", "_scale") if name + end in pieces.rest), "_scale_inv")
        scales = pieces.take(name + beside, _SCALES)
        found[name] = scaled(name + beside, values, scales, block)
    return found


def block_of(settings: Fields, key: str) -> tuple[int, int] | None:
    """The rows and columns of a block under `key`, if scales are per block; raises ModelError."""
    value = settings.get(key)
    match value:
        case None:
            return None
        case [int(high), int(wide)] if high > 0 and wide > 0:
            return high, wide
    raise ModelError(f"{key} is {value!r}; expected two numbers of rows and columns, or null")


_HALF: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES: Final = torch.tensor([*_HALF, *(-value for value in _HALF)])
_BYTES: Final = (torch.uint8,)
_BIAS: Final = 127  # exponent bias
_PER_GROUP: Final = 16  # bytes


def mxfp4(settings: Fields, pieces: Pieces) -> dict[str, StoredTensor]:
    """The experts' matrices by name: NAME.weight from NAME_blocks and NAME_scales, concatenated by rows.

    Raises ModelFileError if the tensors' shapes do not match.
    """
    found = dict[str, StoredTensor]()
    for stem in pieces.stems("_blocks"):
        blocks = pieces.take(f"{stem}_blocks", _BYTES, (None, None, None, _PER_GROUP))
        scales = pieces.take(f"{stem}_scales", _BYTES, blocks.shape[:3])
        bytes_, exponents = blocks.joined(), scales.joined()
        shape = bytes_.shape[0], bytes_.shape[1] * 2 * _PER_GROUP
        read_rows = partial(_microscaled, bytes_, exponents)
        found[f"{stem}.weight"] = MadeTensor(blocks.path, shape, read_rows)
    return found


def _microscaled(blocks: StoredTensor, scales: StoredTensor, start: int, stop: int) -> Tensor:
    """Rows of bytes [rows, groups, 16] and exponents [rows, groups]; bfloat16 can represent them, too."""
    octets = blocks.read_rows(start, stop)
    powers = scales.read_rows(start, stop).int() - _BIAS
    values = _VALUES[torch.stack((octets & 15, octets >> 4), 3).int()].flatten(2)
    return torch.ldexp(values, powers[..., None]).flatten(1)


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
