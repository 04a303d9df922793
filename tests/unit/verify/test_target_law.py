"""Sampling parameters to a law, against an oracle that sorts everything."""

import math

import numpy as np
import pytest

from specinfer.errors import LogitsError
from specinfer.sampling_params import SamplingParams
from specinfer.verify.coupled import coupled_choice
from specinfer.verify.target_law import MASS_ERROR, RowScan, most_likely, target_law


def oracle(logits, params):
    """temperature -> top_k -> top_p -> min_p by a full sort, on normalised float64 laws, [vocab]."""
    order = np.argsort(-logits, kind="stable")
    p = np.exp((logits.astype(np.float64) - float(logits.max())) / params.temperature)
    p /= p.sum()
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= params.top_p]] = 0
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


PARAMS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (0.3, 1.0, 2.5)
    for k in (0, 1, 7, 300, 10**6)
    for p in (1.0, 0.95, 0.4, 1e-9)
    for m in (0.0, 0.05, 1.0)
]
ROWS = {
    "small": np.random.default_rng(0).normal(size=11) * 2,
    "wide": np.random.default_rng(1).normal(size=5003),
    "peaked": np.random.default_rng(2).normal(size=5003) * 6,
    "banned": np.where(np.arange(4000) % 3 == 0, -np.inf, np.random.default_rng(3).normal(size=4000) * 3),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_combination_gives_the_oracles_law(row):
    logits = row.astype(np.float32)
    for params in PARAMS:
        law = target_law(logits, params)
        expected = oracle(logits, params)
        assert np.abs(law.dense() - expected).max() < 1e-12, params
        if law.ids is not None:
            assert sorted(law.ids.tolist()) == np.flatnonzero(expected).tolist(), params
            assert (np.diff(law.probabilities()) <= 0).all(), "most likely first"
            assert law.top == 0


def test_ties_at_the_kth_logit_keep_the_lowest_ids():
    logits = np.array([1, 2, 3, 2, 2, 3, 2], dtype=np.float32)
    assert target_law(logits, SamplingParams(top_k=4)).ids.tolist() == [2, 5, 1, 3]
    # p = (.2, .2, .2, .2, .2): the shortest prefix of at least half is three tokens
    assert target_law(np.zeros(5, dtype=np.float32), SamplingParams(top_p=0.5)).ids.tolist() == [0, 1, 2]
    assert target_law(logits, SamplingParams(min_p=1.0)).ids.tolist() == [2, 5]


def test_greedy_is_a_point_mass_on_the_lowest_argmax():
    law = target_law(np.array([1, 5, 5, 0], dtype=np.float32), SamplingParams(temperature=0, top_k=3))
    assert law.ids.tolist() == [1]
    assert law.dense().tolist() == [0, 1, 0, 0]
    assert coupled_choice(law, 3, 3) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_row_is_refused(bad):
    logits = np.zeros(50, dtype=np.float32)
    logits[31] = bad
    for params in (SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=3)):
        with pytest.raises(LogitsError, match="logit 31 of 50"):
            target_law(logits, params)
    with pytest.raises(LogitsError, match="is -inf"):
        target_law(np.full(4, -np.inf, dtype=np.float32), SamplingParams())


@pytest.mark.parametrize("size", [1, 5, 64, 1000, 9999])
def test_most_likely_is_a_full_stable_sort(size):
    rng = np.random.default_rng(size)
    for row in (
        rng.normal(size=size),
        rng.integers(0, 4, size),
        np.where(rng.random(size) < 0.7, -np.inf, 1),
    ):
        logits = row.astype(np.float32)
        order = np.argsort(-logits, kind="stable")
        order = order[logits[order] > -np.inf]
        for n in (1, 3, 50, 700, size, size + 5):
            assert most_likely(logits, n).tolist() == order[:n].tolist()


class Skewed(RowScan):
    """Scans whose mass is as wrong as it may be."""

    def __init__(self, error):
        self.error = error

    def mass(self, logits, highest, temperature):
        exact = float(np.exp((logits.astype(np.float64) - highest) / temperature).sum())
        return exact * (1 + self.error)


@pytest.mark.parametrize("error", [-0.99 * MASS_ERROR, 0.99 * MASS_ERROR])
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.95, 1 - 1e-7])
def test_the_cut_of_top_p_does_not_depend_on_the_error_of_the_mass(top_p, error):
    for row in (*ROWS.values(), np.zeros(4096), np.repeat([0.0, 1.0], 512)):
        logits = row.astype(np.float32)
        params = SamplingParams(temperature=0.9, top_p=top_p)
        exact = target_law(logits, params, Skewed(0.0))
        assert target_law(logits, params, Skewed(error)).ids.tolist() == exact.ids.tolist()
        assert target_law(logits, params).ids.tolist() == exact.ids.tolist()
