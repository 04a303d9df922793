"""Products: what the numbers of quantized weights mean, and the PyTorch twins of cpu/.

Activations are quantized to int8 on the fly, but for int4 weights on a matrix unit (below). A few of a
transformer's activations are a hundred times larger than the others, and one scale for a row would leave
those others two or three bits. So a row is cut into groups of 32. An int4 weight has a scale per group
anyway, and there the activations have one, too. An int8 weight has one per output channel, so that its
product is a plain one of integers; there each group is rotated by a Hadamard matrix H, of ones and minus
ones, which shares a large value out among all 32. The weights are rotated the other way beforehand:
x W^T = (x H) (W H / 32)^T.

Products of integers are summed exactly, and a fixed sequence of float operations follows. So the native
products of every CPU and the twins give the same bits, and a row's result does not depend on the rows
beside it. The first has one exception: for a matrix unit int4 weights become bfloat16, and rows stay bfloat16
(cpu/int4_tiles.h), as scaling the sums of each group would take longer than multiplying. The second has one
that is asked for: a `loose` product, of a draft, takes few rows the quicker way.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.library import BLOCK, Library
from specinfer.kernels.product import USUAL, NativeProduct, Product, Use, in_huge_pages

GROUP: Final = 32  # inner elements that are rotated together, or share a scale; inner sizes are padded to it
LEVELS: Final = 16  # of an int4 weight
_ROWS: Final = 16  # of a float product
_EXACT: Final = 1024  # products of two int8 whose sum float32 holds exactly
_SMALLEST: Final = 1e-30  # below it a scale's inverse would be infinite


class Int8Weight(NamedTuple):
    """A matrix rotated by H / 32, as scales * values."""

    values: Tensor  # int8 [channels, padded inner], -127 .. 127
    scales: Tensor  # float32 [channels]


class Int4Weight(NamedTuple):
    """A matrix as scales * (levels - zeros / 16), in the order the native product reads it."""

    levels: Tensor  # uint8 [blocks, groups, 4, BLOCK, 4], two to a byte; see `pack_levels`
    scales: Tensor  # float16 [blocks, groups, BLOCK]
    zeros: Tensor  # uint8 [blocks, groups, BLOCK]


class Products(Protocol):
    """How a CPU multiplies; each weight is laid out once, and the given one not kept."""

    @property
    def use(self) -> Use:
        """How its products are used."""
        ...

    def floats(self, weight: Tensor, bias: Tensor | None) -> Product:
        """The product with a weight [channels, inner] and bias [channels], both float32 or bfloat16."""
        ...

    def int8(self, weight: Int8Weight, bias: Tensor | None, inner: int) -> Product:
        """The product of rows of `inner` elements with an int8 weight; `bias` is float32 [channels]."""
        ...

    def int4(self, weight: Int4Weight, bias: Tensor | None, inner: int, channels: int) -> Product:
        """The product with the first `channels` of an int4 weight; the rest as above."""
        ...


class TorchProducts:
    """Products in plain PyTorch: slow, for where nothing is compiled, and the oracle of the others."""

    __slots__ = ()
    use: Final = USUAL

    def floats(self, weight: Tensor, bias: Tensor | None) -> Product:
        """As Products says; always as many rows at once, as a row would round differently beside others."""

        def product(x: Tensor) -> Tensor:
            whole = F.pad(x, (0, 0, 0, -len(x) % _ROWS))
            parts = [F.linear(whole[i : i + _ROWS], weight, bias) for i in range(0, len(whole), _ROWS)]
            return torch.cat(parts)[: len(x)] if parts else x.new_empty(0, len(weight))

        return product

    def int8(self, weight: Int8Weight, bias: Tensor | None, inner: int) -> Product:
        """As Products says."""
        _check_inner(padded(inner), weight.values.shape[1])

        def product(x: Tensor) -> Tensor:
            values, row_scales = int8_rows(x)
            return int8_outputs(exact_sums(values, weight.values), row_scales, weight.scales, bias, x.dtype)

        return product

    def int4(self, weight: Int4Weight, bias: Tensor | None, inner: int, channels: int) -> Product:
        """As Products says."""
        _check_inner(padded(inner), weight.scales.shape[1] * GROUP)

        def product(x: Tensor) -> Tensor:
            values_RGI, scales_RG = int4_rows(x)
            total_RC = torch.zeros(len(x), weight.scales.shape[0] * BLOCK)
            for g in range(weight.scales.shape[1]):
                # In sixteenths of a level, and without its scale, an element is an integer up to 255: 32 of
                # their products with int8 add up exactly in float32.
                levels_CI = unpack_levels(weight.levels[:, g]) * 16.0 - weight.zeros[:, g].reshape(-1, 1)
                sums_RC = F.linear(values_RGI[:, g], levels_CI)
                total_RC += sums_RC * (weight.scales[:, g].reshape(-1).float() * scales_RG[:, g : g + 1])
            out_RC = total_RC[:, :channels]
            return (out_RC if bias is None else out_RC + bias).to(x.dtype)

        return product


class NativeProducts:
    """Products of the native library."""

    __slots__ = ("_library", "use")

    def __init__(self, library: Library, use: Use = USUAL) -> None:
        self._library = library
        self.use = use

    def but(self, **changes: bool) -> NativeProducts:
        """The same, used otherwise."""
        return NativeProducts(self._library, self.use._replace(**changes))

    def floats(self, weight: Tensor, bias: Tensor | None) -> Product:
        """As Products says."""
        return NativeProduct.of_floats(self._library, weight, bias, self.use)

    def int8(self, weight: Int8Weight, bias: Tensor | None, inner: int) -> Product:
        """As Products says."""
        return NativeProduct.of_int8(self._library, weight.values, weight.scales, bias, inner, self.use)

    def int4(self, weight: Int4Weight, bias: Tensor | None, inner: int, channels: int) -> Product:
        """As Products says."""
        levels, scales, zeros = (in_huge_pages(self._library, torch.empty_like(t)).copy_(t) for t in weight)
        return NativeProduct(
            self._library,
            "int4",
            levels,
            channels=channels,
            inner=inner,
            scales=scales,
            zeros=zeros,
            bias=bias,
            use=self.use,
        )


def int8_bytes(channels: int, inner: int) -> int:
    """What an int8 weight takes."""
    return channels * (padded(inner) + 4)


def int4_bytes(channels: int, inner: int) -> int:
    """What an int4 weight takes."""
    return channels * padded(inner) // GROUP * (GROUP // 2 + 3)


def padded(inner: int) -> int:
    """An inner size, up to whole groups."""
    return -(-inner // GROUP) * GROUP


def grouped(x: Tensor) -> Tensor:
    """x [rows, inner] as float32 [rows, groups, GROUP], zeros behind the last."""
    return F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), padded(x.shape[1]) // GROUP, GROUP)


def rotate(groups: Tensor) -> Tensor:
    """The last dimension, of 32, times the Hadamard matrix H; five rounds of sums and differences."""
    # With groups as columns sums run along rows of memory, which halves the time of quantizing to int8.
    columns = groups.reshape(-1, GROUP).T.contiguous()
    for width in (16, 8, 4, 2, 1):
        pairs = (GROUP // (2 * width), 2, width, columns.shape[1])
        first, second = columns.view(pairs).unbind(1)
        columns = torch.empty_like(columns)
        sums, differences = columns.view(pairs).unbind(1)
        torch.add(first, second, out=sums)
        torch.sub(first, second, out=differences)
    return columns.T.reshape(groups.shape)


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, inner] rotated by H, as int8 values [rows, padded inner] and float32 scales [rows, 1]."""
    rotated = rotate(grouped(x)).flatten(1)
    most = rotated.abs().amax(1, keepdim=True)
    return (rotated * _inverse(most)).round().to(torch.int8), most / 127.0


