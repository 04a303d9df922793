"""Sampling parameters to a law, against an oracle that sorts everything."""

import math

import numpy as np
import pytest

from specinfer.errors import LogitsError
from specinfer.sampling_params import SamplingParams
from specinfer.verify import noise
from specinfer.verify.coupled import coupled_choice, coupled_top_k
from specinfer.verify.target_law import MASS_ERROR, RowScan, most_likely, target_law
from tests.goodness import chi_square, kolmogorov
from tests.oracles import verification
from tests.unit.kernels import logit_rows


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


# Coupled choices.


def dense_choice(law, seed, position):
    """The argmax over the whole support, without the screen."""
    ids = np.arange(law.vocab) if law.ids is None else law.ids
    return int(ids[np.argmin(np.log(noise.exponentials(seed, position, ids)) - law.log_weights())])


SHAPES = {
    **logit_rows.SHAPES,
    "two ahead": lambda rng, vocab: rng.normal(size=vocab) + 30 * (np.arange(vocab) >= vocab - 2),
}


@pytest.mark.thorough
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("vocab", [1, 2, 50, 256, 257, 1025, 40_000])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 5.0, 1e20, 1e200])
def test_the_screened_choice_is_the_dense_choice(shape, vocab, temperature):
    rng = np.random.default_rng([vocab, 3])
    logits = shape(rng, vocab).astype(np.float32)
    logits[-1] = logits.max() if np.isfinite(logits.max()) else 0.0
    for params in (
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_k=40),
        SamplingParams(temperature=temperature, top_k=vocab // 2),
    ):
        law = target_law(logits, params)
        for seed in range(6 if vocab > 5000 else 30):
            choice = coupled_choice(law, seed, 12)
            assert choice == dense_choice(law, seed, 12)
            assert np.isfinite(logits[choice])


def test_the_dense_choice_is_the_plain_oracles():
    rng = np.random.default_rng(1)
    for seed in range(200):
        law = target_law(rng.normal(size=9).astype(np.float32), SamplingParams(top_k=seed % 9))
        assert coupled_choice(law, seed, 5) == verification.coupled_choice(law.dense().tolist(), seed, 5)


def test_top_k_is_the_order_of_the_oracles_scores():
    logits = np.random.default_rng(5).normal(size=12).astype(np.float32)
    for seed in range(50):
        law = target_law(logits, SamplingParams())
        scores = verification.coupled_scores(law.dense().tolist(), seed, 2)
        expected = sorted(range(12), key=lambda token: -scores[token])[:4]
        assert coupled_top_k(law, seed, 2, 4).tolist() == expected


# Their noise.


IDS = np.arange(50_000)
KNOWN_EXPONENTIALS = [2.49242529397186, 0.5789851488681405, 0.2261085254134915]
KNOWN_UNIFORMS = [0.8847898165349132, 0.39688065998379773]


def test_a_value_is_a_function_of_seed_position_and_id_alone():
    whole = noise.exponentials(7, 3, IDS)
    some = np.array([49_999, 12, 12, 0])
    assert (noise.exponentials(7, 3, some) == whole[some]).all()
    assert noise.exponentials(7, 3, np.array([12]))[0] != noise.exponentials(7, 4, np.array([12]))[0]
    assert noise.exponentials(7, 3, np.array([12]))[0] != noise.exponentials(8, 3, np.array([12]))[0]
    assert noise.exponentials(3, 7, np.array([12]))[0] != whole[12]


def test_known_values_pin_the_text_of_every_seed():
    # A change here changes what every stored seed generates.
    assert noise.exponentials(0, 0, np.array([0, 1, 151_935])) == pytest.approx(KNOWN_EXPONENTIALS, rel=1e-14)
    assert [noise.uniform(0, 0, 0), noise.uniform(2**63 - 1, 10**6, 5)] == KNOWN_UNIFORMS


def test_it_agrees_with_the_oracle():
    for seed, position in [(0, 0), (1, 0), (2**63 - 1, 131_072)]:
        ids = np.array([0, 1, 2, 77, 151_935, 262_143])
        oracle = [verification.exponential(seed, position, token) for token in ids.tolist()]
        assert noise.exponentials(seed, position, ids) == pytest.approx(oracle, rel=1e-14)


def uniforms(seed, position, ids=IDS):
    return -np.expm1(-noise.exponentials(seed, position, ids))


def of_one_id(first):
    return np.array([uniforms(5, i, np.array([321]))[0] for i in range(first, first + 4000)])


NEIGHBOURS = {
    "ids": lambda: (uniforms(5, 9)[:-1], uniforms(5, 9)[1:]),
    "even and odd ids": lambda: (uniforms(5, 9)[::2], uniforms(5, 9)[1::2]),
    "positions": lambda: (uniforms(5, 9), uniforms(5, 10)),
    "seeds": lambda: (uniforms(5, 9), uniforms(6, 9)),
    "far seeds": lambda: (uniforms(5, 9), uniforms(5 + 2**32, 9)),
    "seed and position exchanged": lambda: (uniforms(5, 9), uniforms(9, 5)),
    "one id over positions": lambda: (of_one_id(0), of_one_id(1)),
}


@pytest.mark.parametrize("pair", NEIGHBOURS.values(), ids=NEIGHBOURS)
def test_neighbours_are_independent(pair):
    some, others = pair()
    cells = (some * 16).astype(int) * 16 + (others * 16).astype(int)
    assert chi_square(np.bincount(cells, minlength=256)) > 1e-3


def test_one_bit_of_seed_position_or_id_turns_half_of_the_upper_half():
    def highs(seed, position, ids):
        return noise.high_halves(noise.race_key(seed, position), noise.id_hashes(ids))

    ids = np.arange(4096)
    base = highs(40, 100, ids)
    others = [highs(40 ^ 1 << bit, 100, ids) for bit in range(0, 63, 7)]
    others += [highs(40, 100 ^ 1 << bit, ids) for bit in range(0, 20, 3)]
    others += [highs(40, 100, ids ^ 1 << bit) for bit in range(18)]
    for other in others:
        turned = np.unpackbits((base ^ other).view(np.uint8)).mean()
        assert turned == pytest.approx(0.5, abs=0.02)


def test_values_are_bounded_and_no_less_than_their_uniform():
    highs = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1], dtype=np.uint32)
    values = noise.exponentials_from(highs, 0, np.zeros(5, dtype=np.int64))
    assert (np.diff(values) > 0).all()
    assert values[0] >= 2.0**-65
    assert values[-1] < 46
    assert (values >= highs / 2**32).all()
    assert values[2] == pytest.approx(math.log(2), rel=1e-8)


def test_verifier_uniforms_are_uniform_and_have_a_stream_of_their_own():
    values = np.array([noise.uniform(1, position, turn) for position in range(2000) for turn in range(5)])
    assert kolmogorov(values, lambda x: x) > 1e-3
    assert 0 <= values.min() <= values.max() < 1
    race = uniforms(1, 0, np.arange(5))
    assert not np.isclose(values[:5, None], race[None, :]).any()
