"""Products of floats and int4 that add up in parts: the same bits, however ranks share the parts out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import pytest
import torch
from torch import Tensor

from specinfer.kernels.exchange import SharedExchange
from specinfer.kernels.library import Library
from specinfer.kernels.product import NativeProduct, Use
from specinfer.kernels.quantized import NativeProducts, quantize_int4, quantize_int8
from tests.kernels import kernels, library_or_skip
from tests.unit.kernels.ranks import run_ranks

ROWS: Final = (1, 2, 9, 16, 17, 40, 130)
CHANNELS: Final = 49
INNER: Final = 1100
ENDS: Final = (
    32,
    160,
    192,
    736,
    768,
    1024,
    1100,
)  # of a part of more than 16 groups, and of less than a step
SHARES: Final = ([0, 7], [0, 4, 7], [0, 1, 7], [0, 3, 5, 7], [0, 1, 2, 6, 7], [0, 2, 3, 5, 6, 7])
KINDS: Final = ("float32", "bfloat16", "int4", "loose int4")
EACH_KIND: Final = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def library() -> Library:
    return library_or_skip()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def activations(kind: str, rows: int) -> Tensor:
    x = random(rows, INNER, seed=1) * torch.logspace(-3, 3, rows)[:, None]
    return x.to(torch.float32 if kind == "float32" else torch.bfloat16)


def product(
    library: Library, kind: str, begin: int = 0, end: int = INNER, *, bias: bool = True
) -> NativeProduct:
    """With some columns of one matrix."""
    products = NativeProducts(library, Use(loose=kind.startswith("loose")))
    weight, added = random(CHANNELS, INNER)[:, begin:end], random(CHANNELS, seed=2) if bias else None
    if "int4" in kind:
        largest = float(quantize_int4(random(CHANNELS, INNER)).scales.max())
        made = products.int4(quantize_int4(weight), added, end - begin, CHANNELS, largest)
    else:
        dtype = getattr(torch, kind)
        made = products.floats(weight.to(dtype), None if added is None else added.to(dtype))
    assert isinstance(made, NativeProduct)
    return made


def divided(library: Library, kind: str, shares: Sequence[int], rank: int) -> tuple[NativeProduct, slice]:
    """A rank's product, and which elements of rows it has."""
    begin, end = ([0, *ENDS][shares[n]] for n in (rank, rank + 1))
    made = product(library, kind, begin, end)
    made.divide([one - begin for one in ENDS[shares[rank] : shares[rank + 1]]], shares, rank)
    return made, slice(begin, end)


def whole(library: Library, kind: str) -> NativeProduct:
    return divided(library, kind, SHARES[0], 0)[0]


def added(parts: Sequence[Tensor]) -> Tensor:
    """By the tree: the first branch is the largest one of a power of two that leaves something."""
    if len(parts) == 1:
        return parts[0]
    first = 1
    while 2 * first < len(parts):
        first *= 2
    return added(parts[:first]) + added(parts[first:])


def check_order(library: Library, kind: str, rows: Sequence[int] = ROWS) -> None:
    """A divided product is the sum of its parts' products by the tree, and then the bias."""
    ranges = list(pairwise([0, *ENDS]))
    for count in rows:
        x = activations(kind, count)
        parts = []
        for begin, end in ranges:
            alone = product(library, kind, begin, end, bias=False)
            alone.divide([end - begin])
            parts.append(alone.branches(x[:, begin:end].contiguous())[0])
        bias = random(CHANNELS, seed=2)
        wanted = added(parts) + (bias.bfloat16().float() if kind == "bfloat16" else bias)
        assert torch.equal(whole(library, kind)(x), wanted.to(x.dtype)), count


def check_shares(library: Library, kind: str, rows: Sequence[int] = ROWS) -> None:
    """Branches of all ranks join to the product of one."""
    of_one = whole(library, kind)
    for shares in SHARES:
        ranks = [divided(library, kind, shares, rank) for rank in range(len(shares) - 1)]
        for count in rows:
            x = activations(kind, count)
            branches = torch.cat([one.branches(x[:, its].contiguous()) for one, its in ranks])
            for one, _ in ranks:
                assert torch.equal(one.joined(branches, x.dtype), of_one(x)), (shares, count)


