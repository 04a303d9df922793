"""How much memory malloc has given out."""

from __future__ import annotations

import ctypes


class _Mallinfo(ctypes.Structure):
    """What glibc says of its heap, as malloc.h has it."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def malloced() -> int | None:
    """The bytes that malloc has given out and not got back; None where it does not say."""
    asked = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if asked is None:
        return None
    asked.restype = _Mallinfo
    found = asked()
    return int(found.uordblks + found.hblkhd)
