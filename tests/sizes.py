"""Bytes allocated by malloc."""

from __future__ import annotations

import ctypes


class _Mallinfo(ctypes.Structure):
    """glibc's heap statistics, as malloc.h defines them."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def malloced() -> int | None:
    """Return the bytes in use by malloc, or None without glibc."""
    asked = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if asked is None:
        return None
    asked.restype = _Mallinfo
    found = asked()
    return int(found.uordblks + found.hblkhd)
