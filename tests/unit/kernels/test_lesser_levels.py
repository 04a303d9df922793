"""The kernels' tests again, with the libraries of every lesser kind of CPU than this one.

A level is the same C++ with other flags. Levels differ in the width of a register (vector.h, and so the rows
and channels of a loop), and in the rounding of products (the products, attention_blocks.h, powers in
attention.cpp). So tests of products and ops, which consist of such loops, run with all shapes of the best
level, and others with a part of their cases. They run in a process that has the level's library alone.

If registers are as wide as at the next lesser level, only tests of products and layers run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from specinfer.kernels.build import find_library
from specinfer.kernels.library import Library, load_library
from specinfer.kernels.machine import VARIABLE, Level, levels_here
from specinfer.kernels.native_ops import NativeOps
from tests.unit.kernels.test_recurrence import check_same_bits

UNIT: Final = Path(__file__).parents[1]
PRODUCTS: Final = [f"kernels/test_{name}.py" for name in ("products", "stored_blocks", "parts", "partials")]
PARTS: Final = {  # files, and which of their tests
    "products": (PRODUCTS, ""),
    "ops": (["kernels/test_ops.py"], ""),
    "reads-of-logits": (
        ["kernels/test_scans.py", "kernels/test_changed_rows.py"],
        "17 or 41 or 1025 or likeliest or race or rounded",
    ),
    "attention": (["attention/test_backends.py", "attention/test_independence.py"], "native"),
    "recurrences": (["kernels/test_recurrence.py"], ""),
    "rows-of-a-model": (["runtime/test_row_independence.py"], "native"),
    "layers": (
        ["models/test_switches.py"],
        "one_call or order or (company and native) or (chunks and int4)",
    ),
}
ONLY: Final = {"avxvnni": ("products", "layers")}
LESSER: Final = levels_here()[1:]


def test_every_file_that_runs_again_exists() -> None:
    """On a CPU without a lesser level only this finds a file that is gone."""
    assert all((UNIT / file).is_file() for files, _ in PARTS.values() for file in files)


@pytest.mark.slow  # a library is compiled
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("level", "part"),
    [(level.name, part) for level in LESSER for part in ONLY.get(level.name, PARTS)],
)
def test_the_tests_of_kernels_pass_on_a_lesser_cpu(
    level: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, level)
    assert load_library().level.name == level, "a level that cannot be had would test nothing"
    files, chosen = PARTS[part]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "not slow", "-k", chosen]
    command += [str(UNIT / file) for file in files]
    done = subprocess.run(command, cwd=UNIT.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
@pytest.mark.parametrize("level", LESSER, ids=lambda level: level.name)
def test_recurrences_have_the_bits_of_the_best_cpu(level: Level) -> None:
    one, other = (NativeOps(Library(find_library(own), own)) for own in (level, levels_here()[0]))
    check_same_bits(one, other)
