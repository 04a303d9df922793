"""Products of every kind of weight: near the real ones, a row for itself, and the bits of the twins."""

import gc
import weakref
from dataclasses import replace
from functools import cache
from itertools import product as product_of
from typing import Final, Literal, NamedTuple

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from specinfer.kernels.file_blocks import BlockForm, empty_blocks, lay_out_blocks
from specinfer.kernels.layout import GROUP, BlocksWeight, choose_rows, quantize_int4, quantize_int8, rotate
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import ProductOptions, first_channels
from specinfer.kernels.quantized import NativeProducts, Product, Products
from specinfer.models.gguf_blocks import FILE_BLOCKS
from tests.gguf_blocks import random_blocks
from tests.kernels import NAMES, kernels

SHAPES: Final = ((1, 1), (16, 4), (17, 6), (16, 32), (33, 33), (48, 80), (49, 576), (40, 1100), (33, 8960))
ROWS: Final = (0, 1, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13, 16, 17, 24, 25, 32, 33, 40, 70)
DTYPES: Final = (torch.float32, torch.bfloat16)
FLOATS: Final = ("float32", "bfloat16")
INTEGERS: Final = ("int8", "int4")
# Errors relative to the norm of all outputs, for random weights.
NOISE: Final = {"float32": 5e-6, "bfloat16": 2**-8, "int8": 0.02, "int4": 0.1}
KINDS: Final = (*FLOATS, *INTEGERS, *FILE_BLOCKS)
WIDE: Final = BlockForm(8, 1, steps=True, mins=True)  # which has room for all kinds
EACH_KIND: Final = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def native() -> NativeProducts:
    return kernels("native").products


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def activations(rows: int, inner: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different sizes, with a large value in the first and nothing in the second."""
    x = random(rows, inner, seed=1) * torch.logspace(-3, 3, max(rows, 1))[:rows, None]
    x[:1, inner // 2] *= 100
    x[1:2] = 0
    return x.to(dtype)


def dtype_of(kind: str) -> torch.dtype:
    """The dtype of rows, if only one goes with a weight of that kind."""
    return torch.bfloat16 if kind == "bfloat16" else torch.float32


class Matrix(NamedTuple):
    """Random rows of blocks, and the floats that the gguf package makes of them."""

    rows: Tensor
    floats: Tensor


@cache
def blocks(kind: str, channels: int, inner: int) -> Matrix:
    octets = random_blocks(kind, channels, inner)
    floats = torch.from_numpy(gguf.quants.dequantize(octets, GGMLQuantizationType[kind]))
    size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    return Matrix(FILE_BLOCKS[kind].rows(torch.from_numpy(octets).view(channels, -1, size)), floats)


def of_blocks(products: Products, weight: BlocksWeight, channels: int, bias: Tensor | None = None) -> Product:
    return products.laid_out(weight, bias, weight.groups * GROUP, channels)


def product(products: Products, kind: str, channels: int, inner: int, *, biased: bool = False) -> Product:
    """The product with a random matrix; `inner` is a multiple of 256 for kinds of files."""
    weight, bias = random(channels, inner), random(channels, seed=2) if biased else None
    if kind in FILE_BLOCKS:
        laid_out = lay_out_blocks(blocks(kind, channels, inner).rows, FILE_BLOCKS[kind].form)
        return of_blocks(products, laid_out, channels, bias)
    if kind in INTEGERS:
        quantize = quantize_int8 if kind == "int8" else quantize_int4
        return products.laid_out(quantize(weight), bias, inner, channels)
    return products.floats(weight.to(dtype_of(kind)), None if bias is None else bias.to(dtype_of(kind)))


@pytest.mark.parametrize("kind", NOISE)
def test_products_are_near_the_real_ones(native: NativeProducts, kind: str) -> None:
    for (channels, inner), products in product_of(SHAPES, (native, Products())):
        dtype = dtype_of(kind)
        weight, bias = (one.to(dtype).double() for one in (random(channels, inner), random(channels, seed=2)))
        x = random(9, inner, seed=3, dtype=dtype)
        got, want = product(products, kind, channels, inner, biased=True)(x), x.double() @ weight.T + bias
        assert got.dtype is dtype
        assert (got.double() - want).norm() <= NOISE[kind] * want.norm(), (channels, inner, products)


@EACH_KIND
def test_a_row_does_not_depend_on_the_rows_beside_it(native: NativeProducts, kind: str) -> None:
    """And not on how weights are read: past the caches they are the same weights."""
    past = native.but(nontemporal=True)
    for channels, inner in ((40, 768), *(() if kind in FILE_BLOCKS else ((17, 6), (33, 80)))):
        run, other = (product(products, kind, channels, inner) for products in (native, past))
        assert (run.args.nontemporal, other.args.nontemporal) == (0, 1)
        x = activations(130, inner, dtype_of(kind))
        whole = run(x)
        for rows in ROWS:
            assert torch.equal(run(x[:rows]), whole[:rows]), (inner, rows)
            assert torch.equal(other(x[:rows]), whole[:rows]), (inner, rows)
        for step in (1, 2, 7, 37):
            assert torch.equal(torch.cat([run(part) for part in x.split(step)]), whole), (inner, step)


@EACH_KIND
def test_the_first_channels_are_those_of_the_whole(native: NativeProducts, kind: str) -> None:
    whole = product(native, kind, 49, 768, biased=True)
    x = activations(40, 768, dtype_of(kind))
    for rows, channels in product_of((1, 7, 40), (16, 32)):
        first = first_channels(whole, channels)
        assert first is not None
        assert torch.equal(first(x[:rows]), whole(x[:rows])[:, :channels]), (rows, channels)
    assert whole(x).shape == (40, 49)
    assert first_channels(whole, 49) is None
    assert first_channels(product(Products(), kind, 49, 768), 16) is None


@EACH_KIND
def test_what_is_not_finite_stays_so(native: NativeProducts, kind: str) -> None:
    for value, products in product_of((float("nan"), float("inf")), (native, Products())):
        x = random(3, 256, dtype=dtype_of(kind))
        x[1, 40] = value
        finite = product(products, kind, 20, 256)(x).isfinite()
        assert finite.all(1).tolist() == finite.any(1).tolist() == [True, False, True], (value, products)


def check_twin(ours: Product, twin: Product, inner: int, case: object) -> None:
    for rows, dtype in product_of(ROWS, DTYPES):
        x = activations(rows, inner, dtype)
        got = ours(x)
        assert got.dtype is dtype, case
        assert torch.equal(got, twin(x)), (case, rows, dtype)


@pytest.mark.parametrize("kind", INTEGERS)
def test_native_products_and_twins_give_the_same_bits(native: NativeProducts, kind: str) -> None:
    if kind == "int4" and not native.library.int4_is_exact():
        pytest.skip("this CPU multiplies int4 as bfloat16, which test_tiles.py holds to its own bits")
    for case in product_of(SHAPES[:-1], (True, False)):
        (channels, inner), biased = case
        pair = (product(by, kind, channels, inner, biased=biased) for by in (native, Products()))
        check_twin(*pair, inner, case)


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", FILE_BLOCKS)
def test_blocks_and_their_twins_give_the_same_bits(native: NativeProducts, kind: str) -> None:
    for form in (FILE_BLOCKS[kind].form, WIDE):
        weight = lay_out_blocks(blocks(kind, 33, 768).rows, form)
        pair = (of_blocks(by, weight, 33, random(33, seed=2)) for by in (native, Products()))
        check_twin(*pair, 768, form)


def test_levels_of_six_bits_give_the_bits_of_eight(native: NativeProducts) -> None:
    for kind, found in FILE_BLOCKS.items():
        if found.form.bits == 6:
            forms = [replace(found.form, bits=bits, span=1) for bits in (6, 8)]
            six, eight = (lay_out_blocks(blocks(kind, 33, 768).rows, form) for form in forms)
            assert 4 * six.levels.nbytes == 3 * eight.levels.nbytes, kind
            x = activations(13, 768)
            assert torch.equal(of_blocks(native, six, 33)(x), of_blocks(native, eight, 33)(x)), kind


@pytest.mark.parametrize(
    ("kind", "largest"),
    [("Q4_K", ([15, 15], [63, 63])), ("Q6_K", ([31, 224], [127, 128])), ("Q5_K", ([0, 31], [63, 63]))],
)
def test_the_largest_levels_of_either_sign_fit_their_sums(
    native: NativeProducts, kind: str, largest: tuple[list[int], list[int]]
) -> None:
    """With the largest steps and activations."""
    rows = blocks(kind, 33, 768).rows.clone()
    levels, steps = (torch.tensor(one, dtype=torch.uint8) for one in largest)
    rows[..., :GROUP] = levels.repeat_interleave(GROUP // 2)
    rows[..., GROUP + 2 : GROUP + 4] = steps
    x = torch.cat((activations(13, 768), torch.ones(3, 768), -torch.ones(2, 768)))
    weight = lay_out_blocks(rows, FILE_BLOCKS[kind].form)
    assert torch.equal(of_blocks(native, weight, 33)(x), of_blocks(Products(), weight, 33)(x))


def test_few_rows_of_a_loose_product_have_the_bits_of_the_twins(native: NativeProducts) -> None:
    """On every CPU, and many rows those of a product that is not loose."""
    by_loose = NativeProducts(native.library, ProductOptions(loose=True))
    loose, twin, steady = (product(by, "int4", 49, 576, biased=True) for by in (by_loose, Products(), native))
    for rows, dtype in product_of((1, 3, 8, 9, 40), DTYPES):
        x = activations(rows, 576, dtype)
        assert torch.equal(loose(x), (twin if rows < 9 else steady)(x)), (rows, dtype)


@pytest.mark.parametrize("kind", INTEGERS)
def test_one_large_activation_leaves_the_others_their_bits(native: NativeProducts, kind: str) -> None:
    """With one scale for the row there would be a thousand for 127, and nothing left of values near one."""
    run, small = product(native, kind, 64, 576), random(4, 576, seed=1)
    small[:, 100] = 0.0
    large = small.clone()
    large[:, 100] = 1000.0
    weight = run(torch.eye(576)).double()  # as it is multiplied: ones and zeros are quantized exactly
    noise = (run(large).double() - large.double() @ weight).norm() / (small.double() @ weight).norm()
    assert noise <= {"int8": 0.6, "int4": 0.3}[kind]


def test_turning_by_h_is_a_product_with_a_hadamard_matrix() -> None:
    h = rotate(torch.eye(GROUP))
    assert set(h.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(h @ h.T, GROUP * torch.eye(GROUP))
    x = torch.arange(2.0 * GROUP).view(2, GROUP)
    assert torch.equal(rotate(x), x @ h)


@pytest.mark.parametrize("kind", FILE_BLOCKS)
def test_a_weight_has_the_numbers_of_its_file(kind: str) -> None:
    """Rows of ones and zeros are quantized exactly, so that they find each number."""
    rows, floats = blocks(kind, 20, 512)
    for form in (FILE_BLOCKS[kind].form, WIDE):
        found = of_blocks(Products(), lay_out_blocks(rows, form), 20)(torch.eye(512)).T
        torch.testing.assert_close(found, floats, rtol=3e-7, atol=1e-6 * float(floats.abs().max()))


def test_rows_that_are_no_whole_spans(native: NativeProducts) -> None:
    for case in product_of(("Q8_0", "Q4_0", "Q5_1"), (32, 96, 352)):
        kind, inner = case
        x, floats = activations(5, inner), blocks(kind, 16, inner).floats
        found, twin = (product(by, kind, 16, inner)(x) for by in (native, Products()))
        want = x.double() @ floats.double().T
        assert torch.equal(found, twin), case
        assert (found.double() - want).norm() <= 0.02 * want.norm(), case


def test_sums_of_parts_of_blocks_are_added_by_the_tree(native: NativeProducts) -> None:
    """Also where parts divide a span."""
    for kind in ("Q4_K", "Q6_K"):
        rows, form = blocks(kind, 20, 768).rows, FILE_BLOCKS[kind].form
        x, sums = activations(9, 768), []
        for groups in (range(1), range(1, 10), range(10, 24)):
            part = torch.zeros_like(rows)
            part[..., GROUP:-1] = rows[..., GROUP:-1]  # all but levels and the steps of mins
            part[:, groups] = rows[:, groups]
            sums.append(of_blocks(Products(), lay_out_blocks(part, form), 20)(x))
        weight, parts = lay_out_blocks(rows, form), SumParts((32, 320, 768), (0, 3))
        ours = native.laid_out(weight, None, 768, 20, parts=parts)
        assert torch.equal(ours(x), (sums[0] + sums[1]) + sums[2]), kind
        assert not torch.equal(ours(x), of_blocks(native, weight, 20)(x)), kind


def test_chosen_rows_are_those_rows() -> None:
    rows, _ = blocks("Q5_K", 40, 256)
    form, ids = FILE_BLOCKS["Q5_K"].form, [32, 0, 19, 19, 7]
    some, want = empty_blocks(5, 256, form), lay_out_blocks(rows[ids], form)
    choose_rows(lay_out_blocks(rows, form), ids, some)
    x = activations(3, 256)
    assert torch.equal(of_blocks(Products(), some, 5)(x), of_blocks(Products(), want, 5)(x))


def test_laying_a_weight_out_does_not_keep_it(native: NativeProducts) -> None:
    for dtype in DTYPES:
        weight = random(64, 64, dtype=dtype)
        alive = weakref.ref(weight)
        run = native.floats(weight, None)
        del weight
        gc.collect()
        assert alive() is None, run


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_of_another_shape_is_refused(name: Literal["torch", "native"]) -> None:
    """The error has the given and the required sizes, for any product."""
    products, weight = kernels(name).products, random(16, 64)
    int8, int4 = quantize_int8(weight), quantize_int4(weight)
    short = int4._replace(scales=int4.scales[:, :1])
    for wrong, inner, fault in (
        (int8, 96, "inner size 64 for rows of 128|1024 bytes .* has 2048"),
        (int4, 96, "inner size 64 for rows of 96|512 bytes .* has 768"),
        (short, 64, "inner size 32 for rows of 64|512 bytes with 32 of sc"),
    ):
        with pytest.raises(ValueError, match=f"a weight of ({fault})"):
            products.laid_out(wrong, None, inner, 16)


def test_blocks_of_another_shape_are_refused(native: NativeProducts) -> None:
    weight = lay_out_blocks(blocks("Q4_K", 16, 512).rows, FILE_BLOCKS["Q4_K"].form)
    for field in weight._fields:
        short = weight._replace(**{field: torch.cat([getattr(weight, field)] * 2)})
        with pytest.raises(ValueError, match=f"a weight of|{field} must be contiguous"):
            of_blocks(native, short, 16)
    for form in (BlockForm(8, 8, steps=True, mins=False), BlockForm(6, 4, steps=True, mins=False)):
        with pytest.raises(ValueError, match="allowed: spans of 1, or of 8 with steps and 4 or 6 bits"):
            of_blocks(native, lay_out_blocks(blocks("Q6_K", 16, 512).rows, form), 16)
