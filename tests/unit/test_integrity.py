"""An inconsistent internal state is refused, also under `python -O`, which drops every assert."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "said"), [([], "with asserts\n"), (["-O"], "without asserts\n")], ids=["python", "python -O"]
)
def test_no_broken_state_goes_unnoticed(options: list[str], said: str) -> None:
    command = [sys.executable, *options, "-m", "tests.broken_states"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HOME)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", said)
