"""A real model in a memory group that its weights and the interpreter do not fit into."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.machines.memory_group import MemoryGroup, NoGroupError, Ran, memory_group
from tests.kernels import library_or_skip

from .models import smollm2

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
MEMORY = 500 << 20  # the interpreter takes 240 MB of it; the weights in bfloat16 are 330 MB
LIMIT = MEMORY + (60 << 20)  # pages of files that are read count, too
PROMPT = "What is gravity? Answer in two sentences."


def command(*flags: str) -> list[str]:
    program = [sys.executable, "-m", "specinfer", "generate", smollm2(), "--quantization", "none"]
    return [*program, "--max-tokens", "24", "--temperature", "0.8", "--seed", "3", *flags, PROMPT]


def streamed(folder: Path) -> tuple[str, ...]:
    return ("--memory", str(MEMORY), "--offload", "auto", "--offload-folder", str(folder))


def run(group: MemoryGroup, *flags: str) -> Ran:
    ran = group.run(command(*flags), timeout=120, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    assert ran.oom_kills == 0
    assert ran.peak_resident <= MEMORY
    return ran


def layers(ran: Ran) -> str:
    [count] = re.findall(r"\d+ of 30 layers streamed", ran.stderr)
    return str(count)


def test_memory_never_passes_the_limit_and_the_first_start_plans_as_the_second(tmp_path: Path) -> None:
    library_or_skip()
    whole = subprocess.run(command(), cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    try:
        with memory_group(LIMIT) as group:
            kill_while_it_prepares(group, tmp_path)
            first = run(group, *streamed(tmp_path))
            second = run(group, *streamed(tmp_path))
            refused = group.run(command("--memory", str(MEMORY)), timeout=120, cwd=ROOT)
    except NoGroupError as error:
        pytest.skip(f"no memory group can be made: {error}")
    assert [first.stdout, second.stdout] == [whole.stdout] * 2
    found = [int(layers(ran).split()[0]) for ran in (first, second)]
    assert abs(found[0] - found[1]) <= 1, "a process is never twice the same to the megabyte"
    assert refused.returncode == 2
    assert re.search(r"or --offload auto: \d+ of 30 layers streamed, .* a pass at ", refused.stderr)
    assert len([*tmp_path.glob("*.safetensors")]) >= 1
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock", ".safetensors"}


def kill_while_it_prepares(group: MemoryGroup, folder: Path) -> None:
    """Kill a start that has begun its file, and nothing of it is left."""
    args = group.inside(command(*streamed(folder)))
    process = subprocess.Popen(args, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not [*folder.glob("*.lock")]:
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
