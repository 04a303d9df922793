"""Memory that is freed, in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes, sys
from pathlib import Path

from specinfer.tune.allocator import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)
libc.memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
told = sys.argv[1] == "kept" and keep_freed_memory()


def resident():
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


before = resident()
block = libc.malloc(1 << 24)
libc.memset(block, 1, 1 << 24)
libc.free(block)
print(told, resident() - before > 1 << 23)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.parametrize(("how", "said"), [("given back", "False False"), ("kept", "True True")])
def test_what_is_freed_stays_where_that_was_asked_for(how: str, said: str) -> None:
    found = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == said
