"""Products of GGUF blocks: the file's numbers, the twins' bits, and a row for itself."""

from __future__ import annotations

from itertools import product as product_of

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Kind
from torch import Tensor

from specinfer.kernels.file_blocks import BlockForm, empty_blocks, lay_out_blocks
from specinfer.kernels.layout import GROUP, BlocksWeight, choose_rows
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import NativeProduct
from specinfer.kernels.quantized import NativeProducts, Product, Products
from specinfer.models.gguf_blocks import FILE_BLOCKS
from tests.gguf_blocks import random_blocks
from tests.kernels import kernels

KINDS = pytest.mark.parametrize("kind", FILE_BLOCKS)
ROWS = [0, 1, 2, 3, 5, 8, 9, 17, 40]
WIDE = BlockForm(8, 1, steps=True, mins=True)  # which has room for all kinds


@pytest.fixture(scope="module")
def native() -> NativeProducts:
    products = kernels("native").products
    assert isinstance(products, NativeProducts)
    return products


def matrix(kind: str, channels: int, inner: int) -> tuple[Tensor, Tensor]:
    """Rows of random blocks, and the floats that the gguf package makes of them."""
    octets = random_blocks(kind, channels, inner)
    floats = torch.from_numpy(gguf.quants.dequantize(octets, Kind[kind]))
    size = gguf.GGML_QUANT_SIZES[Kind[kind]][1]
    return FILE_BLOCKS[kind].rows(torch.from_numpy(octets).view(channels, -1, size)), floats


def activations(rows: int, inner: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(1))
    x *= torch.logspace(-3, 3, max(rows, 1))[:rows, None]
    x[:1, inner // 2] *= 100
    x[1:2] = 0
    return x.to(dtype)


def product(products: Products, weight: BlocksWeight, channels: int, bias: Tensor | None = None) -> Product:
    return products.laid_out(weight, bias, weight.groups * GROUP, channels)


@KINDS
def test_a_weight_has_the_numbers_of_its_file(kind: str) -> None:
    """Rows of ones and zeros are quantized exactly, so that they find each number."""
    rows, floats = matrix(kind, 20, 512)
    for form in (FILE_BLOCKS[kind].form, WIDE):
        found = product(Products(), lay_out_blocks(rows, form), 20)(torch.eye(512)).T
        torch.testing.assert_close(found, floats, rtol=3e-7, atol=1e-6 * float(floats.abs().max()))


@pytest.mark.few(6)
@KINDS
def test_native_products_and_twins_give_the_same_bits(native: NativeProducts, kind: str) -> None:
    bias = torch.randn(33, generator=torch.Generator().manual_seed(2))
    for form in (FILE_BLOCKS[kind].form, WIDE):
        weight = lay_out_blocks(matrix(kind, 33, 768)[0], form)
        ours, twin = product(native, weight, 33, bias), product(Products(), weight, 33, bias)
        for rows, dtype in product_of(ROWS, (torch.float32, torch.bfloat16)):
            x = activations(rows, 768, dtype)
            assert torch.equal(ours(x), twin(x)), (form, rows, dtype)


def test_rows_that_are_no_whole_spans(native: NativeProducts) -> None:
    for case in product_of(("Q8_0", "Q4_0", "Q5_1"), (32, 96, 352)):
        kind, inner = case
        rows, floats = matrix(kind, 16, inner)
        weight, x = lay_out_blocks(rows, FILE_BLOCKS[kind].form), activations(5, inner)
        found, want = product(native, weight, 16)(x), x.double() @ floats.double().T
        assert torch.equal(found, product(Products(), weight, 16)(x)), case
        assert (found.double() - want).norm() <= 0.02 * want.norm(), case


@KINDS
def test_a_row_does_not_depend_on_the_rows_beside_it(native: NativeProducts, kind: str) -> None:
    weight = lay_out_blocks(matrix(kind, 40, 512)[0], FILE_BLOCKS[kind].form)
    x = activations(33, 512)
    run, past = (product(products, weight, 40) for products in (native, native.but(nontemporal=True)))
    assert isinstance(run, NativeProduct)
    whole = run(x)
    assert torch.equal(past(x), whole)
    for step in (1, 2, 7, 16):
        assert torch.equal(torch.cat([run(part) for part in x.split(step)]), whole), f"{step} rows at a time"


def test_sums_of_parts_are_those_of_the_twin(native: NativeProducts) -> None:
    for kind in ("Q4_K", "Q6_K"):
        weight = lay_out_blocks(matrix(kind, 20, 512)[0], FILE_BLOCKS[kind].form)
        parts, x = SumParts((128, 256, 512), (0, 3)), activations(9, 512)
        ours, twin = (by.laid_out(weight, None, 512, 20, parts=parts) for by in (native, Products()))
        assert torch.equal(ours(x), twin(x)), kind
        assert not torch.equal(ours(x), product(native, weight, 20)(x)), kind


@KINDS
def test_what_is_not_finite_stays_so(native: NativeProducts, kind: str) -> None:
    weight = lay_out_blocks(matrix(kind, 20, 256)[0], FILE_BLOCKS[kind].form)
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    x[1, 40] = float("nan")
    for products in (native, Products()):
        finite = product(products, weight, 20)(x).isfinite()
        assert finite[[0, 2]].all()
        assert not finite[1].any()


def test_chosen_rows_are_those_rows() -> None:
    rows, _ = matrix("Q5_K", 40, 256)
    form, ids = FILE_BLOCKS["Q5_K"].form, [32, 0, 19, 19, 7]
    some, want = empty_blocks(5, 256, form), lay_out_blocks(rows[ids], form)
    choose_rows(lay_out_blocks(rows, form), ids, some)
    x = activations(3, 256)
    assert torch.equal(product(Products(), some, 5)(x), product(Products(), want, 5)(x))


@pytest.mark.parametrize("field", ["levels", "scales", "steps", "mins", "min_steps"])
def test_a_weight_of_another_shape_is_refused(native: NativeProducts, field: str) -> None:
    weight = lay_out_blocks(matrix("Q4_K", 16, 512)[0], FILE_BLOCKS["Q4_K"].form)
    short = weight._replace(**{field: torch.cat([getattr(weight, field)] * 2)})
    with pytest.raises(ValueError, match=f"a weight of|{field} must be contiguous"):
        product(native, short, 16)
