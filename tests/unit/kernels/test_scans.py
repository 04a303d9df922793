"""Native reads of rows: the twins' likeliest tokens, masses and laws, and the choices of the law's code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from specinfer.errors import LogitsError
from specinfer.kernels import sampling
from specinfer.kernels.sampling import NativeScan
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.draws import coupled_children
from specinfer.verify.coupled import coupled_choice
from specinfer.verify.scan import NO_TOKEN, NUMPY, SAMPLE_REQUEST, LogitBlock
from specinfer.verify.target_law import MASS_ERROR, NUMPY_ROW, Law, target_law
from tests.spies import spied
from tests.unit.kernels import logit_rows
from tests.unit.kernels.logit_rows import PARAMS, SIZES, Row, asked, blocks, native_scan, rows

ALL_PARAMS = {
    **logit_rows.ALL_PARAMS,
    "nearly greedy": SamplingParams(temperature=9.9e-6, top_p=0.5),
    "coldest": SamplingParams(temperature=1e-5),
    "hottest": SamplingParams(temperature=1e300, top_p=0.9),
    "one": SamplingParams(top_k=1),
    "many": SamplingParams(temperature=1.3, top_k=10**30),
    "nearly all": SamplingParams(temperature=1.0, top_p=1 - 1e-12),
    "nearly none": SamplingParams(temperature=1.0, top_p=1e-320),
    "tiny min_p": SamplingParams(temperature=0.1, min_p=5e-324),
    "whole min_p": SamplingParams(temperature=2.0, min_p=1.0),
    "hot min_p": SamplingParams(temperature=8.0, min_p=0.3),
    "two": SamplingParams(temperature=1.0, top_p=0.8, min_p=0.1),
    "top_k and min_p": SamplingParams(temperature=1.0, top_k=64, min_p=0.2),
}


@pytest.fixture(scope="module")
def native() -> NativeScan:
    return native_scan()


def oracle(row: Row, params: SamplingParams, seed: int, position: int) -> int:
    try:
        return coupled_choice(target_law(row, params, NUMPY_ROW), seed, position, NUMPY_ROW)
    except LogitsError:
        return NO_TOKEN


def check(
    native: NativeScan, block: LogitBlock, params: Sequence[SamplingParams], seeds: Sequence[int]
) -> NDArray[np.int64]:
    """Ask for row i % rows with every param; the answers."""
    order = np.arange(len(params), dtype=np.int64)[::-1].copy() % len(block)
    requests = asked(params, seeds)
    got = native.choices(block, order, requests)
    assert native.chosen(block, order.tolist(), [one.item() for one in requests]) == got.tolist()
    want = [
        oracle(block[row], p, s, 12 + i)
        for i, (row, p, s) in enumerate(zip(order, params, seeds, strict=True))
    ]
    assert got.tolist() == want, [
        (block.dtype, row, p) for row, p, g, w in zip(order, params, got, want, strict=True) if g != w
    ]
    return got


# ---- choices ----


@pytest.mark.thorough
@pytest.mark.parametrize("params", ALL_PARAMS.values(), ids=ALL_PARAMS)
@pytest.mark.parametrize("vocab", SIZES)
def test_choices_are_those_of_the_law(native: NativeScan, vocab: int, params: SamplingParams) -> None:
    for block in blocks(list(rows(vocab).values())).values():
        turns = 1 if vocab > 5000 else 6
        seeds = [0, 2**63 - 1, *range(7, 7 + turns * len(block) - 2)]
        check(native, block, [params] * len(seeds), seeds)


def near(x: float) -> list[float]:
    """Numbers at, beside and near x."""
    beside = [x, math.nextafter(x, 0), math.nextafter(x, 2)]
    return [*beside, *(x * (1 + far * sign) for far in (1e-14, 1e-10, 2e-9, 1e-6, 1e-4) for sign in (1, -1))]


@pytest.mark.thorough
@pytest.mark.parametrize("top_k", [0, 40])
def test_choices_where_top_p_or_min_p_hang_on_a_rounding(native: NativeScan, top_k: int) -> None:
    """Cuts exactly at a sum or a weight, so that other rounding keeps other tokens."""
    rng = np.random.default_rng(2)
    for line in (
        np.zeros(300),  # sums are whole numbers
        np.repeat([3.0, 2.0, 1.0, -1.0], 75),
        np.log(2.0) * -np.arange(300),
        rng.normal(size=300) * 2,
        np.append(0.0, -497 - np.arange(299) / 40),  # weights of few digits
    ):
        row = line.astype(np.float32)
        temperature = 0.7
        weights = np.exp((np.sort(row)[::-1].astype(np.float64) - float(row.max())) / temperature)
        total = weights[: top_k or None].sum()
        cuts = [0, 1, 2, 5, 17, 38]
        params = [
            SamplingParams(temperature=temperature, top_k=top_k, **{name: min(p, 1.0)})
            for cut in cuts
            for name, exactly in (("top_p", weights[: cut + 1].sum() / total), ("min_p", weights[cut]))
            for p in near(float(exactly))
        ]
        for block in blocks([row]).values():
            # Few ids are kept apart by one choice: so several.
            for first in (0, 1000, 2000):
                check(native, block, params, range(first, first + len(params)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "values",
    [[np.nan], [1.0, np.nan], [np.nan, 5.0], [np.inf, 0.0], [-np.inf], [-np.inf, -np.inf], [np.inf, np.nan]],
    ids=str,
)
@pytest.mark.parametrize("vocab", [2, 15, 16, 70, 1000])
def test_a_row_without_a_finite_largest_logit(native: NativeScan, values: list[float], vocab: int) -> None:
    wrong = np.full(vocab, -np.inf if values[0] == -np.inf else 0.5, dtype=np.float32)
    good = rows(vocab)["wide"]
    for at in {0, (vocab - len(values)) // 2, vocab - len(values)}:
        line = wrong.copy()
        line[at : at + len(values)] = values
        for block in blocks([good, line, good]).values():
            for scan in (native, NUMPY):
                numbers = np.array([0, 1, 2, 1], dtype=np.int64)
                for params in ALL_PARAMS.values():
                    got = scan.choices(block, numbers, asked([params] * 4, range(4)))
                    assert (got == NO_TOKEN).tolist() == [False, True, False, True], params
                found = scan.likeliest(block, numbers, 2, np.ones(4))
                assert found.found.tolist() == [2, 0, 2, 0]
                assert found.ids[[1, 3]].tolist() == [[NO_TOKEN] * 2] * 2
                assert (found.values[[1, 3]] == -np.inf).all()
                assert np.isnan(found.masses).tolist() == [False, True, False, True]


def test_the_law_is_asked_where_rounding_decides(native: NativeScan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = spied(monkeypatch, sampling, "choice", lambda *_: 1)
    block = LogitBlock(np.stack([rows(40_003)["like a model's"]] * 2))
    many = np.zeros(60, dtype=np.int64)
    for name in ("plain", "top_k", "top_p", "min_p", "all", "greedy", "hot top_p"):
        native.choices(block, many, asked([ALL_PARAMS[name]] * 60, range(60)))
        assert not asked_for, name
    halves = LogitBlock(np.zeros((1, 2), dtype=np.float32))
    native.choices(halves, many[:3], asked([SamplingParams(top_p=0.5)] * 3, range(3)))
    assert len(asked_for) == 3, "half of two equal ones is a matter of rounding"


# ---- the likeliest ----


def test_the_likeliest_are_the_most_likely_of_each_row(native: NativeScan) -> None:
    for block in (block for vocab in SIZES for block in blocks(list(rows(vocab).values())).values()):
        numbers = np.array([*range(len(block)), 0, 2], dtype=np.int64)[::-1].copy()
        temperatures = np.linspace(0.02, 5.0, len(numbers))
        for n in (1, 3, 64, 700, block.vocab + 5):
            *got, masses = native.likeliest(block, numbers, n, temperatures)
            *want, exact = NUMPY.likeliest(block, numbers, n, temperatures)
            assert [part.tolist() for part in got] == [part.tolist() for part in want], (block.vocab, n)
            np.testing.assert_allclose(masses, exact, rtol=2 * MASS_ERROR)


# ---- one row ----


def test_the_likeliest_tokens_and_the_mass_are_the_twins(native: NativeScan) -> None:
    for vocab, (name, row) in ((size, one) for size in SIZES for one in rows(size).items()):
        for n in (1, 3, 64, 700, vocab, vocab + 5):
            assert native.most_likely(row, n).tolist() == NUMPY.most_likely(row, n).tolist(), (vocab, name, n)
        highest = float(row.max())
        for temperature in (0.02, 0.8, 5.0, 1e20):
            exact = float(np.exp((row.astype(np.float64) - highest) / temperature).sum())
            for scan in (native, NUMPY):
                error = abs(scan.mass(row, highest, temperature) / exact - 1)
                assert error < MASS_ERROR, (vocab, name, temperature)


@pytest.mark.thorough
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("vocab", SIZES)
def test_laws_and_choices_are_the_twins(native: NativeScan, vocab: int, params: SamplingParams) -> None:
    kept = DraftVocabulary(np.arange(vocab) * 3 + 1, 3 * vocab + 7)
    for name, row in rows(vocab).items():
        law, twin = target_law(row, params, native), target_law(row, params)
        assert (law.ids is None) == (twin.ids is None)
        assert law.ids is None or twin.ids is None or law.ids.tolist() == twin.ids.tolist(), name
        for seed in range(4 if vocab > 5000 else 12):
            assert coupled_choice(law, seed, 12, native) == coupled_choice(twin, seed, 12), (name, seed)
            for vocabulary in (None, kept):
                ours = coupled_children(row, params, seed, 12, 3, vocabulary, native)
                theirs = coupled_children(row, params, seed, 12, 3, vocabulary)
                assert ours.tolist() == theirs.tolist(), (name, seed)


def test_the_race_over_named_ids_is_the_twins(native: NativeScan) -> None:
    # A pruned vocabulary's whole row: many ids, and their numbers are not their places.
    rng = np.random.default_rng(3)
    ids = np.sort(rng.choice(200_000, 30_001, replace=False))
    row = rng.normal(size=30_001).astype(np.float32) * 3
    law = Law(row, ids, int(row.argmax()), 0.9, 200_000)
    for seed in range(40):
        assert coupled_choice(law, seed, 5, native) == coupled_choice(law, seed, 5)


# ---- refusals ----


def test_rows_that_are_not_there_are_refused(native: NativeScan) -> None:
    block = LogitBlock(np.zeros((3, 20), dtype=np.float32))
    for scan in (native, NUMPY):
        for wrong in ([0, 3], [-1, 2]):
            numbers = np.array(wrong, dtype=np.int64)
            with pytest.raises(IndexError, match=r"got rows -?\d .. \d of a block of 3"):
                scan.choices(block, numbers, asked([SamplingParams()] * 2, range(2)))
            with pytest.raises(IndexError, match=r"got rows -?\d .. \d of a block of 3"):
                scan.likeliest(block, numbers, 1, np.ones(2))
        none = np.zeros(0, dtype=np.int64)
        assert scan.choices(block, none, np.zeros(0, dtype=SAMPLE_REQUEST)).shape == (0,)
        assert scan.likeliest(block, none, 4, np.zeros(0)).ids.shape == (0, 4)


def test_arrays_of_another_kind_are_refused(native: NativeScan) -> None:
    block, numbers = LogitBlock(np.zeros((3, 20), dtype=np.float32)), np.arange(2, dtype=np.int64)
    requests = asked([SamplingParams()] * 2, range(2))
    with pytest.raises(TypeError, match=r"rows must be contiguous int64 \[2\], got int32 \[2\]"):
        native.choices(block, numbers.astype(np.int32), requests)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"requests must be contiguous .* \[2\], got .* \[1\]"):
        native.choices(block, numbers, requests[:1])
    with pytest.raises(ValueError, match="got 1 requests for 2 rows"):
        native.chosen(block, [0, 1], [requests[0].item()])
    with pytest.raises(IndexError, match=r"got rows 0 \.\. 3 of a block of 3"):
        native.chosen(block, [0, 3], [one.item() for one in requests])
    assert native.chosen(block, [], []) == []
    with pytest.raises(TypeError, match="requests must be"):
        native.choices(block, numbers, np.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"temperatures must be contiguous float64 \[2\], got float32"):
        native.likeliest(block, numbers, 1, np.ones(2, dtype=np.float32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got n = 0; allowed: n >= 1"):
        native.likeliest(block, numbers, 0, np.ones(2))
