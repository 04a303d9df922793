"""The native norms and activations against their twins, over sizes that fill vectors and do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specinfer.kernels.ops import Ops
from tests.kernels import kernels

TWIN = Ops()
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # of a value; bfloat16 twins round twice
SIZES = [1, 8, 15, 16, 40, 576, 1536, 4100]

pytestmark = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(scope="module")
def native() -> Ops:
    return kernels("native").ops


def random(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def assert_near(got: Tensor, want: Tensor) -> None:
    assert got.dtype is want.dtype
    torch.testing.assert_close(got, want, rtol=TOLERANCE[got.dtype], atol=TOLERANCE[got.dtype])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 5, 130])
def test_rms_norm(native: Ops, dtype: torch.dtype, rows: int, size: int) -> None:
    x, weight = random(rows, size, dtype, 0), random(1, size, dtype, 1)[0]
    before = x.clone()
    assert_near(native.add_rms_norm(x, None, weight, 1e-5), TWIN.add_rms_norm(x, None, weight, 1e-5))
    assert torch.equal(x, before)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_rms_norm_behind_a_sum(native: Ops, dtype: torch.dtype, rows: int, size: int) -> None:
    x, y, weight = random(rows, size, dtype, 0), random(rows, size, dtype, 1), random(1, size, dtype, 2)[0]
    added = x.clone()
    want = TWIN.add_rms_norm(added, y, weight, 1e-5)
    assert_near(native.add_rms_norm(x, y, weight, 1e-5), want)
    assert torch.equal(x, added)
    assert not torch.equal(x, random(rows, size, dtype, 0))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 5, 130])
@pytest.mark.parametrize("act", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations(native: Ops, dtype: torch.dtype, act: str, rows: int, size: int) -> None:
    gate_up = random(rows, 2 * size, dtype, 3)
    assert_near(getattr(native, act)(gate_up), getattr(TWIN, act)(gate_up))


@pytest.mark.parametrize("act", ["silu_mul", "gelu_tanh_mul"])
def test_far_gates_are_zero_or_themselves(native: Ops, dtype: torch.dtype, act: str) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, -60.0, 60.0, 200.0, 1e4] + [1.0] * 6], dtype=dtype)
    want = torch.tensor([[0.0, 0.0, 0.0, 60.0, 200.0, 1e4]], dtype=dtype)
    torch.testing.assert_close(getattr(native, act)(gate_up), want, rtol=0, atol=1e-20)


def test_what_is_not_a_number_stays_so(native: Ops, dtype: torch.dtype) -> None:
    x = torch.full((1, 20), float("nan"), dtype=dtype)
    assert native.add_rms_norm(x, None, torch.ones(20, dtype=dtype), 1e-5).isnan().all()
    assert native.silu_mul(x).isnan().all()


def test_a_row_does_not_depend_on_the_rows_beside_it(native: Ops, dtype: torch.dtype) -> None:
    x, weight = random(130, 1000, dtype, 0), random(1, 1000, dtype, 2)[0]
    normed, gated = native.add_rms_norm(x, None, weight, 1e-5), native.silu_mul(x)
    for row in (0, 64, 129):
        alone = x[row : row + 1]
        assert torch.equal(native.add_rms_norm(alone, None, weight, 1e-5)[0], normed[row])
        assert torch.equal(native.silu_mul(alone)[0], gated[row])


def test_other_shapes_and_dtypes_are_refused(native: Ops, dtype: torch.dtype) -> None:
    x = random(2, 16, dtype, 0)
    with pytest.raises(ValueError, match=r"weight must be \[16\] of x's dtype"):
        native.add_rms_norm(x, None, random(1, 8, dtype, 1)[0], 1e-5)
    with pytest.raises(ValueError, match="y must be as x is"):
        native.add_rms_norm(x, random(1, 16, dtype, 1), random(1, 16, dtype, 1)[0], 1e-5)
    with pytest.raises(ValueError, match="contiguous rows of even size"):
        native.silu_mul(x[:, :15])
    with pytest.raises(TypeError, match="bfloat16 or float32"):
        native.silu_mul(x.double())


def test_chosen_rows_are_normed_alone_and_nothing_is_added_in_place(native: Ops, dtype: torch.dtype) -> None:
    x, y, weight = random(9, 40, dtype, 0), random(9, 40, dtype, 1), random(1, 40, dtype, 2)[0]
    before = x.clone()
    for ops in (native, TWIN):
        whole = ops.add_rms_norm(x.clone(), y, weight, 1e-5)
        assert torch.equal(ops.rms_norm_of_sum(x, y, weight, 1e-5), whole)
        for rows in ([7, 2], [2, 2, 8], []):
            some = ops.rms_norm_of_sum(x, y, weight, 1e-5, torch.tensor(rows, dtype=torch.int64))
            assert torch.equal(some, whole[rows])
        assert torch.equal(
            ops.rms_norm_of_sum(x, None, weight, 1e-5), ops.add_rms_norm(x, None, weight, 1e-5)
        )
        assert torch.equal(x, before)


@pytest.mark.parametrize("scale", [1.0, 25.25])
@pytest.mark.parametrize("size", SIZES)
def test_embeddings(native: Ops, dtype: torch.dtype, size: int, scale: float) -> None:
    table, ids = random(50, size, dtype, 0), torch.tensor([3, 0, 49, 3])
    assert_near(native.embed(ids, table, scale), TWIN.embed(ids, table, scale))
    assert native.embed(ids[:0], table, scale).shape == (0, size)
    with pytest.raises(IndexError, match=r"token ids must be 0 \.\. 49"):
        native.embed(torch.tensor([50]), table, scale)
