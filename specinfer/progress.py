"""Progress of long work: a bar on a terminal, a few plain lines elsewhere, nothing for short work."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Self, TextIO

if TYPE_CHECKING:
    from huggingface_hub.utils.tqdm import tqdm

SHOW_AFTER = 2.0  # seconds; shorter work shows nothing
LINE_SECONDS = 3.0  # between lines of a log


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
        write: Callable[[str], object],
        every: float = LINE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Pass each line to `write`; `every` is the seconds between two lines of a task."""
        self._write = write
        self._every = every
        self._clock = clock
        self._label = ""
        self._began = self._last = 0.0

    def start(self, total: int | None, label: str, unit: str = "B") -> None:
        """Start a task."""
        self._begin(total, label, unit)
        self._write(label if total is None else f"{label}: {format_units(total, unit)}")

    def advance(self, n: int) -> None:
        """Add `n` finished units."""
        self._done += n
        if self._label and (now := self._clock()) - self._last >= self._every:
            self._last = now
            self._show()

    def finish(self) -> None:
        """End the task; a long one gets a last line."""
        if self._label and self._last > self._began:
            self._write(f"{self._label}: finished after {self._clock() - self._began:.0f} s")
        self._label = ""

    def _begin(self, total: int | None, label: str, unit: str) -> None:
        self._total, self._label, self._unit, self._done = total, label, unit, 0
        self._began = self._last = self._clock()

    def _show(self) -> None:
        part = f" ({100 * self._done // self._total}%)" if self._total else ""
        self._write(f"{self._label}: {format_units(self._done, self._unit)}{part}")


class ProgressBar(LineProgress):
    """Progress on stderr, after two seconds: a bar on a terminal, elsewhere lines at growing intervals."""

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
        super().__init__(partial(print, file=self._stream, flush=True), show_after, clock)
        self._show_after = show_after
        self._shows_lines = shows_lines
        self._bar: tqdm | None = None

    def start(self, total: int | None, label: str, unit: str = "B") -> None:
        """Start a task; a task that still runs is finished first."""
        self.finish()
        self._every = self._show_after
        self._begin(total, label, unit)

    def advance(self, n: int) -> None:
        """Add `n` finished units and show them, once the task has taken two seconds."""
        if self._bar is None:
            super().advance(n)
        else:
            self._bar.update(n)

    def finish(self) -> None:
        """Close the bar, or write a last line if lines were written."""
        if self._bar is None:
            super().finish()
        else:
            self._bar.close()
            self._bar = None
            self._label = ""

    def say(self, line: str) -> None:
        """Write the line; ends a task that still runs."""
        self.finish()
        if self._shows_lines:
            self._write(line)

    def _show(self) -> None:
        self._every *= 2
        if not self._stream.isatty():
            super()._show()
            return
        from huggingface_hub.utils.tqdm import tqdm

        in_bytes = self._unit == "B"
        self._bar = tqdm(  # type: ignore[no-untyped-call]
            total=self._total,
            initial=self._done,
            desc=self._label,
            unit="B" if in_bytes else f" {self._unit}",
            unit_scale=in_bytes,
            leave=False,
            file=self._stream,
        )


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
