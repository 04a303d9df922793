"""The targets of the Makefile run each test once, the eight smokes exist, and shell scripts are parsed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SMOKES

pytestmark = pytest.mark.thorough  # pytest is started twice

ROOT = Path(__file__).parents[2]


def test_smokes_exist_and_only_make_test_runs_them() -> None:
    assert len(SMOKES) == 8
    words = "-m pytest --collect-only -p no:cacheprovider -p no:xdist -m"
    collect = [sys.executable, *words.split()]
    tests = [f"tests/{test}" for test in SMOKES.values()]
    [quick] = [
        line.split(":= ")[1] for line in (ROOT / "Makefile").read_text().splitlines() if "QUICK :=" in line
    ]
    for marks, expected in ((quick, set(tests)), (f"not ({quick})", set())):
        ran = subprocess.run([*collect, marks, *tests], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert {line for line in ran.stdout.splitlines() if line.startswith("tests/")} == expected, ran.stdout


def test_shell_scripts_are_parsed() -> None:
    scripts = [script for folder in ("benchmarks", "deploy") for script in (ROOT / folder).glob("**/*.sh")]
    assert scripts
    for script in scripts:
        parsed = subprocess.run(["sh", "-n", script], capture_output=True, text=True)
        assert parsed.returncode == 0, parsed.stderr
