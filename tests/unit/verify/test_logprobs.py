"""Reported log-probabilities, raw ones and those of the chosen law; and blocks of logits."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from specinfer.kernels.choice import choose_kernels
from specinfer.request import Logprob
from specinfer.verify.logprobs import LOGPROB_BYTES, PromptLogprobs, Scores, raw_logprobs, report, score
from specinfer.verify.scan import NUMPY, LogitBlock, LogitType, Scan


class Characters:
    """A tokenizer whose token i is the character i."""

    def text_of(self, token_id: int) -> str:
        return chr(token_id)


def reported(row: list[float], chosen: int, top: int) -> list[tuple[int, float, int]]:
    found = report(np.array(row), chosen, top, Characters())  # type: ignore[arg-type]
    assert all(entry.text == chr(token) for token, entry in found.items())
    return [(token, entry.logprob, entry.rank) for token, entry in found.items()]


def test_figures_closer_than_float32_keep_their_order() -> None:
    row = [-20.0, -20.0 + 1e-9, -20.0 + 2e-9, -0.1]
    assert [token for token, *_ in reported(row, 3, 4)] == [3, 2, 1, 0]
    assert [rank for *_, rank in reported(row, 3, 4)] == [1, 2, 3, 4]


@given(
    row=st.lists(st.sampled_from([-math.inf, -3.0, -2.0, -1.0, -0.5]), min_size=1, max_size=12),
    top=st.integers(0, 14),
)
def test_the_likeliest_are_those_of_a_full_sort(row: list[float], top: int) -> None:
    order = [i for i in sorted(range(len(row)), key=lambda i: (-row[i], i)) if row[i] > -math.inf]
    assert [token for token, *_ in reported(row, 0, top)] == list(dict.fromkeys([0, *order[:top]]))


# Many rows at once, and what is kept of them.

SCANS = {"plain": NUMPY, "native": choose_kernels("auto", torch.device("cpu"))[0].scan}


@pytest.mark.parametrize("scan", SCANS.values(), ids=SCANS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("top", [0, 1, 5, 400])
def test_many_rows_have_the_figures_of_each_to_the_bit(scan: Scan, dtype: str, top: int) -> None:
    rng = np.random.default_rng(top)
    logits = rng.normal(size=(40, 300)).astype(np.float32) * 3
    logits[:, ::7] = np.round(logits[:, ::7])  # equal ones
    logits[3:9, 100:] = -np.inf
    block = LogitBlock(logits)
    if dtype == "bfloat16":
        block = LogitBlock((logits.view(np.uint32) >> 16).astype(np.uint16))
    rows, tokens = rng.permutation(40), rng.integers(0, 300, 40)
    found = PromptLogprobs(41, top)
    found.add(1, score(block, rows, tokens, top, scan), chr)
    for place, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
        want = report(raw_logprobs(block[row]), token, top, Characters())  # type: ignore[arg-type]
        got = found[1 + place]
        assert list(got.items()) == list(want.items())


def known(first: int, tokens: list[int]) -> tuple[int, Scores]:
    """The figures of these tokens alone, each its own rank."""
    ids = np.array([[token] for token in tokens], dtype=np.int32)
    return first, Scores(ids, -ids.astype(np.float64), ids + 1)


def test_a_prompts_reports_are_none_until_they_are_known() -> None:
    found = PromptLogprobs(4, 0)
    assert list(found) == [None] * 4
    found.add(*known(1, [7]), chr)
    found.add(*known(3, [9]), chr)
    want = (None, {7: Logprob(-7.0, 8, chr(7))}, None, {9: Logprob(-9.0, 10, chr(9))})
    assert found == want == found[:]
    assert (found[-1], found[1:3], len(found)) == (want[3], want[1:3], 4)
    found.add(*known(2, [8, 9]), chr)
    assert found != want
    assert found[2] == {8: Logprob(-8.0, 9, chr(8))}
    with pytest.raises(IndexError):
        found[4]


def test_a_prompts_reports_are_kept_and_sent_as_numbers() -> None:
    tokens, top = 4000, 20
    found = PromptLogprobs(tokens, top)
    made: list[int] = []

    def text_of(token: int) -> str:
        made.append(token)
        return "ab"

    ids = np.arange(tokens * (1 + top), dtype=np.int32).reshape(tokens, 1 + top) % 500
    scores = Scores(ids, -ids / 7, ids + 1)
    for first in range(1, tokens, 64):
        part = slice(first, min(first + 64, tokens))
        found.add(first, Scores(*(c[part] for c in scores)), text_of)
    assert len(made) == len(set(made)) <= 500, "the text of each token is made once"
    sent = pickle.dumps(found)
    assert len(sent) <= tokens * (1 + top) * LOGPROB_BYTES + 500 * 16 + tokens + 1000
    assert pickle.loads(sent) == found


VALUES = np.array([[1.5, -2.0, 0.0], [-np.inf, 3.25, 4.0], [0.5, 1.0, 2.0]], dtype=np.float32)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_rows_are_float32_and_those_of_an_address_are_shown_when_somebody_looks(kind: LogitType) -> None:
    made = VALUES if kind == "float32" else bfloat16(VALUES)
    shown: list[str] = []

    def show() -> NDArray[np.float32] | NDArray[np.uint16]:
        shown.append("once")
        return made

    block = LogitBlock.from_address(made.ctypes.data, kind, (3, 3), show)
    same = LogitBlock(made)
    for one in (block, same):
        assert (one.dtype, one.vocab, one.stride, len(one), one.address) == (kind, 3, 3, 3, made.ctypes.data)
    assert not shown
    for one in (block, same):
        assert [row.tolist() for row in one] == VALUES.tolist()
        assert all(row.dtype == np.float32 for row in one)
        with pytest.raises(IndexError):
            one[3]
    assert shown == ["once"]
