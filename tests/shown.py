"""Kinds of Progress that record."""

from __future__ import annotations

from specinfer.progress import Progress


class Lines(Progress):
    """`lines` has what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


class Shown(Progress):
    """`works` has the label and the number of units of each finished piece of work."""

    def __init__(self) -> None:
        self.works: list[tuple[str, int]] = []
        self._label, self._total, self._done = "", 0, 0

    def start(self, total: int | None, label: str, unit: str = "B") -> None:
        assert total is not None
        self._label, self._total, self._done = label, total, 0

    def advance(self, n: int) -> None:
        assert n >= 0
        self._done += n

    def finish(self) -> None:
        assert self._done == self._total, f"{self._label}: {self._done} of {self._total}"
        self.works.append((self._label, self._total))
