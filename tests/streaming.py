"""A fake of the library functions that measure memory bandwidth."""

from __future__ import annotations


class Streaming:
    """A library whose memory streams at these speeds, in order; records its calls."""

    def __init__(self, *speeds: float) -> None:
        self.speeds = list(speeds)
        self.huge: list[tuple[int, int]] = []  # addresses and bytes
        self.streamed: list[tuple[int, int]] = []

    def want_huge_pages(self, address: int, size: int) -> None:
        self.huge.append((address, size))

    def stream(self, address: int, size: int) -> float:
        self.streamed.append((address, size))
        return self.speeds.pop(0)
