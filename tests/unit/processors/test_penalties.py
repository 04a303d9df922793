"""Penalties of tokens that occur often, and of texts that go on; test_changes.py has the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from specinfer.processors.changes import Penalties


@pytest.mark.parametrize("committed", [0, 14, 15, 16, 40])
def test_a_token_that_occurs_often(committed: int) -> None:
    penalties = Penalties([2], repetition=2, frequency=0.5, presence=1)
    penalties.commit([3] * committed)
    for more in (1, 2, 30):
        row = np.zeros(8, dtype=np.float32)
        penalties.changes([3] * more).apply(row)
        assert row.tolist() == [0, 0, 0, -0.5 * (committed + more) - 1, 0, 0, 0, 0]


def test_what_was_given_out_stays_when_the_text_goes_on() -> None:
    penalties = Penalties([2], repetition=2, frequency=0.5, presence=1)
    before = penalties.changes([])
    ids, terms = before.ids.copy(), before.terms.copy()
    penalties.commit([2, 2, *range(5, 8)])
    assert (before.ids.tolist(), before.terms.tolist()) == (ids.tolist(), terms.tolist())
