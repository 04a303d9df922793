"""int8 products whose inner elements several processes share: parts add up to the whole, to the bit."""

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
from specinfer.kernels.layout import GROUP, int8_matrix, lay_out_int8, padded, quantize_int8
from specinfer.kernels.library import Library
from specinfer.kernels.product import NativeProduct
from specinfer.kernels.quantized import NativeProducts
from tests.kernels import library_or_skip
from tests.unit.kernels.ranks import run_ranks
from tests.unit.kernels.test_products import activations, random

DTYPES: Final = (torch.float32, torch.bfloat16)
ROWS: Final = (0, 1, 2, 9, 16, 17, 40, 65, 130)
SHAPES: Final = {  # channels, inner: where the parts begin, in groups of 32
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
    for (channels, inner), each in SHAPES.items():
        for starts, dtype in product_of(each, DTYPES):
            parts = Parts(channels, inner, starts, library)
            x = activations(max(ROWS), inner, dtype)
            whole, maxima = parts.whole(x), parts.maxima(x)
            for rows in ROWS:
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
    given = [activations(rows, 576, dtype) for dtype in DTYPES for rows in ROWS]
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
