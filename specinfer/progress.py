"""Progress of long work: a bar on a terminal, a few plain lines elsewhere, nothing for short work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

SHOW_AFTER = 2.0  # seconds; shorter work shows nothing
LINE_SECONDS = 3.0  # between lines of a log
LINE_EVERY = 10.0  # seconds between plain lines when the total is unknown


class Progress:
    """Receives the progress of one task at a time; this base class shows nothing."""

    def start(self, total: int | None, label: str, unit: str = "B") -> None:
        """Start a task of `total` units (bytes for "B"); None: unknown."""

    def advance(self, n: int) -> None:
        """Add `n` finished units."""

    def finish(self) -> None:
        """End the task, successful or not."""

    def say(self, line: str) -> None:
        """Show a line for the user that stays visible."""

    @contextmanager
    def showing(self, total: int | None, label: str, unit: str = "B") -> Iterator[Self]:
        """Run the block as a task: `start` before it, `finish` after it."""
        self.start(total, label, unit)
        try:
            yield self
        finally:
            self.finish()


class NoProgress(Progress):
    """Shows nothing."""


class CheckedProgress(Progress):
    """Passes progress on to another one, and before each advance calls `check`, which may raise."""

    def __init__(self, progress: Progress, check: Callable[[], object]) -> None:
        self._progress = progress
        self._check = check

    def start(self, total: int | None, label: str, unit: str = "B") -> None:
        """Start a task."""
        self._progress.start(total, label, unit)

    def advance(self, n: int) -> None:
        """Check, and add `n` finished units."""
        self._check()
        self._progress.advance(n)

    def finish(self) -> None:
        """End the task."""
        self._progress.finish()

    def say(self, line: str) -> None:
        """Show a line."""
        self._progress.say(line)


class LineProgress(Progress):
    """Progress as lines of a log: one for each task, and one every few seconds while it lasts."""

    def __init__(
        self,
        write: Callable[[str], None],
        every: float = LINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Pass each line to `write`; `every` is the seconds between two lines of a task."""
        self._write = write
        self._every = every
        self._clock = clock
        self._label = ""

    def start(self, total: int | None, label: str, unit: str = "B") -> None:
        """Start a task."""
        self._total, self._label, self._unit, self._done = total, label, unit, 0
        self._began = self._last = self._clock()
        self._write(label if total is None else f"{label}: {format_units(total, unit)}")

    def advance(self, n: int) -> None:
        """Add `n` finished units."""
        self._done += n
        if self._label and (now := self._clock()) - self._last >= self._every:
            self._last = now
            part = f" ({100 * self._done // self._total}%)" if self._total else ""
            self._write(f"{self._label}: {format_units(self._done, self._unit)}{part}")

    def finish(self) -> None:
        """End the task; a long one gets a last line."""
        if self._label and self._last > self._began:
            self._write(f"{self._label}: finished after {self._clock() - self._began:.0f} s")
        self._label = ""


class ProgressBar(Progress):
    """Progress on stderr: a bar on a terminal, a line per 25% elsewhere, both after two seconds."""

    def __init__(
        self,
        stream: TextIO | None = None,
        show_after: float = SHOW_AFTER,
        clock: Callable[[], float] = time.monotonic,
        *,
        shows_lines: bool = True,
    ) -> None:
        """Write to `stream`, by default stderr; without `shows_lines`, `say` does nothing."""
        self._stream = sys.stderr if stream is None else stream
        self._show_after = show_after
        self._clock = clock
        self._shows_lines = shows_lines
        self._terminal = self._stream.isatty()
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._total: int | None = None
        self._label = ""
        self._unit = "B"
        self._done = 0
        self._began = 0.0
        self._last_line = 0.0
        self._quarter = 0  # the last 25% step that was printed
        self._lines = 0

    def start(self, total: int | None, label: str, unit: str = "B") -> None:
        """Start a task; a task that still runs is finished first."""
        self.finish()
        self._total, self._label, self._unit = total, label, unit
        self._done = self._quarter = self._lines = 0
        self._began = self._last_line = self._clock()

    def advance(self, n: int) -> None:
        """Add `n` finished units and show them, once the task has taken two seconds."""
        self._done += n
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done)
        elif self._clock() - self._began >= self._show_after:
            if self._terminal:
                self._open_bar()
            else:
                self._write_line()

    def finish(self) -> None:
        """Close the bar, or write a last line if lines were written."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None
        elif self._lines and self._quarter < 4:
            print(f"{self._label}: {self._amount(self._done)}, finished", file=self._stream, flush=True)
        self._lines = 0

    def say(self, line: str) -> None:
        """Write the line; ends a task that still runs."""
        self.finish()
        if self._shows_lines:
            print(line, file=self._stream, flush=True)

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as RichProgress

        amount = DownloadColumn() if self._unit == "B" else MofNCompleteColumn()
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            amount,
            TextColumn("" if self._unit == "B" else self._unit),
            TimeRemainingColumn(),
            console=Console(file=self._stream),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(self._label, total=self._total, completed=self._done)

    def _write_line(self) -> None:
        if self._total:
            quarter = min(4, 4 * self._done // self._total)
            if quarter <= self._quarter:
                return
            self._quarter = quarter
            text = f"{25 * quarter}% of {self._amount(self._total)}"
        else:
            if self._lines and self._clock() - self._last_line < LINE_EVERY:
                return
            text = self._amount(self._done)
        self._last_line = self._clock()
        self._lines += 1
        print(f"{self._label}: {text}", file=self._stream, flush=True)

    def _amount(self, units: int) -> str:
        return format_units(units, self._unit)


def default_progress(*, shows_lines: bool = True) -> Progress:
    """Return a ProgressBar if stderr is a terminal, else NoProgress."""
    on_terminal = sys.stderr is not None and sys.stderr.isatty()  # None: a program without a console
    return ProgressBar(shows_lines=shows_lines) if on_terminal else NoProgress()


def format_units(count: int, unit: str) -> str:
    """Return units as text; "B" are bytes."""
    return format_bytes(count) if unit == "B" else f"{count} {unit}"


def format_bytes(n: int) -> str:
    """Return `n` bytes as text in powers of ten, like "98.4 MB"."""
    size = float(n)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
