"""Products: the meaning of quantized weights, and the PyTorch twins of cpu/.

Activations are quantized to int8 on the fly, except for int4 weights on a matrix unit (below). A few of a
transformer's activations are a hundred times larger than the others, and one scale per row would leave the
others two or three bits. So a row is divided into groups of 32. An int4 weight has a scale per group, and
there the activations have one per group, too. GGUF blocks of 256 elements have one scale, and an integer step
per group: there the activations have one scale per 256, and a block's products are added exactly.

An int8 weight has one scale per output channel, so that its product is a plain integer product. Each group is
then rotated by a Hadamard matrix H of ones and minus ones, which spreads a large value over all 32 elements.
The weights are rotated the other way beforehand: x W^T = (x H) (W H / 32)^T.

Integer products are summed exactly, and a fixed sequence of float operations follows. This gives two
guarantees:

- Native products on every CPU and the twins have the same bits. There is one exception: on a matrix unit,
  int4 weights become bfloat16 and rows stay bfloat16 (cpu/int4_tiles.h). Scaling the sums of each group would
  take longer than multiplying.
- A row's result does not depend on other rows. The exception is a `loose` product, which a draft uses: it
  multiplies few rows in a faster way.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.kernels.layout import (
    GROUP,
    OFFSET,
    BlocksWeight,
    FloatWeight,
    Int4Weight,
    Int8Weight,
    empty_floats,
    grouped,
    int8_matrix,
    lay_out_floats,
    padded,
    rotate,
    unpack_levels,
)
from specinfer.kernels.library import Library
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import (
    DEFAULT_OPTIONS,
    FLOAT_ROWS,
    FLOATS,
    NativeProduct,
    Product,
    ProductOptions,
)
from specinfer.kernels.structures import BLOCK, BLOCK_KINDS, Kind, padded_inner

_EXACT: Final = 1024  # int8 products whose sum is exact in float32
_MIN_RANGE: Final = 1e-30  # the inverse of a smaller scale would be infinite


class Products:
    """Products of a device in plain PyTorch: slow, for systems without compiled kernels."""

    __slots__ = ("library", "use")

    def __init__(self, library: Library | None = None, use: ProductOptions = DEFAULT_OPTIONS) -> None:
        self.library = library  # multiplies; None: PyTorch
        self.use = use  # how its products are used

    def but(self, **changes: bool) -> Products:
        """Products for other uses, which change nothing in PyTorch."""
        return self

    def floats(self, weight: Tensor, bias: Tensor | None, parts: SumParts | None = None) -> Product:
        """The product with a weight [channels, inner] and bias [channels], both float32 or bfloat16.

        On a CPU rows are multiplied in fixed-size batches, since a row rounds differently in others. `parts`
        determines the order of sums; PyTorch takes none.
        """
        assert parts is None, "support.py refuses parts with PyTorch's kernels"
        if weight.device.type != "cpu":
            return partial(F.linear, weight=weight, bias=bias)

        def product(x: Tensor) -> Tensor:
            whole = F.pad(x, (0, 0, 0, -len(x) % FLOAT_ROWS))
            found = [
                F.linear(whole[i : i + FLOAT_ROWS], weight, bias) for i in range(0, len(whole), FLOAT_ROWS)
            ]
            return torch.cat(found)[: len(x)] if found else x.new_empty(0, len(weight))

        return product

    def laid_out(
        self,
        weight: FloatWeight | Int8Weight | Int4Weight | BlocksWeight,
        bias: Tensor | None,
        inner: int,
        channels: int,
        largest: float | None = None,
        parts: SumParts | None = None,
    ) -> Product:
        """The product of rows of `inner` elements with the first `channels` of a weight.

        `bias` is float32 [channels]. Scales of an int4 weight are at most `largest`; None: computed. `parts`
        determines the order of sums, except of int8, whose sums are exact; None: a single part. PyTorch takes
        no parts and no FloatWeight.
        """
        assert parts is None or isinstance(weight, Int8Weight), "support.py refuses parts"
        assert not isinstance(weight, FloatWeight), "PyTorch multiplies plain matrices"
        if isinstance(weight, Int8Weight):
            _check_inner(padded_inner("int8", inner), weight.values.shape[1] * 4)
            sums = _int8_sums(*int8_matrix(weight, channels, padded(inner)))
        else:
            _check_inner(padded(inner), _groups(weight) * GROUP)
            sums = _int4_sums(weight) if isinstance(weight, Int4Weight) else _blocks_sums(weight)

        def product(x: Tensor) -> Tensor:
            out = sums(x)[:, :channels]
            return (out if bias is None else out + bias).to(x.dtype)

        return product


class NativeProducts(Products):
    """Products of the native library, with weights in place."""

    __slots__ = ()
    library: Library

    def __init__(self, library: Library, use: ProductOptions = DEFAULT_OPTIONS) -> None:
        super().__init__(library, use)

    def but(self, **changes: bool) -> NativeProducts:
        """A copy with other uses."""
        return NativeProducts(self.library, self.use._replace(**changes))

    def floats(self, weight: Tensor, bias: Tensor | None, parts: SumParts | None = None) -> NativeProduct:
        """See Products; multiplies with a laid-out copy of `weight`."""
        channels, inner = weight.shape
        copied = empty_floats(channels, inner, weight.dtype, self.library)
        lay_out_floats(weight, copied)
        bias = None if bias is None else bias.float()
        return self.laid_out(copied, bias, inner, channels, parts=parts)

    def laid_out(
        self,
        weight: FloatWeight | Int8Weight | Int4Weight | BlocksWeight,
        bias: Tensor | None,
        inner: int,
        channels: int,
        largest: float | None = None,
        parts: SumParts | None = None,
    ) -> NativeProduct:
        """See Products."""
        scales = zeros = None
        if isinstance(weight, FloatWeight):
            kind: Kind = FLOATS[weight.values.dtype]
        elif isinstance(weight, Int8Weight):
            kind, scales, parts = "int8", weight.scales, None
        elif isinstance(weight, Int4Weight):
            kind, scales, zeros = "int4", weight.scales, weight.zeros
            largest = float(scales.max()) if largest is None else largest
        else:
            kind, scales = BLOCK_KINDS[weight.bits], weight.scales
        return NativeProduct(
            *(self.library, kind, weight[0]),
            channels=channels,
            inner=inner,
            scales=scales,
            zeros=zeros,
            largest=largest or 0.0,
            bias=bias,
            use=self.use,
            parts=parts,
            blocks=weight if isinstance(weight, BlocksWeight) else None,
        )


def _int8_sums(matrix: Tensor, scales: Tensor) -> Product:
    """Sums over an int8 matrix [channels, padded inner] with float32 scales [channels]."""

    def add_up(x: Tensor) -> Tensor:
        rotated = rotate(grouped(x)).flatten(1)
        maxima = rotated.abs().amax(1)
        values = (rotated * _inverse(maxima)[:, None]).round().to(torch.int8)
        return exact_sums(values, matrix).float() * scales * (maxima / 127.0)[:, None]

    return add_up


def _int4_sums(weight: Int4Weight) -> Product:
    """Float32 sums over the groups of an int4 weight, in order."""

    def add_up(x: Tensor) -> Tensor:
        values_RGI, scales_RG = quantized_rows(x)
        total_RC = torch.zeros(len(x), weight.scales.shape[0] * BLOCK)
        for g in range(_groups(weight)):
            # In sixteenths of a level, and without its scale, an element is an integer up to 255: the sum of
            # 32 products with int8 is exact in float32.
            levels_CI = unpack_levels(weight.levels[:, g]) * 16.0 - weight.zeros[:, g].reshape(-1, 1)
            sums_RC = F.linear(values_RGI[:, g], levels_CI)
            scales_C = weight.scales[:, g].reshape(-1).float() * 0.0625
            total_RC += sums_RC * (scales_C * scales_RG[:, g : g + 1])
        return total_RC

    return add_up


def _blocks_sums(weight: BlocksWeight) -> Product:
    """Float32 sums over the groups or spans of a matrix of GGUF blocks, in order."""
    add = _add_group if weight.span == 1 else _add_span

    def add_up(x: Tensor) -> Tensor:
        values_RSI, scales_RS = quantized_rows(x, weight.span * GROUP)
        total_RC = torch.zeros(len(x), weight.scales.shape[0] * BLOCK)
        for s in range(weight.scales.shape[1]):
            add(weight, s, values_RSI[:, s], scales_RS[:, s : s + 1], total_RC)
        return total_RC

    return add_up


def _add_group(weight: BlocksWeight, g: int, values_RI: Tensor, scale_R1: Tensor, total_RC: Tensor) -> None:
    """Add the products of a group to the totals."""
    of_channels_C = weight.scales[:, g].reshape(-1).float()
    if weight.bits == 4:
        sums_RC = F.linear(values_RI, unpack_levels(weight.levels[:, g]).float())
        if weight.has_steps:
            of_channels_C = of_channels_C * _steps(weight, g)
    else:
        sums_RC = _sums(weight, g, values_RI).float()
    total_RC += sums_RC * (of_channels_C * scale_R1)
    if weight.has_mins:
        min_C = weight.mins[:, g].reshape(-1).float() * weight.min_steps[:, g].reshape(-1).float()
        total_RC += min_C * (-values_RI.sum(1, keepdim=True) * scale_R1)


def _add_span(weight: BlocksWeight, s: int, values_RI: Tensor, scale_R1: Tensor, total_RC: Tensor) -> None:
    """Add the products of a span of groups to the totals."""
    groups, values_GRI = range(s * weight.span, (s + 1) * weight.span), values_RI.chunk(weight.span, 1)
    pairs = list(zip(groups, values_GRI, strict=True))
    sums_RC = torch.stack([_sums(weight, *pair) for pair in pairs]).sum(0).float()
    whole_RC = sums_RC * weight.scales[:, s].reshape(-1).float()
    if weight.has_mins:
        of_groups = [v.double().sum(1, keepdim=True) * weight.min_steps[:, g].reshape(-1) for g, v in pairs]
        whole_RC -= torch.stack(of_groups).sum(0).float() * weight.mins[:, s].reshape(-1).float()
    total_RC += whole_RC * scale_R1


def _sums(weight: BlocksWeight, g: int, values_RI: Tensor) -> Tensor:
    """The sums of a group, each part of it times its step, in float64, where they are exact."""
    levels_CI = unpack_levels(weight.levels[:, g]).float()
    count = 1 if weight.bits == 4 else 2
    total = torch.zeros(len(values_RI), len(levels_CI), dtype=torch.float64)
    for n, pair in enumerate(zip(values_RI.chunk(count, 1), levels_CI.chunk(count, 1), strict=True)):
        total += F.linear(*pair).double() * (_steps(weight, count * g + n) if weight.has_steps else 1.0)
    return total


def _steps(weight: BlocksWeight, number: int) -> Tensor:
    return weight.steps[:, number].reshape(-1).float() - OFFSET


def quantized_rows(x: Tensor, size: int = GROUP) -> tuple[Tensor, Tensor]:
    """x [rows, inner] as integers [rows, groups, size], and their scales [rows, groups]; both float32."""
    groups = grouped(x).view(len(x), padded(x.shape[1]) // size, size)
    highest = groups.abs().amax(2, keepdim=True)
    return (groups * _inverse(highest)).round(), highest.squeeze(2) / 127.0


def exact_sums(values: Tensor, weight: Tensor) -> Tensor:
    """values [rows, inner] times weight [channels, inner], both int8, as int32."""
    total = torch.zeros(len(values), len(weight), dtype=torch.float64)
    for start in range(0, values.shape[1], _EXACT):
        part = slice(start, start + _EXACT)
        total += F.linear(values[:, part].float(), weight[:, part].float())
    return total.int()


def _groups(weight: Int4Weight | BlocksWeight) -> int:
    return weight.groups if isinstance(weight, BlocksWeight) else weight.scales.shape[1]


def _check_inner(wanted: int, got: int) -> None:
    if wanted != got:
        raise ValueError(f"got a weight of inner size {got} for rows of {wanted}; both are padded to {GROUP}")


def _inverse(highest: Tensor) -> Tensor:
    # `127.0 / highest` would be 127 times the reciprocal, and rounded twice.
    return torch.where(highest < _MIN_RANGE, 0.0, torch.tensor(127.0).div(highest))
