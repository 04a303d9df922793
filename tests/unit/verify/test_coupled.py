"""The coupled choice equals its dense oracle; speculators share the noise."""

import numpy as np
import pytest

from specinfer.sampling_params import SamplingParams
from specinfer.verify import noise
from specinfer.verify.coupled import coupled_choice, coupled_top_k
from specinfer.verify.target_law import target_law
from tests.oracles import verification


def dense_choice(law, seed, position):
    """The argmax over the whole support, without the screen."""
    ids = np.arange(law.vocab) if law.ids is None else law.ids
    return int(ids[np.argmin(np.log(noise.exponentials(seed, position, ids)) - law.log_weights())])


SHAPES = {
    "flat": lambda rng, vocab: np.zeros(vocab),
    "wide": lambda rng, vocab: rng.normal(size=vocab),
    "peaked": lambda rng, vocab: rng.normal(size=vocab) * 8,
    "one far ahead": lambda rng, vocab: rng.normal(size=vocab) + 60 * (np.arange(vocab) == vocab // 2),
    "two ahead": lambda rng, vocab: rng.normal(size=vocab) + 30 * (np.arange(vocab) >= vocab - 2),
    "half banned": lambda rng, vocab: np.where(rng.random(vocab) < 0.5, -np.inf, rng.normal(size=vocab)),
    "far below zero": lambda rng, vocab: rng.normal(size=vocab) * 3 - 1e4,
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
