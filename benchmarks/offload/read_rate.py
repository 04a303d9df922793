"""Measures bytes per second of a file, read past the page cache by one reader in pieces of 4 MiB.

    python read_rate.py FILE SECONDS

Rates of the same minute are compared with it. It imports only the standard library.
"""

from __future__ import annotations

import mmap
import os
import sys
import time

PIECE = 4 << 20


def read_rate(path: str, seconds: float) -> float:
    """Read whole pieces from the file's start, repeatedly, for `seconds`; raises OSError."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    try:
        pieces = os.fstat(file).st_size // PIECE
        if not pieces:
            raise OSError(f"{path} is smaller than {PIECE} bytes")
        buffer = mmap.mmap(-1, PIECE)  # page-aligned, as O_DIRECT requires
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            done += os.preadv(file, [buffer], done // PIECE % pieces * PIECE)
        return done / (time.perf_counter() - began)
    finally:
        os.close(file)


if __name__ == "__main__":
    print(read_rate(sys.argv[1], float(sys.argv[2])))