def int8_outputs(
    sums: Tensor, row_scales: Tensor, scales: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Exact sums [rows, channels] in float32 -> the outputs in `dtype`."""
    out = sums * scales * row_scales
    return (out if bias is None else out + bias).to(dtype)


def int4_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, inner] as integers, and a sixteenth of their scales.

    Both float32: [rows, groups, GROUP] and [rows, groups].
    """
    groups = grouped(x)
    most = groups.abs().amax(2, keepdim=True)
    return (groups * _inverse(most)).round(), most.squeeze(2) / (127.0 * 16)


def exact_sums(values: Tensor, weight: Tensor) -> Tensor:
    """values [rows, inner] times weight [channels, inner], both int8, rounded to float32 once, at the end."""
    total = torch.zeros(len(values), len(weight), dtype=torch.float64)
    for start in range(0, values.shape[1], _EXACT):
        part = slice(start, start + _EXACT)
        total += F.linear(values[:, part].float(), weight[:, part].float())
    return total.float()


def pack_levels(levels: Tensor) -> Tensor:
    """Levels 0 .. 15, uint8 [blocks * BLOCK, inner], as an Int4Weight has them."""
    eights = levels.view(-1, BLOCK, levels.shape[1] // GROUP, 4, 2, 4)
    low, high = eights.unbind(4)
    return (low | high << 4).permute(0, 2, 3, 1, 4).contiguous()


def unpack_levels(levels: Tensor) -> Tensor:
    """The levels of one group of every block, [blocks, 4, BLOCK, 4], as uint8 [blocks * BLOCK, GROUP]."""
    eights = torch.stack((levels & 15, levels >> 4), 3)  # [blocks, 4, BLOCK, 2, 4]
    return eights.permute(0, 2, 1, 3, 4).reshape(-1, GROUP)


def _check_inner(wanted: int, got: int) -> None:
    if wanted != got:
        raise ValueError(f"a weight of inner size {got} for rows of {wanted}; both are padded to {GROUP}")


def _inverse(most: Tensor) -> Tensor:
    # `127.0 / most` would be 127 times the reciprocal, and rounded twice.
    return torch.where(most < _SMALLEST, 0.0, torch.tensor(127.0).div(most))
