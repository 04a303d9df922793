"""How much memory objects take, found by looking at each of them, and malloc has given out."""

from __future__ import annotations

import ctypes
import gc
import sys
from types import FunctionType, ModuleType


def bytes_of(*roots: object) -> int:
    """The bytes of all objects that `roots` lead to, themselves included, each once; no code and no types."""
    seen: dict[int, object] = {}
    todo = [*roots]
    while todo:
        found = todo.pop()
        if id(found) not in seen and not isinstance(found, type | ModuleType | FunctionType):
            seen[id(found)] = found
            todo.extend(gc.get_referents(found))
    return sum(map(sys.getsizeof, seen.values()))


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
