"""Native choices in changed rows: those of the law in the row that NumPy changes, to the last bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specinfer.kernels import sampling
from specinfer.kernels.sampling import NativeScan
from specinfer.processors.changes import NOTHING, Changes, RowChanges, bans, biases, joined
from specinfer.sampling_params import SamplingParams
from specinfer.verify.scan import NO_TOKEN, NUMPY, LogitBlock, choice
from specinfer.verify.target_law import NUMPY_ROW
from tests.spies import spied
from tests.unit.kernels.logit_rows import ALL_PARAMS, Row, asked, blocks, native_scan, rows, with_threads

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def native() -> NativeScan:
    return native_scan()


def check(
    native: NativeScan,
    block: LogitBlock,
    numbers: Sequence[int],
    requests: NDArray[Any],
    of: Sequence[RowChanges],
) -> list[int]:
    """Ask natively, the twin, and the law in rows that are changed beforehand; what they choose."""
    before = block.rows_RV.copy()
    where, changes = np.array(numbers, dtype=np.int64), Changes.of(of)
    got = native.choices(block, where, requests, changes).tolist()
    assert got == NUMPY.choices(block, where, requests, changes).tolist()
    changed = [block[row].copy() for row in numbers]
    for row, own in zip(changed, of, strict=True):
        own.apply(row)
    assert got == [choice(row, one, NUMPY_ROW) for row, one in zip(changed, requests, strict=True)]
    assert block.rows_RV.tobytes() == before.tobytes(), "a row is not written to"
    return got


def some_changes(rng: np.random.Generator, row: Row) -> RowChanges:
    """Bans, biases and penalties of likely tokens and others, ids more than once."""
    vocab = len(row)
    likely = np.argsort(-row, kind="stable")[:40]
    ids = np.concatenate([likely, rng.integers(0, vocab, 60), likely[::-1]])
    terms = np.array([-0.0, 1.3, 0.4, 0.7], dtype=np.float32) * np.ones((len(ids), 1), dtype=np.float32)
    terms[:, 2] *= rng.integers(0, 5, len(ids))
    return joined([bans(likely[:2]), biases({int(likely[-1]): 3.3, 0: -1.7}), RowChanges(ids, terms)])


@pytest.mark.parametrize("params", ALL_PARAMS.values(), ids=ALL_PARAMS)
@pytest.mark.parametrize("vocab", [41, 257, 1025, 40_003])
def test_changed_rows_have_choices_of_the_law(native: NativeScan, vocab: int, params: SamplingParams) -> None:
    lines, rng = list(rows(vocab).values()), np.random.default_rng(vocab)
    for block in blocks(lines).values():
        numbers = [*range(len(lines)), *range(len(lines))]
        of = [some_changes(rng, block[row]) if n % 3 else NOTHING for n, row in enumerate(numbers)]
        check(native, block, numbers, asked([params] * len(of), range(7, 7 + len(of)), 0), of)


VOCAB = 40
LOGIT = st.one_of(
    st.sampled_from(
        [0.0, -0.0, 1.0, 1.0000001, -1.0, -math.inf, 3e38, -3e38, 1e-45, -1e-40, math.nan, math.inf]
    ),
    st.floats(-30, 30, width=32),
)
TERMS = st.tuples(
    st.integers(0, VOCAB - 1),
    st.one_of(st.sampled_from([-0.0, 0.0, -math.inf]), st.floats(-100, 100, width=32)),
    st.one_of(st.just(1.0), st.floats(0.125, 10, width=32)),
    st.floats(-20, 20, width=32),
    st.floats(-2, 2, width=32),
)


def row_changes(entries: Sequence[tuple[int, float, float, float, float]]) -> RowChanges:
    ids = np.array([token for token, *_ in entries], dtype=np.int64)
    return RowChanges(ids, np.array([terms for _, *terms in entries], dtype=np.float32).reshape(-1, 4))


# About 4 s: the native law against NumPy's, with drawn rows.
@settings(max_examples=150)
@given(
    lines=st.lists(st.lists(LOGIT, min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=3),
    entries=st.lists(st.lists(TERMS, max_size=12), min_size=4, max_size=4),
    params=st.builds(
        SamplingParams,
        temperature=st.one_of(st.sampled_from([0.0, 1e-5, 1.0, 1e20, 1e40]), st.floats(1e-3, 20)),
        top_k=st.integers(0, VOCAB + 5),
        top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1)),
        min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    ),
    seed=st.integers(0, 2**63 - 1),
)
def test_choices_of_any_rows_with_any_changes(
    lines: list[list[float]],
    entries: list[list[tuple[int, float, float, float, float]]],
    params: SamplingParams,
    seed: int,
) -> None:
    native, of = native_scan(), [row_changes(own) for own in entries]
    requests = asked([params] * 4, [seed] * 4, 0)
    with np.errstate(over="ignore", invalid="ignore"):  # the law's, of differences that float32 does not have
        for block in blocks([np.array(line, dtype=np.float32) for line in lines]).values():
            check(native, block, [n % len(lines) for n in range(4)], requests, of)


def test_a_product_is_rounded_before_something_is_taken_from_it() -> None:
    rng = np.random.default_rng(4)
    logits = -np.abs(rng.normal(size=4000) * 5).astype(np.float32)
    terms = np.tile(np.array([-0.0, 1.1, 0, 0], dtype=np.float32), (4000, 1))
    terms[:, 2] = rng.normal(size=4000)
    apart = logits * terms[:, 1] - terms[:, 2]
    at_once = (logits.astype(np.float64) * terms[:, 1] - terms[:, 2]).astype(np.float32)
    assert (apart != at_once).mean() > 0.1, "a fused multiply and subtract would be seen"
    assert_same_bits(logits, terms)


def assert_same_bits(logits: Row, terms: NDArray[np.float32]) -> None:
    """Changed logits equal NumPy's, and the first of two equal ones is chosen."""
    native, count = native_scan(), len(logits)
    expected = logits.copy()
    RowChanges(np.arange(count), terms).apply(expected)
    finite = np.isfinite(expected)
    logits, terms, expected = logits[finite], terms[finite], expected[finite]
    requests = asked([SamplingParams(temperature=0)] * len(logits), [0] * len(logits), 0)
    for changed in (0, 1):
        lines = np.stack([logits, expected] if changed == 0 else [expected, logits], axis=1)
        own = [RowChanges(np.array([changed]), term[None]) for term in terms]
        if own:
            got = native.choices(LogitBlock(lines), np.arange(len(own)), requests, Changes.of(own))
            assert not got.any(), (logits[got > 0], terms[got > 0])


