"""Products that add up in parts: the same bits, however ranks share the parts out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from itertools import product as product_of
from typing import Final

import pytest
import torch
from torch import Tensor

from specinfer.errors import PeerLostError
from specinfer.kernels.exchange import SharedExchange, shared_file
from specinfer.kernels.layout import GROUP, int8_matrix, lay_out_int8, padded, quantize_int4, quantize_int8
from specinfer.kernels.library import Library
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import NativeProduct, ProductOptions
from specinfer.kernels.quantized import NativeProducts
from tests.kernels import library_or_skip
from tests.unit.kernels.ranks import run_ranks
from tests.unit.kernels.test_products import activations, random

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


def rows_of(kind: str, rows: int) -> Tensor:
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
        x = rows_of(kind, count)
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
            x = rows_of(kind, count)
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
def test_ranks_have_the_bits_of_one(native: NativeProducts, kind: str, shares: tuple[int, ...]) -> None:
    ranks = [parted(native, kind, shares, rank) for rank in range(len(shares) - 1)]
    given = [rows_of(kind, rows) for rows in ROWS]
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
        x, of_one = rows_of(kind, 17), parted(native, kind)[0]
        fine, broken = of_one(x), x.clone()
        broken[3, 800] = float("nan")
        got, others = of_one(broken), [row for row in range(17) if row != 3]
        assert not got[3].isfinite().any()
        assert torch.equal(got[others], fine[others])


def test_other_parts_are_refused(native: NativeProducts) -> None:
    for ends, shares, rank in (
        *(((), (0, 1), 0), ((33, INNER), (0, 2), 0), ((64, 64, INNER), (0, 3), 0)),
        *(((64, 32, INNER), (0, 3), 0), ((64, 1024), (0, 2), 0), ((64, INNER), (0, 1, 2), 0)),
        *(((64, INNER), (0, 2, 2), 0), ((64, INNER), (1, 3), 0), ((64, INNER), (0, 2), 1)),
        ((64, INNER), (0, 2, 300), 0),
    ):
        with pytest.raises(
            ValueError, match=r"^got parts that end at .* has 1100 inner elements, cut at groups of 32"
        ):
            product(native, "bfloat16", parts=SumParts(ends, shares, rank))
    two = parted(native, "bfloat16", SHARES[1])[0]
    with pytest.raises(ValueError, match=r"^branches must be contiguous torch.float32 \[3, 2, 49\]"):
        two.joined(torch.zeros(2, 2, CHANNELS), torch.bfloat16)


# Products of int8, whose inner elements several processes share.


DTYPES: Final = (torch.float32, torch.bfloat16)
COUNTS: Final = (0, 1, 2, 9, 16, 17, 40, 65, 130)
SHARED_SHAPES: Final = {  # channels, inner: where the parts begin, in groups of 32
    (16, 64): ([0, 1],),
    (33, 576): ([0, 12], [0, 6, 11], [0, 1, 9, 17]),
    (49, 1100): ([0, 17], [0, 3, 20], [0, 11, 12, 34]),
    (1, 200): ([0, 6],),
}


class Parts:
    """A matrix as one product has it, and as the products of several processes do."""

    def __init__(
        self, channels: int, inner: int, starts: Sequence[int], library: Library | None = None
    ) -> None:
        self._bias = random(channels, seed=2) if inner != 64 else None
        self._weight = quantize_int8(random(channels, inner))
        products = NativeProducts(library or library_or_skip())
        self.whole = products.laid_out(self._weight, self._bias, inner, channels)
        values, scales = int8_matrix(self._weight, channels, padded(inner))
        self._ranges = list(pairwise([*(GROUP * start for start in starts), inner]))
        self.products: list[NativeProduct] = []
        for begin, end in self._ranges:
            part = lay_out_int8(values[:, begin : max(end, padded(end))], scales)
            self.products.append(products.laid_out(part, self._bias, end - begin, channels))

    def of(self, x: Tensor) -> list[tuple[NativeProduct, Tensor]]:
        """Each product, and the elements of rows that it multiplies."""
        parts = [x[:, begin:end].contiguous() for begin, end in self._ranges]
        return list(zip(self.products, parts, strict=True))

    def maxima(self, x: Tensor) -> Tensor:
        """The largest values of whole rows, by their bits."""
        bits = [product.maxima(part).view(torch.int32) for product, part in self.of(x)]
        return torch.stack(bits).amax(0).view(torch.float32)

    def sums(self, x: Tensor, maxima: Tensor) -> Tensor:
        total = torch.zeros(len(x), self.whole.channels, dtype=torch.int32)
        for product, part in self.of(x):
            total += product.partials(part, maxima)
        return total


def same(got: Tensor, want: Tensor) -> bool:
    """Whether bits are the same, with one NaN for all."""
    assert got.dtype is want.dtype
    return torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


def check_sums(library: Library) -> None:
    """Parts add up to the whole."""
    for (channels, inner), each in SHARED_SHAPES.items():
        for starts, dtype in product_of(each, DTYPES):
            parts = Parts(channels, inner, starts, library)
            x = activations(max(COUNTS), inner, dtype)
            whole, maxima = parts.whole(x), parts.maxima(x)
            for rows in COUNTS:
                sums = parts.sums(x[:rows], maxima[:rows])
                for product in parts.products:
                    found = product.finished(sums, maxima[:rows], dtype)
                    assert same(found, whole[:rows]), (channels, inner, starts, dtype, rows)


def test_parts_add_up_to_the_whole() -> None:
    check_sums(library_or_skip())


def test_what_is_not_finite_ends_its_own_row_alone() -> None:
    parts, values = Parts(33, 576, [0, 6, 11]), map(float, ("nan", "inf", "-inf"))
    for value, (rows, broken) in product_of(values, ((1, 0), (17, 3), (40, 39))):
        x = activations(rows, 576, torch.float32)
        x[broken, 400] = value  # which the last part alone has
        maxima = parts.maxima(x)
        got = parts.products[0].finished(parts.sums(x, maxima), maxima, torch.float32)
        others = [row for row in range(rows) if row != broken]
        assert not got[broken].isfinite().any(), (value, rows)
        assert torch.equal(got[others], parts.whole(x)[others]), (value, rows)


def test_other_maxima_and_sums_are_refused() -> None:
    product, x = Parts(33, 576, [0]).whole, random(2, 576)
    maxima, sums = torch.ones(2), torch.ones(2, 33).int()
    for wrong in (torch.ones(3), torch.ones(2, 1), torch.ones(2).double(), torch.ones(4)[::2]):
        with pytest.raises(ValueError, match=r"^maxima must be contiguous torch.float32 \[2\]"):
            product.partials(x, wrong)
        with pytest.raises(ValueError, match=r"^maxima must be contiguous torch.float32 \[2\]"):
            product.finished(sums, wrong, torch.float32)
    for wrong in (torch.ones(2, 32).int(), torch.ones(2, 33), torch.ones(33, 2).int().T):
        with pytest.raises(ValueError, match=r"^sums must be contiguous torch.int32 \[\d+, 33\]"):
            product.finished(wrong, maxima, torch.float32)


# ---- several processes, in one call each ----


@pytest.mark.parametrize("starts", [[0], [0, 12], [0, 6, 11], [0, 1, 9, 17]], ids=len)
def test_products_of_several_ranks_are_the_whole_one(starts: list[int]) -> None:
    parts = Parts(33, 576, starts)
    given = [activations(rows, 576, dtype) for dtype in DTYPES for rows in COUNTS]
    given[4][3, 400] = float("nan")
    shares = [[part for _, part in parts.of(x)] for x in given]
    library = library_or_skip()

    def work(exchange: SharedExchange) -> list[bytes]:
        product = parts.products[exchange.rank]
        product.join(exchange)
        return [bytes(product(share[exchange.rank]).view(torch.uint8).numpy()) for share in shares]

    wanted = [bytes(parts.whole(x).view(torch.uint8).numpy()) for x in given]
    for found in run_ranks(library, len(starts), work, slot=4096):  # so that sums take several turns
        assert [len(one) for one in found] == [len(one) for one in wanted]
        for x, *both in zip(given, found, wanted, strict=True):
            if len(x):
                got, want = (torch.frombuffer(bytearray(one), dtype=x.dtype) for one in both)
                assert same(got, want), (x.dtype, len(x))


def test_a_product_that_lost_a_rank_says_so() -> None:
    library = library_or_skip()
    file = shared_file()
    exchange = SharedExchange(library, file, 2, 0, limit=0.1)
    os.close(file)
    product = Parts(33, 576, [0]).whole
    product.join(exchange)
    for _ in range(2):
        with pytest.raises(PeerLostError, match=r"^rank 1 of 2 did not respond within 0.1 s"):
            product(random(2, 576))
    exchange.close()