@EACH_KIND
def test_parts_are_added_by_the_tree(library: Library, kind: str) -> None:
    check_order(library, kind)


@EACH_KIND
def test_bits_are_the_same_however_parts_are_shared_out(library: Library, kind: str) -> None:
    check_shares(library, kind)


@EACH_KIND
def test_a_divided_product_is_near_the_other_and_one_part_is_that(library: Library, kind: str) -> None:
    one, seven, usual = product(library, kind), whole(library, kind), product(library, kind)
    one.divide([INNER])
    for rows in ROWS:
        x = activations(kind, rows)
        assert torch.equal(one(x), usual(x))
        near = 1e-5 if kind == "float32" else 2e-2
        difference = (seven(x).float() - usual(x).float()).norm(dim=1)
        assert (difference <= near * usual(x).float().norm(dim=1)).all()


@pytest.mark.parametrize("parts", range(1, 20))
def test_shares_leave_few_branches(library: Library, parts: int) -> None:
    for first in range(20):
        found = library.branches(first, parts)
        assert 1 <= found <= min(parts, 2 * parts.bit_length())
        if first == 0:
            assert found == parts.bit_count()


@EACH_KIND
@pytest.mark.parametrize("shares", [SHARES[0], SHARES[1], SHARES[3]], ids=len)
def test_ranks_in_one_call_have_the_bits_of_one(library: Library, kind: str, shares: list[int]) -> None:
    ranks = [divided(library, kind, shares, rank) for rank in range(len(shares) - 1)]
    given = [activations(kind, rows) for rows in ROWS]
    parts = [[x[:, its].contiguous() for _, its in ranks] for x in given]

    def work(exchange: SharedExchange) -> list[bytes]:
        own, _ = ranks[exchange.rank]
        own.join(exchange)
        return [bytes(own(part[exchange.rank]).view(torch.uint8).numpy()) for part in parts]

    of_one = whole(library, kind)
    wanted = [bytes(of_one(x).view(torch.uint8).numpy()) for x in given]
    assert run_ranks(library, len(ranks), work, slot=4096) == [wanted] * len(ranks)


def test_a_row_that_is_no_number_costs_no_other(library: Library) -> None:
    for kind in KINDS:
        x, of_one = activations(kind, 17), whole(library, kind)
        fine, broken = of_one(x), x.clone()
        broken[3, 800] = float("nan")
        got, others = of_one(broken), [row for row in range(17) if row != 3]
        assert not got[3].isfinite().any()
        assert torch.equal(got[others], fine[others])


def test_other_parts_are_refused(library: Library) -> None:
    usual = product(library, "bfloat16")
    for ends, shares, rank in (
        ([], None, 0),
        ([33, INNER], None, 0),
        ([64, 64, INNER], None, 0),
        ([64, 32, INNER], None, 0),
        ([64, 1024], None, 0),
        ([64, INNER], [0, 1, 2], 0),
        ([64, INNER], [0, 2, 2], 0),
        ([64, INNER], [1, 3], 0),
        ([64, INNER], [0, 2], 1),
        ([64, INNER], [0, 2, 300], 0),
    ):
        with pytest.raises(
            ValueError, match=r"^parts that end at .* has 1100 inner elements, cut at groups of 32"
        ):
            usual.divide(ends, shares, rank)
    with pytest.raises(ValueError, match=r"^a product that is not divided has no parts$"):
        usual.branches(activations("bfloat16", 1))
    int8 = kernels("native").products.int8(quantize_int8(random(16, 64)), None, 64, 16)
    assert isinstance(int8, NativeProduct)
    with pytest.raises(TypeError, match=r"^a product with int8 weights is exact"):
        int8.divide([64])
    usual.divide(ENDS)
    with pytest.raises(TypeError, match=r"^x is float32, the weight bfloat16"):
        usual.branches(activations("float32", 1))
    with pytest.raises(ValueError, match=r"^branches must be contiguous float32 \[3, 1, 49\], got "):
        usual.joined(torch.zeros(2, 1, CHANNELS), torch.bfloat16)
