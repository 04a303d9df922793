"""The program of `make test-gpu`, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = [sys.executable, "-m", "tests.gpu.run"]
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_all_checks_run_and_are_on_the_page(tmp_path: Path) -> None:
    out = tmp_path / "page.md"
    command = [*PROGRAM, "--device", "cpu", "--quick", "--random", "--out", str(out)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    page = out.read_text()
    for words in ("logits of a tree, llama", "float32: greedy", "bfloat16: T=0.8", "a server's answer"):
        assert f"| {words}" in page
    assert "through transformers: greedy" in page
    assert "| with speculation | open |" in page
    assert f"torch {torch.__version__.partition('+')[0]}" in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
@pytest.mark.thorough
def test_without_a_card_one_line_says_so() -> None:
    ran = subprocess.run(PROGRAM, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "no CUDA card here, so nothing was tested" in ran.stderr
