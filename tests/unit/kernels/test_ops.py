"""The native norms and activations against their twins, over sizes that fill vectors and do not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from specinfer.kernels.ops import NormParts, Ops
from specinfer.kernels.structures import ACTIVATIONS
from tests.kernels import kernels

TWIN = Ops()
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # relative; bfloat16 references round twice
NORMS = ("rms", "layer", "layer with bias")
SIZES = [1, 8, 15, 16, 40, 576, 1536, 4100]
ROWS = [0, 1, 5, 130]

pytestmark = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(scope="module")
def native() -> Ops:
    return kernels("native").ops


def random(rows: int, columns: int, dtype: torch.dtype, seed: int) -> Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


def assert_near(got: Tensor, want: Tensor, case: object, times: int = 1) -> None:
    """Compare within the tolerance, or `times` it for values near zero."""
    assert got.dtype is want.dtype, case
    rtol = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, rtol=rtol, atol=times * rtol, msg=lambda said: f"{case}: {said}")


def norm_of(kind: str, size: int, dtype: torch.dtype) -> NormParts:
    """A norm of rows of that size: "rms", "layer", or "layer with bias"."""
    weight, bias = random(2, size, dtype, 1)
    return NormParts(weight, 1e-5, kind != "rms", bias if "bias" in kind else None)


def test_norms_alone_and_behind_a_sum(native: Ops, dtype: torch.dtype) -> None:
    for case in product(NORMS, ROWS, SIZES):
        kind, rows, size = case
        x, y, norm = random(rows, size, dtype, 0), random(rows, size, dtype, 1), norm_of(kind, size, dtype)
        before, added = x.clone(), x.clone()
        assert_near(native.add_norm(x, None, norm), TWIN.add_norm(x, None, norm), case)
        assert torch.equal(x, before), case
        want = TWIN.add_norm(added, y, norm)
        assert_near(native.add_norm(x, y, norm), want, case)
        assert torch.equal(x, added), case
        assert torch.equal(x, before) == (rows == 0), case


def test_a_layer_norm_is_right_far_from_zero(native: Ops, dtype: torch.dtype) -> None:
    x = (torch.randn(3, 1000, generator=torch.Generator().manual_seed(5)) + 64).to(dtype)
    norm = norm_of("layer with bias", 1000, dtype)
    y = x.double() - x.double().mean(1, keepdim=True)
    want = y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm.weight_D.double()
    near, got = 2e-4 if dtype is torch.float32 else 2**-6, native.add_norm(x, None, norm).double()
    torch.testing.assert_close(got, want + norm.bias_D.double(), rtol=near, atol=near)


def test_activations(native: Ops, dtype: torch.dtype) -> None:
    for case in product(ACTIVATIONS, ROWS, SIZES):
        act, rows, size = case
        gate_up = random(rows, 2 * size, dtype, 3)
        times = 8 if act == "gelu" else 1  # PyTorch's loses digits where 1 + erf is small
        assert_near(native.gate(gate_up, act), TWIN.gate(gate_up, act), case, times)
        assert_near(native.activate(gate_up, act), TWIN.activate(gate_up, act), case, times)


def test_streams_and_gates_that_are_cut_off(native: Ops, dtype: torch.dtype) -> None:
    for rows, size in product(ROWS, SIZES):
        x, routed = random(rows * 3, size, dtype, 3).view(rows, 3, size), random(rows, 3, torch.float32, 4)
        nine, three = random(9, 3, torch.float32, 5), random(3, 3, torch.float32, 6)
        (got, active), (want, of_twin) = (ops.predict_streams(x, routed, nine, 1) for ops in (native, TWIN))
        assert_near(got, want, (rows, size), 8)
        assert_near(active, of_twin, (rows, size))
        one, other = got.clone(), got.clone()
        native.correct_streams(one, routed, three, active, x[:, 0].contiguous())
        TWIN.correct_streams(other, routed, three, active, x[:, 0].contiguous())
        assert_near(one, other, (rows, size), 8)
        wide = [random(rows, 2 * size, dtype, 7) for _ in range(2)]
        for ops, gates in zip((native, TWIN), wide, strict=True):
            ops.cut_off(gates[:, :size], 0.4)
        assert_near(*wide, (rows, size))
        assert torch.equal(wide[0][:, size:], random(rows, 2 * size, dtype, 7)[:, size:])


def test_far_gates_are_zero_or_themselves(native: Ops, dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[-1e4, -200.0, -60.0, 60.0, 200.0, 1e4] + [1.0] * 6], dtype=dtype)
    want = torch.tensor([[0.0, 0.0, 0.0, 60.0, 200.0, 1e4]], dtype=dtype)
    for act in ACTIVATIONS:
        if act not in ("clamped_swish", "relu2"):
            for got in (native.gate(gate_up, act), native.activate(gate_up[:, :6].contiguous(), act)):
                assert (got.double() - want.double()).abs().max() <= 1e-20, act


def test_gelu_is_right_to_its_tails(native: Ops, dtype: torch.dtype) -> None:
    x = torch.linspace(-12, 12, 4801).view(1, -1).to(dtype)
    want = x.double() * torch.special.erfc(-x.double() / 2**0.5) / 2
    got = native.activate(x, "gelu").double()
    torch.testing.assert_close(got, want, rtol=1e-5 if dtype is torch.float32 else 2**-7, atol=0)


def test_what_is_not_a_number_stays_so(native: Ops, dtype: torch.dtype) -> None:
    x = torch.full((1, 20), float("nan"), dtype=dtype)
    for kind in NORMS:
        assert native.add_norm(x, None, norm_of(kind, 20, dtype)).isnan().all()
    for act in ACTIVATIONS:
        assert native.gate(x, act).isnan().all()
        assert native.activate(x, act).isnan().all()


def test_a_row_does_not_depend_on_the_rows_beside_it(native: Ops, dtype: torch.dtype) -> None:
    x, norms = random(130, 1000, dtype, 0), [norm_of(kind, 1000, dtype) for kind in NORMS]
    for ops in (native, TWIN):
        computed = [
            *(partial(ops.add_norm, y_TD=None, norm=norm) for norm in norms),
            *(partial(act, activation=name) for act in (ops.gate, ops.activate) for name in ACTIVATIONS),
        ]
        for compute in computed:
            whole = compute(x)
            for row in (0, 64, 129):
                assert torch.equal(compute(x[row : row + 1])[0], whole[row])


def test_other_shapes_and_dtypes_are_refused(native: Ops, dtype: torch.dtype) -> None:
    x, norm = random(2, 16, dtype, 0), norm_of("rms", 16, dtype)
    with pytest.raises(ValueError, match=r"weight must be contiguous \S+ \[16\] on the CPU, got"):
        native.add_norm(x, None, norm_of("rms", 8, dtype))
    with pytest.raises(ValueError, match=r"bias must be contiguous \S+ \[16\]"):
        native.add_norm(x, None, replace(norm, centred=True, bias_D=random(1, 8, dtype, 1)[0]))
    with pytest.raises(ValueError, match=r"y must be contiguous \S+ \[2, 16\]"):
        native.add_norm(x, random(1, 16, dtype, 1), norm)
    with pytest.raises(ValueError, match="contiguous rows of even size"):
        native.gate(x[:, :15], "silu")
    with pytest.raises(TypeError, match="bfloat16 or float32"):
        native.gate(x.double(), "silu")


def test_chosen_rows_are_normed_alone_and_nothing_is_added_in_place(native: Ops, dtype: torch.dtype) -> None:
    x, y = random(9, 40, dtype, 0), random(9, 40, dtype, 1)
    before = x.clone()
    for ops, kind in product((native, TWIN), NORMS):
        norm = norm_of(kind, 40, dtype)
        whole = ops.add_norm(x.clone(), y, norm)
        assert torch.equal(ops.norm_of_sum(x, y, norm), whole)
        for rows in ([7, 2], [2, 2, 8], []):
            some = ops.norm_of_sum(x, y, norm, torch.tensor(rows, dtype=torch.int64))
            assert torch.equal(some, whole[rows])
        assert torch.equal(ops.norm_of_sum(x, None, norm), ops.add_norm(x, None, norm))
        assert torch.equal(x, before)


def test_embeddings(native: Ops, dtype: torch.dtype) -> None:
    for size, scale in product(SIZES, (1.0, 25.25)):
        table, ids = random(50, size, dtype, 0), torch.tensor([3, 0, 49, 3])
        assert_near(native.embed(ids, table, scale), TWIN.embed(ids, table, scale), (size, scale))
        assert native.embed(ids[:0], table, scale).shape == (0, size)
        with pytest.raises(IndexError, match=r"token ids must be 0 \.\. 49"):
            native.embed(torch.tensor([50]), table, scale)
