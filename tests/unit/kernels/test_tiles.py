"""Products on the matrix unit's tiles, built over plain C++ of the same meaning: they run on any machine."""

import itertools
from typing import Final

import pytest
import torch
from torch import Tensor

from specinfer.check.kernel_faults import faults
from specinfer.errors import KernelBuildError
from specinfer.kernels.build import find_library
from specinfer.kernels.choice import native_kernels
from specinfer.kernels.layout import Int4Weight, quantize_int4, unpack_levels
from specinfer.kernels.library import Library
from specinfer.kernels.machine import LEVELS, levels_here
from specinfer.kernels.quantized import NativeProducts
from tests.kernels import plain_tiles
from tests.unit.kernels import test_parts, test_products
from tests.unit.kernels.test_products import activations, random

pytestmark = pytest.mark.slow  # a library is compiled

AMX: Final = next(level for level in LEVELS if level.name == "amx")
# Channels: less than a block, one, two and a tail, three and a tail.
SHAPES: Final = ((1, 64), (1, 1100), (16, 33), (16, 80), (33, 1), (33, 64), (49, 33), (49, 1100))
ROWS: Final = (0, 1, 15, 16, 17, 33, 64, 65, 130)  # up to nine tiles, of one height each time
EACH_SHAPE: Final = pytest.mark.parametrize(("channels", "inner"), SHAPES)
EACH_DTYPE: Final = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(scope="module")
def plain() -> Library:
    """The library with plain tiles."""
    return plain_tiles()


@pytest.fixture(scope="module")
def amx() -> Library:
    """The library that runs where there is a matrix unit."""
    if AMX not in levels_here():
        pytest.skip("this CPU has no AMX")
    try:
        library = Library(find_library(AMX), AMX)
    except KernelBuildError as error:
        pytest.skip(f"nothing can be compiled: {error}")
    if not library.ready():
        pytest.skip("the system does not let this process use the CPU's matrix unit")
    library.set_threads(2)
    return library


def bits(x: Tensor) -> Tensor:
    """The bits of bfloat16, with one NaN for all: which one comes out is not said."""
    return x.view(torch.int16).masked_fill(x.isnan(), -1)


def test_plain_tiles_have_no_fault(plain: Library) -> None:
    assert list(faults(plain)) == []


def test_parts_on_tiles_add_up_to_the_whole(plain: Library) -> None:
    test_parts.check_sums(plain)


@pytest.mark.parametrize("kind", test_parts.KINDS)
def test_parts_on_tiles_are_added_by_the_tree(plain: Library, kind: str) -> None:
    test_parts.check_order(NativeProducts(plain), kind, (1, 17))
    test_parts.check_shares(NativeProducts(plain), kind, (1, 65))


def test_int4_products_on_tiles_keep_the_laws_of_others(plain: Library) -> None:
    test_products.test_few_rows_of_a_loose_product_have_the_bits_of_the_twins(NativeProducts(plain))
    test_products.test_what_is_not_finite_stays_so(NativeProducts(plain), "int4")
    weight = random(33, 96, seed=0)
    weight[5, 7] = float("nan")  # and so is the whole matrix's scale
    spoilt = NativeProducts(plain).laid_out(quantize_int4(weight), None, 96, 33)
    assert spoilt(random(17, 96, seed=1)).isnan().all()


def test_the_largest_scale_there_is_fits(plain: Library) -> None:
    """1024 times it, as it is scaled, is the largest number of float16."""
    weight = quantize_int4(random(16, 32, seed=0))
    largest = weight._replace(scales=torch.full_like(weight.scales, 65504.0))
    levels, zeros = (part[:16] for part in as_bfloat16(largest))
    got = native_kernels(plain).products.laid_out(largest, None, 32, 16)(torch.eye(32))
    assert got.isfinite().all()
    assert torch.equal(got.T, levels - zeros / 16)


