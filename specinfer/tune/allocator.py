"""What malloc does with memory that is freed."""

from __future__ import annotations

import ctypes
from typing import Final

# Names of glibc's malloc.h.
_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MOST: Final = 1 << 30  # bytes


def keep_freed_memory() -> bool:
    """Let the process keep what it frees, as far as the C library can be told to; whether it could.

    A step of training allocates what the one before it freed, a few hundred tensors of megabytes. By default
    glibc gives such blocks back and maps new ones, whose pages the kernel fills with zeros, for one thread at
    a time: two threads with a text each were hardly quicker than one (docs/log.md).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    mallopt.argtypes, mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(mallopt(_M_MMAP_THRESHOLD, _MOST) and mallopt(_M_TRIM_THRESHOLD, _MOST))
