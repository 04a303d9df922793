"""Low-rank additions to products: sums rounded once, independent of other rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specinfer.kernels.choice import Kernels
from specinfer.kernels.low_rank import (
    AdaptedRows,
    Adapter,
    Int8Rows,
    LowRank,
    LowRankPart,
    Matrix,
    Span,
    matrix_bytes,
    part_bytes,
)
from specinfer.kernels.product import Product
from tests.kernels import NAMES, kernels
from tests.unit.kernels.test_products import product as product_of
from tests.unit.kernels.test_products import random

CHANNELS = (40, 8, 23)  # channels of the stacked matrices
INNER = 70
SIZE = sum(CHANNELS)
EVERY = pytest.mark.parametrize("name", NAMES)
KINDS = pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "int4"])


def low_rank(seed: int, ranks: Sequence[int], dtype: torch.dtype) -> LowRank:
    """Rank by matrix of the product; 0: no addition."""
    parts, first, offset = [], 0, 0
    for n, (channels, rank) in enumerate(zip(CHANNELS, ranks, strict=True)):
        if rank:
            up = random(channels, rank, seed=seed + n).to(dtype)
            own = range(offset, offset + rank)
            parts.append(LowRankPart(range(first, first + channels), own, up, 0.3 + n))
        first, offset = first + channels, offset + rank
    return LowRank(random(offset, INNER, seed=seed + 9).to(dtype), parts)


def bytes_of(product: LowRank) -> int:
    """The bytes of its matrices in the library's layout."""
    weights = product.down.dtype if isinstance(product.down, torch.Tensor) else torch.int8
    ups = sum(part_bytes(part.channels, len(part.ranks), weights) for part in product.parts)
    return matrix_bytes(product.parts[-1].ranks.stop, INNER, weights) + ups


def adapter_of(chosen: Kernels, *products: LowRank | None) -> Adapter:
    size = sum(bytes_of(product) for product in products if product is not None)
    return Adapter.of(products, size, chosen.library)


def adapters(chosen: Kernels, weights: torch.dtype) -> list[Adapter]:
    """Adapters of two products: all matrices, some, and only the second product."""
    dtype = torch.float32 if weights is torch.int8 else weights
    of = (
        [low_rank(10, (4, 16, 17), dtype), None],
        [low_rank(30, (0, 40, 1), dtype), low_rank(40, (1, 1, 1), dtype)],
        [None, low_rank(50, (2, 0, 0), dtype)],
    )
    if weights is torch.int8:
        of = tuple([None if low is None else low.to_int8() for low in products] for products in of)
    return [adapter_of(chosen, *products) for products in of]


def float64(matrix: Matrix) -> Tensor:
    if isinstance(matrix, Tensor):
        return matrix.double()
    return matrix.values.double() * matrix.scales[:, None].double()


def added(low: LowRank | None, x: Tensor) -> Tensor:
    """Return an adapter's addition in float64."""
    found = torch.zeros(len(x), SIZE, dtype=torch.float64)
    for part in () if low is None else low.parts:
        down = float64(low.down)[part.ranks.start : part.ranks.stop]
        sums = x.double() @ down.T @ float64(part.up).T
        found[:, part.channels.start : part.channels.stop] += part.scale * sums
    return found


def run(chosen: Kernels, product: Product, x: Tensor, spans: Sequence[Span], number: int = 0) -> Tensor:
    rows = AdaptedRows.of(spans, len(x), chosen.library)
    return product(x) if rows is None else rows.multiply(product, number, x)