@pytest.mark.parametrize("size", [1e-9, 1e-6, 1e-3, 0.02, 1.0, 100.0, 1e5])
def test_int4_weights_become_the_nearest_bfloat16_ones(plain: Library, size: float) -> None:
    """One row for each element, with a one there: its weight comes out, level and zero added in float32."""
    values = random(33, 80, seed=0) * torch.logspace(-4, 0, 33)[:, None] * size
    weight = quantize_int4(values)
    levels, zeros = (part[:33, :80] for part in as_bfloat16(weight))
    got = native_kernels(plain).products.laid_out(weight, None, 80, 33)(torch.eye(80))
    assert torch.equal(got.T, levels - zeros / 16)


def as_bfloat16(weight: Int4Weight) -> tuple[Tensor, Tensor]:
    """Scales times levels, and times zeros, of all channels and elements; float32, of bfloat16 numbers."""
    unit = 2.0 ** min(6 - int(torch.frexp(weight.scales.max().float()).exponent), 14)

    def rounded(numbers_BGCI: Tensor) -> Tensor:
        products = (numbers_BGCI * (scales_BGC1.float() * unit).half().float()).half()  # 11 bits, then 8
        bits = products.view(torch.int16).int() + 4 >> 3
        whole = (bits << 16).view(torch.float32) * 2.0**112 / unit
        return whole.transpose(1, 2).flatten(2).flatten(0, 1)

    scales_BGC1 = weight.scales.unsqueeze(3)
    levels_BGCI = torch.stack([unpack_levels(group).view(-1, 16, 32) for group in weight.levels.unbind(1)], 1)
    return rounded(levels_BGCI.float()), rounded(weight.zeros.unsqueeze(3).float().expand(levels_BGCI.shape))


# ---- AMX, bit by bit ----


def same_bits(amx: Library, plain: Library, weight: Tensor, bias: Tensor | None, x: Tensor) -> bool:
    ours, other = (native_kernels(library).products.floats(weight, bias)(x) for library in (amx, plain))
    return torch.equal(bits(ours), bits(other))


@EACH_SHAPE
def test_bfloat16_has_the_bits_of_amx(amx: Library, plain: Library, channels: int, inner: int) -> None:
    weight = random(channels, inner, seed=0, dtype=torch.bfloat16)
    for rows, bias in itertools.product(ROWS, (None, random(channels, seed=2))):
        assert same_bits(amx, plain, weight, bias, activations(rows, inner, torch.bfloat16)), f"{rows} rows"


@EACH_SHAPE
@EACH_DTYPE
def test_int4_as_on_amx(amx: Library, plain: Library, dtype: torch.dtype, channels: int, inner: int) -> None:
    for size in (1e-9, 1e-3, 1.0, 1e5):
        values = random(channels, inner, seed=0) * torch.logspace(-6, 0, channels)[:, None] * size
        weight = quantize_int4(values)
        ours, other = (
            native_kernels(library).products.laid_out(weight, None, inner, channels)
            for library in (amx, plain)
        )
        for rows in (1, 17, 65):
            x = activations(rows, inner, dtype)
            assert torch.equal(ours(x), other(x)), f"{rows} rows, weights of {size}"


@pytest.mark.parametrize("exponent", [-20, -60, -63, -66, -100])
def test_small_numbers_have_the_bits_of_amx(amx: Library, plain: Library, exponent: int) -> None:
    """Weights, rows, products and sums that are not normal: AMX takes each for zero."""
    weight = (random(49, 80, seed=0) * 2.0**exponent).bfloat16()
    x = (random(33, 80, seed=1) * 2.0 ** (-126 - exponent + torch.arange(33) % 7)[:, None]).bfloat16()
    weight[3, 5::7], x[2, ::3] = 2.0**-130, -(2.0**-128)
    weight[4], x[5] = 2.0**-133, 2.0**-133
    assert same_bits(amx, plain, weight, None, x)


def test_all_bit_patterns_have_the_bits_of_amx(amx: Library, plain: Library) -> None:
    """Every bfloat16 there is, infinities and NaNs too, times numbers of all sizes."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16).view(1024, 64)
    weight = random(16, 64, seed=0) * torch.logspace(-38, 38, 16)[:, None]
    shuffled = every.flatten()[torch.randperm(2**16, generator=torch.Generator().manual_seed(3))]
    for x in (every, shuffled.view(1024, 64), shuffled.view(-1, 1)):
        assert same_bits(amx, plain, weight[:, : x.shape[1]].bfloat16().contiguous(), None, x)
