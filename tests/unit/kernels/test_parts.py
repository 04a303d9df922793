"""Products of floats and int4 that add up in parts: the same bits, however ranks share the parts out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from specinfer.kernels.exchange import SharedExchange
from specinfer.kernels.layout import quantize_int4
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import NativeProduct, PartsProduct, ProductOptions
from specinfer.kernels.quantized import NativeProducts, Products
from tests.kernels import NAMES, kernels, library_or_skip
from tests.unit.kernels.ranks import run_ranks

ROWS: Final = (1, 2, 9, 16, 17, 40, 130)
CHANNELS: Final = 49
INNER: Final = 1100
# Ends of parts: more than 16 groups, and less than a step.
ENDS: Final = (32, 160, 192, 736, 768, 1024, 1100)
SHARES: Final = ((0, 7), (0, 4, 7), (0, 1, 7), (0, 3, 5, 7), (0, 1, 2, 6, 7), (0, 2, 3, 5, 6, 7))
KINDS: Final = ("float32", "bfloat16", "int4", "loose int4")
EACH_KIND: Final = pytest.mark.parametrize("kind", KINDS)
EACH_MAKER: Final = pytest.mark.parametrize("name", NAMES)


def products_of(name: Literal["torch", "native"]) -> Products:
    return kernels(name).products if name == "torch" else NativeProducts(library_or_skip())


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def activations(kind: str, rows: int) -> Tensor:
    x = random(rows, INNER, seed=1) * torch.logspace(-3, 3, rows)[:, None]
    return x.to(torch.float32 if kind == "float32" else torch.bfloat16)


def product(
    by: Products,
    kind: str,
    begin: int = 0,
    end: int = INNER,
    *,
    parts: SumParts | None = None,
    bias: bool = True,
    channels: int = CHANNELS,
) -> NativeProduct | PartsProduct:
    """With some columns of one matrix, and its first channels."""
    if isinstance(by, NativeProducts):
        by = NativeProducts(by.library, ProductOptions(loose=kind.startswith("loose")))
    matrix = random(CHANNELS, INNER)
    weight, added = matrix[:channels, begin:end], random(CHANNELS, seed=2)[:channels] if bias else None
    if "int4" in kind:
        largest = float(quantize_int4(matrix).scales.max())
        made = by.laid_out(quantize_int4(weight), added, end - begin, channels, largest, parts)
    else:
        dtype = getattr(torch, kind)
        made = by.floats(weight.to(dtype), None if added is None else added.to(dtype), parts)
    assert isinstance(made, NativeProduct | PartsProduct)
    return made


def parted(
    by: Products, kind: str, shares: Sequence[int] = SHARES[0], rank: int = 0
) -> tuple[NativeProduct | PartsProduct, slice]:
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


def check_order(by: Products, kind: str, rows: Sequence[int] = ROWS) -> None:
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


def check_shares(by: Products, kind: str, rows: Sequence[int] = ROWS) -> None:
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
@EACH_MAKER
def test_parts_are_added_by_the_tree(name: Literal["torch", "native"], kind: str) -> None:
    check_order(products_of(name), kind)


@pytest.mark.few(4)
@EACH_KIND
@EACH_MAKER
def test_bits_are_the_same_however_parts_are_shared_out(name: Literal["torch", "native"], kind: str) -> None:
    check_shares(products_of(name), kind)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_twin_adds_alike_for_every_number_of_channels_and_rows(kind: str, threads: int) -> None:
    """As ranks have some of the channels, and other threads; one element after another, on every CPU."""
    before = torch.get_num_threads()
    twin, x = Products(use=ProductOptions(shared=True)), activations(kind, 40)
    want = product(twin, kind, parts=SumParts((INNER,), (0, 1)))(x)
    dtype = getattr(torch, kind)
    terms_IRC = (x.T[:, :, None].float() * random(CHANNELS, INNER).to(dtype).float().T[:, None]).numpy()
    sums = torch.from_numpy(np.add.accumulate(terms_IRC, axis=0)[-1])
    assert torch.equal(want, (sums + random(CHANNELS, seed=2).to(dtype).float()).to(dtype))
    torch.set_num_threads(threads)
    try:
        for channels in (1, 16, 32, 48):
            some = product(twin, kind, channels=channels)
            for rows in (1, 3, 16, 17, 40):
                found = some(x[:rows])
                assert torch.equal(found, want[:rows, :channels]), (channels, rows)
    finally:
        torch.set_num_threads(before)


@EACH_KIND
@pytest.mark.parametrize("shares", [SHARES[0], SHARES[1], SHARES[3]], ids=len)
def test_ranks_in_one_call_have_the_bits_of_one(kind: str, shares: tuple[int, ...]) -> None:
    library = library_or_skip()
    by = NativeProducts(library)
    ranks = [parted(by, kind, shares, rank) for rank in range(len(shares) - 1)]
    given = [activations(kind, rows) for rows in ROWS]
    parts = [[x[:, its].contiguous() for _, its in ranks] for x in given]

    def work(exchange: SharedExchange) -> list[bytes]:
        own, _ = ranks[exchange.rank]
        assert isinstance(own, NativeProduct)
        own.join(exchange)
        return [bytes(own(part[exchange.rank]).view(torch.uint8).numpy()) for part in parts]

    of_one = parted(by, kind)[0]
    wanted = [bytes(of_one(x).view(torch.uint8).numpy()) for x in given]
    assert run_ranks(library, len(ranks), work, slot=4096) == [wanted] * len(ranks)


@EACH_MAKER
def test_a_row_that_is_no_number_costs_no_other(name: Literal["torch", "native"]) -> None:
    for kind in KINDS:
        x, of_one = activations(kind, 17), parted(products_of(name), kind)[0]
        fine, broken = of_one(x), x.clone()
        broken[3, 800] = float("nan")
        got, others = of_one(broken), [row for row in range(17) if row != 3]
        assert not got[3].isfinite().any()
        assert torch.equal(got[others], fine[others])


@EACH_MAKER
def test_other_parts_are_refused(name: Literal["torch", "native"]) -> None:
    by = products_of(name)
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
            product(by, "bfloat16", parts=SumParts(ends, shares, rank))
    two = parted(by, "bfloat16", SHARES[1])[0]
    with pytest.raises(ValueError, match=r"^branches must be contiguous torch.float32 \[3, 2, 49\]"):
        two.joined(torch.zeros(2, 2, CHANNELS), torch.bfloat16)
    plain = products_of("native").floats(random(16, 64), None)
    assert isinstance(plain, NativeProduct)
    with pytest.raises(ValueError, match=r"^this product\'s sums have no parts, hence no branches$"):
        plain.branches(random(1, 64))