@EVERY
@KINDS
@pytest.mark.parametrize("rounded", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_row_has_what_its_adapter_adds(name: str, kind: str, dtype: torch.dtype, rounded: bool) -> None:
    if kind in ("float32", "bfloat16") and kind not in str(dtype):
        pytest.skip("rows have the dtype of float weights")
    chosen = kernels(name)
    product = product_of(chosen.products, kind, SIZE, INNER, biased=True)
    x = random(30, INNER, seed=3, dtype=dtype)
    weights = torch.int8 if rounded else dtype
    one, other, third = adapters(chosen, weights)
    twins = adapters(kernels("torch"), weights)
    # Rows of an adapter lie in two places, and some rows have none.
    spans = [
        Span(range(2), one),
        Span(range(3, 9), other),
        Span(range(9, 26), one),
        Span(range(28, 29), third),
    ]
    plain = product(x)
    wanted = plain.double().clone()
    for number in (0, 1):
        want = wanted.clone()
        for adapter, rows in ((0, [*range(2), *range(9, 26)]), (1, [*range(3, 9)]), (2, [28])):
            want[rows] += added(twins[adapter].products[number], x[rows])
        got = run(chosen, product, x, spans, number)
        assert got.dtype is dtype
        size = float(want.abs().max())
        close = 1e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(got.double(), want, rtol=close, atol=close * size)
        without = [row for row in range(30) if not any(row in span.rows for span in spans)]
        assert torch.equal(got[without], plain[without])
        assert not torch.equal(got[:2], plain[:2]) or number == 1


@EVERY
@KINDS
@pytest.mark.parametrize("rounded", [False, True], ids=["", "int8"])
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str, kind: str, rounded: bool) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    chosen = kernels(name)
    product = product_of(chosen.products, kind, SIZE, INNER, biased=True)
    x = random(40, INNER, seed=4, dtype=dtype)
    one, other, _ = adapters(chosen, torch.int8 if rounded else dtype)
    whole = run(chosen, product, x, [Span(range(13), other), Span(range(13, 40), one)])
    alone = run(chosen, product, x, [Span(range(40), one)])
    assert torch.equal(whole[13:], alone[13:])
    for count in (1, 2, 3, 7, 8, 9, 16, 17):
        parts = [run(chosen, product, part, [Span(range(len(part)), one)]) for part in x.split(count)]
        assert torch.equal(torch.cat(parts), alone), f"{count} rows at a time"


def test_the_native_sum_is_rounded_once() -> None:
    chosen = kernels("native")
    x = random(64, INNER, seed=5).bfloat16()
    weight = (0.01 * random(SIZE, INNER, seed=6)).bfloat16()
    product = chosen.products.floats(weight, None)
    low = low_rank(60, (4, 4, 4), torch.bfloat16)
    twin = adapter_of(kernels("torch"), low)
    got = run(chosen, product, x, [Span(range(64), adapter_of(chosen, low))]).double()
    want = x.double() @ weight.double().T + added(twin.products[0], x)
    ulp = 2.0 ** (torch.frexp(want).exponent.double() - 8)
    assert float(((got - want).abs() / ulp).max()) < 0.501
    twice = run(kernels("torch"), kernels("torch").products.floats(weight, None), x, [Span(range(64), twin)])
    assert float(((twice.double() - want).abs() / ulp).max()) > 0.51, "twice would be worse than that"


@pytest.mark.parametrize("size", [1e-8, 1e-20, 1e20])
def test_int8_rows_keep_small_and_large_values(size: float) -> None:
    matrix = size * random(4, 64, seed=9)
    error = (float64(Int8Rows.of(matrix)) - matrix.double()).norm() / matrix.double().norm()
    assert float(error) < 1e-2


def test_rows_of_another_pass_or_dtype_are_refused() -> None:
    chosen = kernels("native")
    product = product_of(chosen.products, "int8", SIZE, INNER)
    [adapter, *_] = adapters(chosen, torch.bfloat16)
    rows = AdaptedRows.of([Span(range(2), adapter)], 3, chosen.library)
    with pytest.raises(ValueError, match="adapters for 3 rows"):
        rows.multiply(product, 0, random(4, INNER, seed=7).bfloat16())
    with pytest.raises(ValueError, match="bfloat16"):
        rows.multiply(product, 0, random(3, INNER, seed=7))
