from __future__ import annotations

import gc
import weakref

import pytest
import torch

from specinfer.models.linear import PackedLinear, PlainLinear, make_linear, packs

CPU = torch.device("cpu")
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


@needs_packing
@pytest.mark.parametrize(("out", "inner"), [(96, 576), (64, 8960)])
def test_a_row_does_not_depend_on_the_rows_beside_it(out, inner):
    """Bit for bit from two rows on; one row alone may differ, which is why runtime/batch runs it twice."""
    linear = make_linear(random(out, inner, dtype=torch.bfloat16))
    x = random(64, inner, dtype=torch.bfloat16, seed=1)
    whole = linear(x)
    for step in (2, 3, 16, 33):
        parts = [linear(x[first : first + step]) for first in range(0, 64 // step * step, step)]
        assert torch.equal(torch.cat(parts), whole[: 64 // step * step]), f"{step} rows at a time"
