"""Products with quantized weights: what the numbers mean, and the PyTorch twins of cpu/quantized.cpp.

Activations are quantized as they come, to int8. A few of a transformer's activations are a hundred times
larger than the others, and one scale for a row would leave those others two or three bits. So a row is cut
into groups of 32. An int4 weight has a scale per group anyway, and there the activations have one, too. An
int8 weight has one per output channel, so that its product is a plain one of integers; there each group is
turned by a Hadamard matrix H, of ones and minus ones, which shares a large value out among all 32. The
weights are turned the other way beforehand: x W^T = (x H) (W H / 32)^T.

Products of integers are summed exactly, and a fixed sequence of float operations follows. So the native
products, oneDNN's and the twins give the same bits, and a row's result does not depend on the rows beside
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.product import NativeProduct, Product

GROUP: Final = 32  # inner elements that are turned together, or share a scale; inner sizes are padded to it
BLOCK: Final = 16  # output channels that lie side by side
LEVELS: Final = 16  # of an int4 weight
_EXACT: Final = 1024  # products of two int8 whose sum float32 holds exactly
_SMALLEST: Final = 1e-30  # below it a scale's inverse would be infinite


class Int8Weight(NamedTuple):
    """A matrix turned by H / 32, as scales * values."""

    values: Tensor  # int8 [channels, padded inner], -127 .. 127
    scales: Tensor  # float32 [channels]


class Int4Weight(NamedTuple):
    """A matrix as scales * (levels - zeros / 16), in the order the native product reads it."""

    levels: Tensor  # uint8 [blocks, groups, 4, BLOCK, 4], two to a byte; see `pack_levels`
    scales: Tensor  # float16 [blocks, groups, BLOCK]
    zeros: Tensor  # uint8 [blocks, groups, BLOCK]


class Products(Protocol):
    """How quantized weights are multiplied; each weight is laid out once, and the given one not kept."""

    def int8(self, weight: Int8Weight, bias: Tensor | None) -> Product:
        """The product with an int8 weight; `bias` is float32 [channels]."""
        ...

    def int4(self, weight: Int4Weight, bias: Tensor | None, channels: int) -> Product:
        """The product with the first `channels` of an int4 weight; `bias` is float32 [channels]."""
        ...


class TorchProducts:
    """Products in plain PyTorch: slow, for where nothing is compiled, and the oracle of the others."""

    __slots__ = ()

    def int8(self, weight: Int8Weight, bias: Tensor | None) -> Product:
        """As Products says."""

        def product(x: Tensor) -> Tensor:
            values, row_scales = int8_rows(x)
            return int8_outputs(exact_sums(values, weight.values), row_scales, weight.scales, bias, x.dtype)

        return product

    def int4(self, weight: Int4Weight, bias: Tensor | None, channels: int) -> Product:
        """As Products says."""

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
    """Products in native code; `kernels.build.load_library` comes before it.

    With `onednn` int8 products are oneDNN's: the fastest where the CPU has AMX, and far from it elsewhere.
    """

    __slots__ = ("_onednn", "_outputs", "_rows")

    def __init__(self, *, onednn: bool) -> None:
        ops = torch.ops.specinfer
        self._onednn = onednn
        self._rows: Callable[[Tensor], tuple[Tensor, Tensor]] = ops.int8_rows.default
        self._outputs: Callable[..., Tensor] = ops.int8_outputs.default

    def int8(self, weight: Int8Weight, bias: Tensor | None) -> Product:
        """As Products says."""
        return self._onednn_int8(weight, bias) if self._onednn else self._tiled_int8(weight, bias)

    def int4(self, weight: Int4Weight, bias: Tensor | None, channels: int) -> Product:
        """As Products says."""
        return NativeProduct("int4", weight, bias, channels)

    def _tiled_int8(self, weight: Int8Weight, bias: Tensor | None) -> Product:
        channels = len(weight.scales)
        scales = F.pad(weight.scales, (0, -channels % BLOCK))
        return NativeProduct("int8", (tile_values(weight.values), scales), bias, channels)

    def _onednn_int8(self, weight: Int8Weight, bias: Tensor | None) -> Product:
        multiply: Callable[..., Tensor] = torch.ops.onednn.qlinear_pointwise.tensor
        packed: Tensor = torch.ops.onednn.qlinear_prepack(weight.values, None)
        rows, outputs, scales = self._rows, self._outputs, weight.scales
        one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
        ones, zeros = torch.ones_like(scales), torch.zeros(len(scales), dtype=torch.int32)

        def product(x: Tensor) -> Tensor:
            if len(x) == 0:  # oneDNN refuses empty products
                return x.new_empty(0, len(scales))
            values, row_scales = rows(x)
            sums = multiply(
                values, one, zero, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
            )
            return outputs(sums, row_scales, scales, bias, x)

        return product


def slow_products(products: Products) -> str | None:
    """Why these products are far from as fast as reading the weights, if they are."""
    if isinstance(products, TorchProducts):
        return "they run in PyTorch, without native kernels"
    if not torch.cpu._is_vnni_supported():
        return "this CPU has no AVX512-VNNI"
    return None


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
    for width in (16, 8, 4, 2, 1):
        first, second = groups.view(*groups.shape[:-1], GROUP // (2 * width), 2, width).unbind(-2)
        groups = torch.stack((first + second, first - second), -2).flatten(-3)
    return groups


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [rows, inner] turned by H, as int8 values [rows, padded inner] and float32 scales [rows, 1]."""
    turned = rotate(grouped(x)).flatten(1)
    most = turned.abs().amax(1, keepdim=True)
    return (turned * _inverse(most)).round().to(torch.int8), most / 127.0


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


def tile_values(values: Tensor) -> Tensor:
    """int8 [channels, inner] plus 128, as the native product reads it: [blocks, inner / 4, BLOCK, 4]."""
    channels, inner = values.shape
    whole = F.pad(values, (0, 0, 0, -channels % BLOCK))
    quads = whole.view(torch.int32).view(-1, BLOCK, inner // 4).transpose(1, 2).contiguous()
    return quads.view(torch.uint8).bitwise_xor_(128).view(-1, inner // 4, BLOCK, 4)


def pack_levels(levels: Tensor) -> Tensor:
    """Levels 0 .. 15, uint8 [blocks * BLOCK, inner], as an Int4Weight has them."""
    eights = levels.view(-1, BLOCK, levels.shape[1] // GROUP, 4, 2, 4)
    low, high = eights.unbind(4)
    return (low | high << 4).permute(0, 2, 3, 1, 4).contiguous()


def unpack_levels(levels: Tensor) -> Tensor:
    """The levels of one group of every block, [blocks, 4, BLOCK, 4], as uint8 [blocks * BLOCK, GROUP]."""
    eights = torch.stack((levels & 15, levels >> 4), 3)  # [blocks, 4, BLOCK, 2, 4]
    return eights.permute(0, 2, 1, 3, 4).reshape(-1, GROUP)


def _inverse(most: Tensor) -> Tensor:
    # `127.0 / most` would be 127 times the reciprocal, and rounded twice.
    return torch.where(most < _SMALLEST, 0.0, torch.tensor(127.0).div(most))
