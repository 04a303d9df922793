"""Closing an LLM gives its memory back to the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import write_tiny_llama

PROGRAM = """
import sys, psutil
from specinfer import LLM, SamplingParams

def used():
    return psutil.Process().memory_full_info().uss >> 20

def run(model, **options):
    llm = LLM(model, kv_cache_memory="32MB", progress=None, **options)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    opened = used()
    llm.close()
    return opened, used()

run(sys.argv[1])  # imports, and what a process keeps once
before = used()
for quantization in ("none", "int8"):
    print(before, *run(sys.argv[2], quantization=quantization))
"""


@pytest.mark.slow  # starts a process with large weights
def test_a_closed_llm_leaves_the_process_as_small_as_before(tmp_path: Path, own_cache: Path) -> None:
    small = write_tiny_llama(tmp_path / "small", tokenizer=True)
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_layers": 8, "head_dim": 128}
    large = write_tiny_llama(tmp_path / "large", tokenizer=True, **shape)  # type: ignore[arg-type]
    command = [sys.executable, "-c", PROGRAM, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        before, opened, closed = map(int, line.split())
        assert opened > before + 40, lines
        assert closed <= 1.1 * before, lines
