from __future__ import annotations

import gc
import weakref

import pytest
import torch

from specinfer.kernels.product import NativeProduct
from tests.kernels import NAMES, kernels

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
KERNELS = pytest.mark.parametrize("name", NAMES)


def random(*shape, dtype, seed=0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1).to(dtype)


@pytest.mark.few(12)
@KERNELS
@DTYPES
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("rows", [0, 1, 2, 17, 64])
def test_product(name, dtype, bias, rows):
    weight, x = random(48, 80, dtype=dtype), random(rows, 80, dtype=dtype, seed=1)
    b = random(48, dtype=dtype, seed=2) if bias else None
    want = x.double() @ weight.double().T + (0 if b is None else b.double())
    got = kernels(name).products.floats(weight, b)(x)
    assert got.dtype is dtype
    assert got.shape == (rows, 48)
    torch.testing.assert_close(got.double(), want, atol=1e-2 if dtype is torch.bfloat16 else 1e-5, rtol=1e-2)


@DTYPES
def test_laying_a_weight_out_does_not_keep_it(dtype):
    weight = random(64, 64, dtype=dtype)
    alive = weakref.ref(weight)
    linear = kernels("native").products.floats(weight, None)
    assert isinstance(linear, NativeProduct)
    del weight
    gc.collect()
    assert alive() is None


@pytest.mark.few(4)
@KERNELS
@DTYPES
@pytest.mark.parametrize(("out", "inner"), [(96, 576), (64, 8960)])
def test_rows_do_not_depend_on_the_rows_beside_them(name, dtype, out, inner):
    linear = kernels(name).products.floats(random(out, inner, dtype=dtype), None)
    x = random(130, inner, dtype=dtype, seed=1)
    whole = linear(x)
    for step in (1, 2, 3, 5, 16, 17, 32, 33, 64, 129):
        parts = torch.cat([linear(part) for part in x.split(step)])
        assert torch.equal(parts, whole), f"{step} rows at a time"
