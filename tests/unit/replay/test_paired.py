"""Ratios of seconds, and the intervals around them."""

from __future__ import annotations

import numpy as np
import pytest

from specinfer.replay.paired import speedup


def test_texts_are_paired() -> None:
    before = [1.0, 5.0, 2.0, 80.0] * 4
    found = speedup(before, [seconds / 2 for seconds in before])
    # Each text is twice as quick: however different they are, nobody doubts the ratio.
    assert (found.ratio, found.low, found.high) == (2.0, pytest.approx(2.0), pytest.approx(2.0))
    assert str(found) == "2.000 [2.000, 2.000]"


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random, held = np.random.default_rng(0), 0
    for _ in range(200):
        before = random.uniform(1, 3, 40)
        found = speedup(before.tolist(), (before * random.uniform(0.5, 1.5, 40)).tolist())
        held += found.low < 1.0 < found.high
    assert 180 <= held <= 198  # 190 on average


def test_one_text_has_no_interval() -> None:
    found = speedup([3.0], [2.0])
    assert (found.low, found.ratio, found.high) == (1.5, 1.5, 1.5)
