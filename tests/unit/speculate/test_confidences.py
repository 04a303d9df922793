"""Confidences of speculators: numbers from 0 to 1, and the handling of others."""

from __future__ import annotations

import math

import pytest

from specinfer.speculate.ensemble import Ensemble
from specinfer.speculate.policy.policy import SpeculationPolicy, StepReport
from tests import plans
from tests.unit.speculate.guessers import Fan, Levels, entry


@pytest.mark.parametrize(
    ("odd", "complaint"),
    [
        (math.nan, "a confidence of nan; confidences are from 0 to 1, so it counts as 0;"),
        (math.inf, "a confidence of inf; confidences are from 0 to 1, so it counts as 1;"),
        (-math.inf, "a confidence of -inf; confidences are from 0 to 1, so it counts as 0;"),
        (1.5, "a confidence of 1.5; confidences are from 0 to 1, so it counts as 1;"),
        (-1, "a confidence of -1.0; confidences are from 0 to 1, so it counts as 0;"),
        (10**400, "a confidence of an int of 1329 bits; confidences are from 0 to 1, so it counts as 1;"),
    ],
)
@pytest.mark.parametrize("kind", [Fan, Levels])
def test_one_that_is_not_from_0_to_1_is_logged_once_and_counts_as_the_nearer_of_them(
    kind: type[Fan | Levels], odd: float, complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    ensemble = Ensemble([kind("odd", [5, 6], [0.9, odd])], vocab=99, policy=SpeculationPolicy())
    for _ in range(3):
        (tree,) = ensemble.propose(plans.plan(entry(9)))
        assert tree.token_ids == (7, 5, 6)
        assert tree.likelihoods() == [1.0, 0.9, (0.9 if kind is Levels else 1.0) * (odd > 0)]
        ensemble.observe(StepReport([plans.outcome(5)]))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"speculator 'odd' gave {complaint}")
