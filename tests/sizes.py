"""How much memory objects take, found by looking at each of them."""

from __future__ import annotations

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
