"""CRC-32 of bytes in parts: two threads compute it, and a byte is read once for several checksums."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from concurrent.futures import Executor
from functools import lru_cache
from typing import Final

_POLYNOMIAL: Final = 0xEDB88320  # the lowest power is the highest bit
_ONE: Final = 1 << 31
_SMALL: Final = 1 << 16  # bytes that one thread reads


def start_crc32(data: memoryview, threads: Executor) -> Callable[[], int]:
    """Start to compute the CRC-32 of `data` in two threads; the returned function waits for it."""
    if len(data) < _SMALL:
        return lambda: zlib.crc32(data)
    middle = len(data) // 2
    first, second = threads.submit(zlib.crc32, data[:middle]), threads.submit(zlib.crc32, data[middle:])
    return lambda: joined_crc32(first.result(), second.result(), len(data) - middle)


def joined_crc32(first: int, second: int, length: int) -> int:
    """The CRC-32 of two texts together, from that of each; the second has `length` bytes."""
    return _product(first, _power(8 * length)) ^ second


@lru_cache(maxsize=4096)
def _power(n: int) -> int:
    """x^n modulo the polynomial."""
    if n == 0:
        return _ONE
    half = _power(n // 2)
    square = _product(half, half)
    return _times_x(square) if n % 2 else square


def _product(a: int, b: int) -> int:
    total = 0
    while a:
        if a & _ONE:
            total ^= b
        a, b = (a << 1) & 0xFFFFFFFF, _times_x(b)
    return total


def _times_x(a: int) -> int:
    return a >> 1 ^ (_POLYNOMIAL if a & 1 else 0)
