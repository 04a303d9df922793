"""The noise is uniform, independent between neighbours, bounded, and the same on every call."""

import math

import numpy as np
import pytest

from specinfer.verify import noise
from tests.goodness import chi_square, kolmogorov
from tests.oracles import verification

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
