"""Freed memory, in a separate process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes, sys
from pathlib import Path

from specinfer.tune.trainer import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
kept = sys.argv[1] == "kept" and keep_freed_memory()


def resident():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


before = resident()
block = libc.malloc(1 << 24)
libc.memset(block, 1, 1 << 24)
libc.free(block)
print(kept, resident() - before > 1 << 23)
"""

_CACHES = """
import psutil, torch

from specinfer.runtime.kv_cache import KvCache
from specinfer.tune.trainer import keep_freed_memory

assert keep_freed_memory()


def cache():
    slots = (1 << 28) // KvCache.bytes_per_slot(4, 8, 64, torch.float32)
    shape = {"num_layers": 4, "num_slots": slots, "num_kv_heads": 8, "head_dim": 64}
    return KvCache(**shape, dtype=torch.float32, device=torch.device("cpu"))


before = psutil.Process().memory_info().rss
cache().keys[0].fill_(1.0)
behind = cache()
taken = psutil.Process().memory_info().rss - before
print(taken < 1 << 23, bool(behind.keys[0].any()))
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")


@pytest.mark.parametrize(("how", "said"), [("given back", "False False"), ("kept", "True True")])
def test_what_is_freed_stays_where_that_was_asked_for(how: str, said: str) -> None:
    found = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == said


def test_a_cache_behind_another_takes_memory_where_it_is_written_only() -> None:
    found = subprocess.run([sys.executable, "-c", _CACHES], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True False"
