"""Products of floats and int4 that add up in parts: the same bits, however ranks share the parts out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import pytest
import torch
from torch import Tensor

from specinfer.kernels.exchange import SharedExchange
from specinfer.kernels.layout import quantize_int4
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import NativeProduct, ProductOptions
from specinfer.kernels.quantized import NativeProducts
from tests.kernels import library_or_skip
from tests.unit.kernels.ranks import run_ranks
from tests.unit.kernels.test_products import random

ROWS: Final = (1, 2, 9, 16, 17, 40, 130)
CHANNELS: Final = 49
INNER: Final = 1100
# Ends of parts: more than 16 groups, and less than a step.
ENDS: Final = (32, 160, 192, 736, 768, 1024, 1100)
SHARES: Final = ((0, 7), (0, 4, 7), (0, 1, 7), (0, 3, 5, 7), (0, 1, 2, 6, 7), (0, 2, 3, 5, 6, 7))
KINDS: Final = ("float32", "bfloat16", "int4", "loose int4")
EACH_KIND: Final = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def native() -> NativeProducts:
    return NativeProducts(library_or_skip())


def activations(kind: str, rows: int) -> Tensor:
    x = random(rows, INNER, seed=1) * torch.logspace(-3, 3, rows)[:, None]
    return x.to(torch.float32 if kind == "float32" else torch.bfloat16)


def product(
    by: NativeProducts,
    kind: str,
    begin: int = 0,
    end: int = INNER,
    *,
    parts: SumParts | None = None,
    bias: bool = True,
) -> NativeProduct:
    """With some columns of one matrix."""
    by = NativeProducts(by.library, ProductOptions(loose=kind.startswith("loose")))
    matrix = random(CHANNELS, INNER)
    weight, added = matrix[:, begin:end], random(CHANNELS, seed=2) if bias else None
    if "int4" in kind:
        largest = float(quantize_int4(matrix).scales.max())
        return by.laid_out(quantize_int4(weight), added, end - begin, CHANNELS, largest, parts)
    dtype = getattr(torch, kind)
    return by.floats(weight.to(dtype), None if added is None else added.to(dtype), parts)


def parted(
    by: NativeProducts, kind: str, shares: Sequence[int] = SHARES[0], rank: int = 0
) -> tuple[NativeProduct, slice]:
    """A rank's product, and which elements of rows it has."""
    begin, end = ([0, *ENDS][shares[n]] for n in (rank, rank + 1))
    own = tuple(one - begin for one in ENDS[shares[rank] : shares[rank + 1]])
    return product(by, kind, begin, end, parts=SumParts(own, tuple(shares), rank)), slice(begin, end)


def added(parts: Sequence[Tensor]) -> Tensor:
    """By the tree: the first branch is the largest one of a power of two that leaves something."""
    if len(parts) == 1:
        return parts[0]
    first = 1
    while 2 * first < len(parts):
        first *= 2
    return added(parts[:first]) + added(parts[first:])


def check_order(by: NativeProducts, kind: str, rows: Sequence[int] = ROWS) -> None:
    """A product with parts is the sum of its parts' products by the tree, and then the bias."""
    ranges = list(pairwise([0, *ENDS]))
    whole = parted(by, kind)[0]
    for count in rows:
        x = activations(kind, count)
        parts = []
        for begin, end in ranges:
            alone = product(by, kind, begin, end, parts=SumParts((end - begin,), (0, 1)), bias=False)
            parts.append(alone.branches(x[:, begin:end].contiguous())[0])
        bias = random(CHANNELS, seed=2)
        wanted = added(parts) + (bias.bfloat16().float() if kind == "bfloat16" else bias)
        assert torch.equal(whole(x), wanted.to(x.dtype)), count


def check_shares(by: NativeProducts, kind: str, rows: Sequence[int] = ROWS) -> None:
    """Branches of all ranks join to the product of one."""
    of_one = parted(by, kind)[0]
    for shares in SHARES:
        ranks = [parted(by, kind, shares, rank) for rank in range(len(shares) - 1)]
        for count in rows:
            x = activations(kind, count)
            branches = torch.cat([one.branches(x[:, its].contiguous()) for one, its in ranks])
            for one, _ in ranks:
                assert torch.equal(one.joined(branches, x.dtype), of_one(x)), (shares, count)


@pytest.mark.few(4)
@EACH_KIND
def test_parts_are_added_by_the_tree_however_they_are_shared_out(native: NativeProducts, kind: str) -> None:
    check_order(native, kind)
    check_shares(native, kind)


@EACH_KIND
@pytest.mark.parametrize("shares", [SHARES[0], SHARES[1], SHARES[3]], ids=len)
def test_ranks_in_one_call_have_the_bits_of_one(
    native: NativeProducts, kind: str, shares: tuple[int, ...]
) -> None:
    ranks = [parted(native, kind, shares, rank) for rank in range(len(shares) - 1)]
    given = [activations(kind, rows) for rows in ROWS]
    parts = [[x[:, its].contiguous() for _, its in ranks] for x in given]

    def work(exchange: SharedExchange) -> list[bytes]:
        own, _ = ranks[exchange.rank]
        own.join(exchange)
        return [bytes(own(part[exchange.rank]).view(torch.uint8).numpy()) for part in parts]

    of_one = parted(native, kind)[0]
    wanted = [bytes(of_one(x).view(torch.uint8).numpy()) for x in given]
    assert run_ranks(native.library, len(ranks), work, slot=4096) == [wanted] * len(ranks)


def test_a_row_that_is_no_number_costs_no_other(native: NativeProducts) -> None:
    for kind in KINDS:
        x, of_one = activations(kind, 17), parted(native, kind)[0]
        fine, broken = of_one(x), x.clone()
        broken[3, 800] = float("nan")
        got, others = of_one(broken), [row for row in range(17) if row != 3]
        assert not got[3].isfinite().any()
        assert torch.equal(got[others], fine[others])


def test_other_parts_are_refused(native: NativeProducts) -> None:
    for ends, shares, rank in (
        ((), (0, 1), 0),
        ((33, INNER), (0, 2), 0),
        ((64, 64, INNER), (0, 3), 0),
        ((64, 32, INNER), (0, 3), 0),
        ((64, 1024), (0, 2), 0),
        ((64, INNER), (0, 1, 2), 0),
        ((64, INNER), (0, 2, 2), 0),
        ((64, INNER), (1, 3), 0),
        ((64, INNER), (0, 2), 1),
        ((64, INNER), (0, 2, 300), 0),
    ):
        with pytest.raises(
            ValueError, match=r"^got parts that end at .* has 1100 inner elements, cut at groups of 32"
        ):
            product(native, "bfloat16", parts=SumParts(ends, shares, rank))
    two = parted(native, "bfloat16", SHARES[1])[0]
    with pytest.raises(ValueError, match=r"^branches must be contiguous torch.float32 \[3, 2, 49\]"):
        two.joined(torch.zeros(2, 2, CHANNELS), torch.bfloat16)
