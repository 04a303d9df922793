"""Float products: near the real ones, a row for itself, and no copy of a weight too many."""

from __future__ import annotations

import gc
import weakref
from itertools import product as product_of

import pytest
import torch
from torch import Tensor

from specinfer.kernels.product import NativeProduct
from specinfer.kernels.quantized import NativeProducts
from tests.kernels import kernels

SHAPES = [(16, 4), (48, 80), (17, 6), (1, 1), (100, 1536), (33, 8960), (20, 33)]  # channels, inner
ROWS = [0, 1, 2, 7, 12, 13, 16, 17, 24, 25, 32, 33, 70]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(weight: Tensor, bias: Tensor | None = None) -> NativeProduct:
    library = kernels("native").library
    assert library is not None
    return NativeProducts(library).floats(weight, bias)


@DTYPES
def test_products_are_near_the_real_ones_and_know_no_other_row(dtype: torch.dtype) -> None:
    for (channels, inner), with_bias in product_of(SHAPES, (True, False)):
        weight = random(channels, inner, seed=0, dtype=dtype)
        bias = random(channels, seed=1, dtype=dtype) if with_bias else None
        run, x = product(weight, bias), random(130, inner, seed=2, dtype=dtype)
        whole, near = run(x), TOLERANCE[dtype] * inner**0.5
        want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        case = f"{channels} x {inner}, bias {with_bias}"
        torch.testing.assert_close(
            *(whole.double(), want), rtol=TOLERANCE[dtype], atol=near, msg=lambda said, case=case: case + said
        )
        for rows in ROWS:
            assert torch.equal(run(x[:rows]), whole[:rows]), f"{case}, {rows} rows"
        assert torch.equal(torch.cat([run(row) for row in x.split(1)]), whole), case


def test_512_rows_are_what_each_is_alone() -> None:
    run = product(random(40, 96, seed=0, dtype=torch.bfloat16))
    x = random(512, 96, seed=2, dtype=torch.bfloat16)
    assert torch.equal(run(x), torch.cat([run(part) for part in x.split(37)]))


@DTYPES
def test_what_is_not_finite_stays_so(dtype: torch.dtype) -> None:
    for value in (float("nan"), float("inf")):
        x = random(3, 64, seed=0, dtype=dtype)
        x[1, 40] = value
        finite = product(random(20, 64, seed=1, dtype=dtype))(x).isfinite()
        assert finite.all(1).tolist() == finite.any(1).tolist() == [True, False, True], value


def test_twins_are_near_the_real_ones_and_know_no_other_row() -> None:
    for dtype, inner in ((torch.float32, 80), (torch.bfloat16, 80), (torch.bfloat16, 8960)):
        weight, bias = random(48, inner, seed=0, dtype=dtype), random(48, seed=1, dtype=dtype)
        run, x = kernels("torch").products.floats(weight, bias), random(130, inner, seed=2, dtype=dtype)
        whole, near = run(x), TOLERANCE[dtype] * inner**0.5
        want = x.double() @ weight.double().T + bias.double()
        torch.testing.assert_close(whole.double(), want, rtol=TOLERANCE[dtype], atol=near)
        for rows in ROWS:
            got = run(x[:rows])
            assert torch.equal(got, whole[:rows]), (dtype, inner, rows)
            assert (got.dtype, got.shape) == (dtype, (rows, 48))


@DTYPES
def test_laying_a_weight_out_does_not_keep_it(dtype: torch.dtype) -> None:
    weight = random(64, 64, seed=0, dtype=dtype)
    alive = weakref.ref(weight)
    run = product(weight)
    del weight
    gc.collect()
    assert alive() is None, run
