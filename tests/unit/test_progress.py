import io
from contextlib import suppress

import pytest

from specinfer.progress import LineProgress, ProgressBar


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_log_gets_lines_at_growing_intervals_and_quick_work_none():
    stream, clock = io.StringIO(), Clock()
    bar = ProgressBar(stream, clock=clock)
    with suppress(KeyError), bar.showing(100_000_000, "downloading x"):
        for _ in range(8):
            clock.now += 1.5
            bar.advance(10_000_000)
        raise KeyError("the work fails")
    for stays in (stream, Terminal()):
        with ProgressBar(stays, clock=clock).showing(10, "quick") as bar:
            clock.now += 1.9
            bar.advance(10)
    assert stream.getvalue().splitlines() == [
        "downloading x: 20.0 MB (20%)",
        "downloading x: 50.0 MB (50%)",
        "downloading x: finished after 12 s",
    ]
    assert stays.getvalue() == ""


def test_a_terminal_gets_a_bar_that_is_taken_away():
    stream, clock = Terminal(), Clock()
    bar = ProgressBar(stream, clock=clock)
    with bar.showing(2_000_000, "loading x"):
        clock.now = 3
        bar.advance(1_000_000)
        bar.advance(500_000)
    shown = stream.getvalue()
    assert "loading x" in shown
    assert "1.00M/2.00M" in shown
    assert shown.endswith("\r")
    assert shown.split("\r")[-2].strip() == "", "the line is erased"


@pytest.mark.parametrize("shows_lines", [True, False])
def test_what_is_said_is_not_shown_where_the_log_is(shows_lines: bool) -> None:
    stream = io.StringIO()
    ProgressBar(stream, shows_lines=shows_lines).say("half of it")
    assert stream.getvalue() == ("half of it\n" if shows_lines else "")


def test_a_log_has_a_line_for_each_task_and_one_every_few_seconds() -> None:
    lines, times = list[str](), iter((0.0, 1.0, 2.9, 3.0, 6.5, 6.6, 7.0, 7.0))
    progress = LineProgress(lines.append, every=3.0, clock=lambda: next(times))
    with progress.showing(4_000_000, "loading m"):
        for _ in range(4):
            progress.advance(1_000_000)
    with progress.showing(None, "measuring", "passes"):
        progress.advance(1)
    assert lines == [
        "loading m: 4.0 MB",
        "loading m: 3.0 MB (75%)",
        "loading m: 4.0 MB (100%)",
        "loading m: finished after 7 s",
        "measuring",
    ]
