from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from specinfer.kernels.bfloat16 import is_fastest
from specinfer.kernels.choice import TORCH
from specinfer.kernels.product import NativeProduct
from specinfer.models.linear import (
    BlockLinear,
    PackedLinear,
    PlainLinear,
    lone_row_differs,
    make_linear,
    packs,
)
from tests.kernels import kernels

CPU = torch.device("cpu")
INVARIANT = replace(TORCH, batch_invariant=True)
needs_packing = pytest.mark.skipif(
    not packs(torch.bfloat16, CPU), reason="this CPU has no bf16 products in oneDNN"
)


def random(*shape, dtype, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("rows", [0, 1, 2, 17, 64])
def test_product(dtype, bias, rows):
    weight, x = random(48, 80, dtype=dtype), random(rows, 80, dtype=dtype, seed=1)
    b = random(48, dtype=dtype, seed=2) if bias else None
    want = x.double() @ weight.double().T + (0 if b is None else b.double())
    got = make_linear(weight, b)(x)
    assert got.dtype is dtype
    assert got.shape == (rows, 48)
    torch.testing.assert_close(got.double(), want, atol=1e-2 if dtype is torch.bfloat16 else 1e-5, rtol=1e-2)


def test_float32_is_never_packed():
    assert isinstance(make_linear(random(8, 8, dtype=torch.float32)), PlainLinear)
    assert not packs(torch.float32, CPU)
    assert not packs(torch.bfloat16, torch.device("cuda"))


@needs_packing
def test_packing_does_not_keep_the_source():
    weight = random(64, 64, dtype=torch.bfloat16)
    alive = weakref.ref(weight)
    linear = make_linear(weight)
    assert isinstance(linear, PackedLinear)
    del weight
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("out", "inner"), [(96, 576), (64, 8960)])
def test_packed_rows_do_not_depend_on_the_rows_beside_them(out, inner, batch_invariant):
    """Bit for bit from two rows on; one row alone may differ, which is why runtime/batch runs it as two.

    Up to 32 rows, whatever is asked; for any number if it is asked.
    """
    if not packs(torch.bfloat16, CPU):
        pytest.skip("this CPU has no bf16 products in oneDNN")
    chosen = replace(TORCH, batch_invariant=batch_invariant)
    linear = make_linear(random(out, inner, dtype=torch.bfloat16), kernels=chosen)
    rows = 300 if batch_invariant else 32
    x = random(rows, inner, dtype=torch.bfloat16, seed=1)
    whole = linear(x)
    for step in (2, 3, 16, 33, 65, 257):
        parts = [linear(x[first : first + step]) for first in range(0, rows // step * step, step)]
        assert torch.equal(torch.cat([*parts, whole[rows // step * step :]]), whole), f"{step} rows at a time"


@pytest.mark.parametrize(("out", "inner"), [(96, 576), (64, 8960)])
def test_rows_of_any_product_can_be_made_independent(out, inner):
    linear = make_linear(random(out, inner, dtype=torch.float32), kernels=INVARIANT)
    assert isinstance(linear, BlockLinear)
    x = random(130, inner, dtype=torch.float32, seed=1)
    whole = linear(x)
    for step in (1, 2, 3, 5, 16, 17, 33, 64, 129):
        assert torch.equal(torch.cat([linear(part) for part in x.split(step)]), whole), (
            f"{step} rows at a time"
        )


@needs_packing
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 11, 64])
def test_rows_in_parts_are_no_other_rows(rows):
    weight, x = random(32, 64, dtype=torch.bfloat16), random(rows, 64, dtype=torch.bfloat16, seed=1)
    assert torch.equal(PackedLinear(weight, rows=5)(x), PackedLinear(weight)(x))


@needs_packing
def test_a_lone_row_is_another_product_where_weights_are_packed_and_nobody_says_it_may_be():
    assert lone_row_differs(torch.bfloat16, CPU, TORCH)
    assert lone_row_differs(torch.bfloat16, CPU, INVARIANT)
    assert not lone_row_differs(torch.bfloat16, CPU, replace(TORCH, batch_invariant=False))
    assert not lone_row_differs(torch.float32, CPU, TORCH)


@pytest.mark.skipif(
    not is_fastest(), reason="this CPU does not multiply pairs of bfloat16, or has AMX as well"
)
def test_our_own_product_is_taken_where_it_is_the_fastest():
    native = kernels("native")
    assert isinstance(make_linear(random(8, 8, dtype=torch.bfloat16), kernels=native), NativeProduct)
    assert isinstance(make_linear(random(8, 8, dtype=torch.float32), kernels=native), PlainLinear)
    assert not lone_row_differs(torch.bfloat16, CPU, native)
