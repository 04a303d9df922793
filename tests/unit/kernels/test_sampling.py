"""The native scans against their NumPy twins: the same ids, a mass within its error, the same choices."""

from __future__ import annotations

import numpy as np
import pytest

from specinfer.kernels.sampling import NativeScan
from specinfer.sampling_params import SamplingParams
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.draws import coupled_children
from specinfer.verify.coupled import coupled_choice
from specinfer.verify.scan import NUMPY
from specinfer.verify.target_law import MASS_ERROR, Law, target_law
from tests.unit.kernels.logit_rows import PARAMS, SIZES, native_scan, rows


@pytest.fixture(scope="module")
def native() -> NativeScan:
    return native_scan()


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
def test_laws_choices_and_guesses_are_the_twins(
    native: NativeScan, vocab: int, params: SamplingParams
) -> None:
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
