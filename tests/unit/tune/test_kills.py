"""`specinfer tune` killed with SIGKILL, so that nothing of it ends in order, and gone on with."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specinfer.heads.checkpoint import HeadFolder
from specinfer.models.open_model import open_model
from specinfer.tune.training import read_checkpoint
from tests.unit.tune.conftest import outputs_with

pytestmark = pytest.mark.thorough

_MINUTES = 0.06  # length of the first run, a third of it for collecting; each later run adds the same
_PATIENCE = 120.0  # seconds until a run writes the file
# Files after which a run is killed: its claim, its first draft, a checkpoint.
_SEEN = ("work/tuning.json", "config.json", "work/checkpoint.safetensors")
_SMALL = (
    "--dtype float32 --kv-cache-memory 16MB --max-context 64 --max-tokens 8 --raw --vocabulary 32 --depth 3"
)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_who_is_killed_at_any_moment_goes_on_and_ends_with_a_draft(
    target: Path, prompts: Path, tmp_path: Path
) -> None:
    moments, out, before, kills = random.Random(0), tmp_path / "head", 0, 0
    for number, name in enumerate(_SEEN):
        minutes = _MINUTES * (1 + number)
        kills += _killed(_command(target, prompts, out, minutes), out / name, moments.uniform(0.0, 0.3))
        if (out / "config.json").exists():
            opened = open_model(target)
            HeadFolder(out, opened.config).module(opened)  # whole, as the kill left it
        steps = _steps(out)
        assert steps >= before, "what a checkpoint had is not lost"
        before = steps
    assert before > 0
    assert kills > 1, "most runs were not at their end"
    ending = _command(target, prompts, out, _MINUTES * (1 + len(_SEEN)))
    done = subprocess.run(ending, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"--draft {out}" in done.stdout
    assert _steps(out) > before
    assert "## What it is worth" in (out / "README.md").read_text()
    [output] = outputs_with(out, target, prompts=["2 * 3"])
    assert sum(output.figures.drafted_per_depth) > 0, "and it has guessed"


def _command(target: Path, prompts: Path, out: Path, minutes: float) -> list[str]:
    resume = ["--resume"] if (out / "work" / "tuning.json").exists() else []
    named = ["--model", str(target), "--prompts", str(prompts), "--out", str(out), *_SMALL.split()]
    return [sys.executable, "-m", "specinfer", "tune", *named, "--minutes", str(minutes), *resume]


def _killed(command: list[str], seen: Path, later: float) -> bool:
    """Kill a run `seconds` after it has written a file; return False if it ended before."""
    old = _written(seen)
    deadline = time.monotonic() + _PATIENCE
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while _written(seen) == old:
                assert process.poll() is None, "it ended by itself"
                assert time.monotonic() < deadline, f"it has not written {seen.name}"
                time.sleep(0.002)
            time.sleep(later)
        finally:
            process.kill()
    assert process.returncode in (-signal.SIGKILL, 0)
    return process.returncode != 0


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


def _steps(out: Path) -> int:
    kept = out / "work" / "checkpoint.safetensors"
    return read_checkpoint(kept).state.steps if kept.exists() else 0
