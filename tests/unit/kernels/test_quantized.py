"""Quantized products: near the real ones, a row for itself, and where sums are exact the twins' bits."""

from __future__ import annotations

from itertools import product as product_of
from typing import Literal

import pytest
import torch
from torch import Tensor

from specinfer.kernels.layout import GROUP, quantize_int4, quantize_int8, rotate
from specinfer.kernels.product import NativeProduct, ProductOptions
from specinfer.kernels.quantized import NativeProducts, Product, Products
from tests.kernels import NAMES, kernels

SHAPES = [(1, 1), (16, 32), (33, 33), (48, 80), (49, 576), (40, 1100)]  # channels, inner
ROWS = [0, 1, 2, 3, 5, 8, 9, 10, 11, 17, 33, 40, 70]
NOISE = {"int8": 0.02, "int4": 0.1}  # relative to the norm of all outputs, for random weights
DTYPES = (torch.float32, torch.bfloat16)
KINDS = pytest.mark.parametrize("kind", NOISE)


@pytest.fixture(scope="module")
def native() -> Products:
    return kernels("native").products


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def activations(rows: int, inner: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different sizes, with a large value in the first and nothing in the second."""
    x = random(rows, inner, seed=1) * torch.logspace(-3, 3, max(rows, 1))[:rows, None]
    x[:1, inner // 2] *= 100
    x[1:2] = 0
    return x.to(dtype)


def product(products: Products, kind: str, weight: Tensor, bias: Tensor | None = None) -> Product:
    channels, inner = weight.shape
    if kind == "int8":
        return products.laid_out(quantize_int8(weight), bias, inner, channels)
    return products.laid_out(quantize_int4(weight), bias, inner, channels)


@KINDS
def test_native_products_and_twins_give_the_same_bits(native: Products, kind: str) -> None:
    library = kernels("native").library
    if kind == "int4" and library is not None and not library.int4_is_exact():
        pytest.skip("this CPU multiplies int4 as bfloat16, which test_tiles.py holds to its own bits")
    for (channels, inner), biased in product_of(SHAPES, (True, False)):
        weight, bias = random(channels, inner), random(channels, seed=2) if biased else None
        ours, twin = product(native, kind, weight, bias), product(Products(), kind, weight, bias)
        for rows, dtype in product_of(ROWS, DTYPES):
            x = activations(rows, inner, dtype)
            got, case = ours(x), (channels, inner, biased, rows, dtype)
            assert got.dtype is dtype, case
            assert torch.equal(got, twin(x)), case


def test_few_rows_of_a_loose_product_have_the_bits_of_the_twins() -> None:
    """On every CPU, and many rows those of a product that is not loose."""
    library = kernels("native").library
    assert library is not None
    weight, bias = random(49, 576), random(49, seed=2)
    loose = product(NativeProducts(library, ProductOptions(loose=True)), "int4", weight, bias)
    twin, steady = (product(p, "int4", weight, bias) for p in (Products(), NativeProducts(library)))
    for rows, dtype in product_of((1, 3, 8, 9, 40), DTYPES):
        x = activations(rows, 576, dtype)
        assert torch.equal(loose(x), (twin if rows < 9 else steady)(x)), (rows, dtype)


@pytest.mark.parametrize("kind", [*NOISE, "bfloat16", "float32"])
def test_weights_that_are_read_past_the_caches_are_the_same_weights(native: Products, kind: str) -> None:
    assert isinstance(native, NativeProducts)
    weight, past = random(49, 576), native.but(nontemporal=True)
    if kind in NOISE:
        usual, other = product(native, kind, weight), product(past, kind, weight)
    else:
        floats = weight.to(getattr(torch, kind))
        usual, other = native.floats(floats, None), past.floats(floats, None)
    assert isinstance(usual, NativeProduct)
    assert isinstance(other, NativeProduct)
    assert (usual.args.nontemporal, other.args.nontemporal) == (0, 1)
    for rows in ROWS[1:]:
        x = activations(rows, 576, torch.bfloat16 if kind == "bfloat16" else torch.float32)
        assert torch.equal(other(x), usual(x)), f"{rows} rows"


@KINDS
def test_a_row_does_not_depend_on_the_rows_beside_it(native: Products, kind: str) -> None:
    for inner, step in product_of((80, 576), (1, 2, 7, 16)):
        run, x = product(native, kind, random(40, inner)), activations(33, inner)
        assert torch.equal(torch.cat([run(part) for part in x.split(step)]), run(x)), (inner, step)


@KINDS
def test_products_are_near_the_real_ones(native: Products, kind: str) -> None:
    for channels, inner in SHAPES:
        weight, bias, x = random(channels, inner), random(channels, seed=2), random(9, inner, seed=3)
        want = x.double() @ weight.double().T + bias.double()
        got = product(native, kind, weight, bias)(x).double()
        assert (got - want).norm() <= NOISE[kind] * want.norm(), (channels, inner)


@KINDS
def test_one_large_activation_leaves_the_others_their_bits(native: Products, kind: str) -> None:
    """With one scale for the row there would be a thousand for 127, and nothing left of values near one."""
    run, small = product(native, kind, random(64, 576)), random(4, 576, seed=1)
    small[:, 100] = 0.0
    large = small.clone()
    large[:, 100] = 1000.0
    weight = run(torch.eye(576)).double()  # as it is multiplied: ones and zeros are quantized exactly
    noise = (run(large).double() - large.double() @ weight).norm() / (small.double() @ weight).norm()
    assert noise <= {"int8": 0.6, "int4": 0.3}[kind]


@KINDS
def test_what_is_not_finite_stays_so(native: Products, kind: str) -> None:
    for value, products in product_of((float("nan"), float("inf")), (native, Products())):
        x = random(3, 96)
        x[1, 40] = value
        finite = product(products, kind, random(20, 96, seed=1))(x).isfinite()
        assert finite.all(1).tolist() == finite.any(1).tolist() == [True, False, True], value


def test_turning_by_h_is_a_product_with_a_hadamard_matrix() -> None:
    h = rotate(torch.eye(GROUP))
    assert set(h.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(h @ h.T, GROUP * torch.eye(GROUP))
    x = torch.arange(2.0 * GROUP).view(2, GROUP)
    assert torch.equal(rotate(x), x @ h)


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
