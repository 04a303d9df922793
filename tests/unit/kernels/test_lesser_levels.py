"""The kernels' tests again, on every lesser kind of CPU than this one: each in a process that is told so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specinfer.kernels.levels import VARIABLE, levels_here

ROOT = Path(__file__).parents[3]
TESTS = [
    *(f"tests/unit/kernels/test_{name}.py" for name in ("floats", "quantized", "ops", "layers")),
    *(f"tests/unit/kernels/test_{name}.py" for name in ("sampling", "scans", "changed_rows")),
    "tests/unit/attention",
    "tests/unit/runtime/test_row_independence.py",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("level", [level.name for level in levels_here()[1:]])
def test_the_tests_of_kernels_pass_on_a_lesser_cpu(level: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, VARIABLE: level},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1], "a level that cannot be had would test nothing"
