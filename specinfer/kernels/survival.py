"""Runs the products of a native library once, in a process that may die of an instruction that the CPU lacks.

python -m specinfer.kernels.survival LIBRARY LEVEL      run by native.py; takes a fifth of a second
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

from specinfer.kernels.library import Library
from specinfer.kernels.machine import LEVELS
from specinfer.kernels.structures import KINDS, TYPES, BlockPartsArgs, ProductArgs

_CHANNELS, _INNER, _ROWS = 32, 256, (1, 33)  # few rows and many take different instructions
_BYTES: Final = max(_CHANNELS, *_ROWS) * _INNER * 4


def main(path: str, level: str) -> None:
    """Multiply zeros by zeros of each kind."""
    library = Library(Path(path), next(known for known in LEVELS if known.name == level))
    if not library.ready():
        sys.exit(1)  # says nothing; native.py checks it in its own process, too
    library.set_threads(1)
    zeros, out = ctypes.create_string_buffer(_BYTES), ctypes.create_string_buffer(_BYTES)
    at = ctypes.addressof(zeros)
    for kind in KINDS.values():
        product = ProductArgs(kind, at, at, at, at, _CHANNELS, _INNER)
        product.blocks = BlockPartsArgs(at, at, at, 1)
        for dtype in TYPES.values():
            for rows in _ROWS:
                library.multiply(ctypes.byref(product), dtype, at, rows, ctypes.addressof(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
