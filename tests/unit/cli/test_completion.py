"""Completion of bash, zsh and fish: scripts, and the program's answers to them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.conftest import Run

# How each shell passes the words typed so far, the last of them incomplete.
ASKED = {
    "bash": lambda words: {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)},
    "zsh": lambda words: {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)},
    "fish": lambda words: {"COMP_WORDS": " ".join(words), "COMP_CWORD": words[-1]},
}
PROGRAM = (
    "import sys; sys.argv[0] = 'specinfer'\n"
    "from specinfer.cli import main\n"
    "try: main()\n"
    "finally: assert 'torch' not in sys.modules"
)


def completed(shell: str, *words: str) -> str:
    """Return the program's completions for these words."""
    variables = {"_SPECINFER_COMPLETE": f"{shell}_complete", **ASKED[shell](["specinfer", *words])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("shell", ASKED)
def test_the_script_is_the_shells_and_names_the_program(shell: str, run: Run) -> None:
    status, script, err = run("completion", shell)
    assert (status, err) == (0, "")
    assert f"_SPECINFER_COMPLETE={shell}_complete" in script
    assert "specinfer" in script


@pytest.mark.parametrize("shell", ASKED)
def test_commands_are_completed(shell: str) -> None:
    answer = completed(shell, "ru")
    assert "run-batch" in answer
    assert "generate" not in answer


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_with_the_script(tmp_path: Path, run: Run) -> None:
    program = tmp_path / "specinfer"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m specinfer \"$@\"\n")
    program.chmod(0o755)
    script = run("completion", "bash")[1]
    typed = 'COMP_WORDS=(specinfer do); COMP_CWORD=1; _specinfer_completion specinfer; echo "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{typed}"],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("doctor", "")
