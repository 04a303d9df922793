"""What malloc does with memory that is freed."""

from __future__ import annotations

import ctypes
from typing import Final

# Names of glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_KEPT: Final = 1 << 30  # bytes
_LARGEST: Final = (1 << 30, 1 << 25)  # bytes of a block; older versions of glibc take no more than the latter


def keep_freed_memory() -> bool:
    """Let the process keep what it frees, as far as the C library can be told to; whether it could.

    A step of training allocates what the one before it freed, a few hundred tensors of megabytes. By default
    glibc gives such blocks back and maps new ones, whose pages the kernel fills with zeros, for one thread of
    the process at a time: that was a fifth of one thread's time, and a quarter of two's (docs/log.md). Other
    threads than the main one still give back blocks of 64 MB and more.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    kept = bool(mallopt(_M_TRIM_THRESHOLD, _KEPT))
    return any(mallopt(_M_MMAP_THRESHOLD, size) for size in _LARGEST) and kept
