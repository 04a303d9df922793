"""Compiles and tries this machine's native kernels.

    python -m specinfer.kernels                   compiles them, if they are not there
    python -m specinfer.kernels LIBRARY LEVEL     multiplies once, for library.py; takes a fifth of a second

An installation runs the first, so that no question waits for a compiler. Without a compiler it prints why,
and ends with status 0: the kernels are compiled once a compiler is there, and PyTorch runs until then. The
second may die of an instruction that the CPU lacks.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Final

from specinfer.errors import SpecInferError
from specinfer.kernels.library import Library, load_library
from specinfer.kernels.machine import LEVELS
from specinfer.kernels.structures import KINDS, TYPES, BlockPartsArgs, ProductArgs
from specinfer.progress import ProgressBar

_CHANNELS, _INNER, _ROWS = 32, 256, (1, 33)  # few rows and many take different instructions
_BYTES: Final = max(_CHANNELS, *_ROWS) * _INNER * 4


def prepare() -> None:
    """Print the library that models will use."""
    try:
        library = load_library(ProgressBar())
    except SpecInferError as error:
        print(f"no native kernels, models will run slowly: {error}", file=sys.stderr)
        return
    print(f"native kernels for {library.level.words}: {library.path}", file=sys.stderr)


def multiply(path: str, level: str) -> None:
    """Multiply zeros by zeros of each kind."""
    library = Library(Path(path), next(known for known in LEVELS if known.name == level))
    if not library.ready():
        sys.exit(1)  # says nothing; library.py checks it in its own process, too
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
    multiply(*sys.argv[1:]) if sys.argv[1:] else prepare()
