"""The Makefile runs each test once, its smokes exist, scripts are parsed, and `make test-gpu` runs here."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import SMOKES

pytestmark = pytest.mark.thorough  # pytest is started

ROOT = Path(__file__).parents[2]


def test_smokes_exist_and_only_make_test_runs_them() -> None:
    assert len(SMOKES) == 8
    makefile = (ROOT / "Makefile").read_text()
    assert '-m "$(QUICK)"' in makefile
    assert '-m "not ($(QUICK))"' in makefile, "so whatever the one target runs the other leaves out"
    [quick] = re.findall(r"^QUICK := (.*)$", makefile, re.M)
    tests = [f"tests/{test}" for test in SMOKES.values()]
    words = "-m pytest --collect-only -p no:cacheprovider -p no:xdist -m"
    command = [sys.executable, *words.split(), quick, *tests]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert {line for line in ran.stdout.splitlines() if line.startswith("tests/")} == {*tests}, ran.stdout


def test_shell_scripts_are_parsed() -> None:
    scripts = [script for folder in ("benchmarks", "deploy") for script in (ROOT / folder).glob("**/*.sh")]
    assert scripts
    for script in scripts:
        parsed = subprocess.run(["sh", "-n", script], capture_output=True, text=True)
        assert parsed.returncode == 0, parsed.stderr


PROGRAM = [sys.executable, "-m", "tests.gpu.run"]


@pytest.mark.slow
def test_all_checks_run_and_are_on_the_page(tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    command = [*PROGRAM, "--device", "cpu", "--quick", "--random", "--out", str(out)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    page = out.read_text()
    for words in ("logits of a tree, llama", "float32: greedy", "bfloat16: T=0.8", "served answer"):
        assert f"| {words}" in page
    assert "through transformers: greedy" in page
    assert "| with speculation | open |" in page
    assert f"torch {torch.__version__.partition('+')[0]}" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_one_line_says_so() -> None:
    ran = subprocess.run(PROGRAM, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "no CUDA card here, so nothing was tested" in ran.stderr