def test_a_row_left_to_the_law_is_changed_there(native: NativeScan, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = spied(monkeypatch, sampling, "choice", lambda row, *_: row)
    for block in blocks([np.array([5, 0, 0], dtype=np.float32), np.zeros(3, dtype=np.float32)]).values():
        requests = asked([SamplingParams(top_p=0.5)] * 30, range(30), 3)
        # Half of two equal ones is a matter of rounding.
        of = [bans([0]) if n % 2 else bans([2]) for n in range(30)]
        check(native, block, [0 if n % 2 else 1 for n in range(30)], requests, of)
        assert len(asked_for) == 30
        assert {tuple(row.tolist()) for row in asked_for} == {(-math.inf, 0, 0), (0, 0, -math.inf)}
        asked_for.clear()


@pytest.mark.parametrize("params", ALL_PARAMS.values(), ids=ALL_PARAMS)
def test_changes_that_leave_no_token_cost_no_other_row(native: NativeScan, params: SamplingParams) -> None:
    block = blocks([rows(70)["wide"], np.full(70, np.nan, dtype=np.float32)])
    requests, of = asked([params] * 4, [1] * 4, 0), [bans(range(70)), bans(range(69)), NOTHING, bans([3])]
    for lying in block.values():
        got = check(native, lying, [0, 0, 1, 1], requests, of)
        assert got == [NO_TOKEN, 69, NO_TOKEN, NO_TOKEN]
        # If NaNs are banned, only numbers are left.
        [got_behind] = check(native, lying, [1], requests[:1], [joined([bans(range(70)), biases({4: 1.0})])])
        assert got_behind == NO_TOKEN


def test_with_any_number_of_threads(native: NativeScan) -> None:
    lines, rng = list(rows(40_003).values()), np.random.default_rng(0)
    numbers, block = np.arange(60) % len(lines), LogitBlock(np.stack(lines))
    of = Changes.of([some_changes(rng, lines[row]) for row in numbers])
    requests = asked([list(ALL_PARAMS.values())[i % len(ALL_PARAMS)] for i in range(60)], range(60), 0)

    def answer() -> list[Any]:
        found = native.likeliest(block, numbers, 9, np.full(60, 0.8))
        chosen = [native.choices(block, numbers, requests, changes) for changes in (None, of)]
        return [part.tolist() for part in (*chosen, *found)]

    one, *others = with_threads(answer)
    assert others == [one, one]


def test_tokens_that_rows_lack_are_refused(native: NativeScan) -> None:
    block = LogitBlock(np.zeros((3, 20), dtype=np.float32))
    requests = asked([SamplingParams()] * 2, [1, 1], 0)
    for scan in (native, NUMPY):
        for wrong in (20, 2**62, -1, -(2**62)):
            for of in ([bans([3]), bans([3, wrong])], [bans([wrong]), NOTHING]):
                with pytest.raises(IndexError, match=r"got changes of token ids .* in rows of 20 logits"):
                    scan.choices(block, np.array([0, 2]), requests, Changes.of(of))
        with pytest.raises(IndexError, match=r"got rows 0 \.\. 3 of a block of 3"):
            scan.choices(block, np.array([0, 3]), requests, Changes.of([bans([1]), NOTHING]))


def test_arrays_of_another_kind_are_refused(native: NativeScan) -> None:
    block, numbers = LogitBlock(np.zeros((3, 20), dtype=np.float32)), np.arange(2, dtype=np.int64)
    requests = asked([SamplingParams()] * 2, [1, 1], 0)
    good = Changes.of([bans([3, 4]), bans([5])])
    for wrong, said in (
        ({"ends": good.ends[:1]}, r"ends of changes must be contiguous int64 \[2\], got int64 \[1\]"),
        ({"ends": good.ends + 1}, r"tokens of changes must be contiguous int64 \[4\], got int64 \[3\]"),
        ({"terms": good.terms[:, :3]}, r"terms of changes must be .* \[3, 4\], got float32 \[3, 3\]"),
        ({"terms": good.terms.T.copy().T}, r"terms of changes must be contiguous"),
    ):
        with pytest.raises(TypeError, match=f"the {said}"):
            native.choices(block, numbers, requests, good._replace(**wrong))
    with pytest.raises(IndexError, match=r"row ends \[4, 3\]"):
        native.choices(block, numbers, requests, good._replace(ends=np.array([4, 3])))
