"""Estimators, compared along traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.unit.benchmarks.conftest import Run

Script = Callable[[str], ModuleType]


def test_policy_estimator(script: Script, run: Run, traces: list[Path]) -> None:
    module = script("policy_estimator")
    options = ["--traces", str(traces[0]), "--fit", str(traces[1])]
    page = run(module, *options)
    losses, areas, errors, speeds = [
        [line for line in part.splitlines() if line.startswith("| played")]
        for part in "\n".join(page).split("\n## ")[1:]
    ]
    for [line] in (losses, areas, errors):
        assert len(line.split("|")) == 2 + 2 + len(module.ESTIMATORS)
    assert float(losses[0].split("|")[3]) > 0
    assert " to " in speeds[0]
    assert run(module, *options) == page


def test_how_well_an_estimator_knows_is_computed_right(script: Script) -> None:
    module = script("policy_estimator")
    rates, right = np.array([0.9, 0.9, 0.2, 0.2]), np.array([True, False, True, False])
    assert module.area(rates, right) == 0.5  # one pair in order, one the other way, two equal ones
    assert module.area(rates, np.array([True, True, False, False])) == 1
    assert module.calibration_error(rates, right) == pytest.approx((0.4 + 0.3) / 2)
    before, now = {"0": 2.0, "1": 4.0}, {"0": 1.0, "1": 2.0}
    assert module.compared(before, now) == [2, 2, 2]
    ratio, low, high = module.compared({"0": 1.0, "1": 1.0, "2": 3.0}, {"0": 1.0, "1": 2.0, "2": 2.0})
    assert low < ratio == 1 < high
