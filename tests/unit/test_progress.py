import io

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


def lines_of(stream):
    return stream.getvalue().splitlines()


def test_a_log_gets_a_line_at_every_quarter():
    stream, clock = io.StringIO(), Clock()
    bar = ProgressBar(stream, clock=clock)
    bar.start(100_000_000, "downloading x")
    clock.now = 3
    for _ in range(1000):
        bar.advance(100_000)
    bar.finish()
    assert lines_of(stream) == [f"downloading x: {p}% of 100.0 MB" for p in (25, 50, 75, 100)]


def test_quick_work_shows_nothing():
    for stream in (io.StringIO(), Terminal()):
        clock = Clock()
        bar = ProgressBar(stream, clock=clock)
        bar.start(10, "quick")
        clock.now = 1.9
        bar.advance(10)
        bar.finish()
        assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_that_is_taken_away():
    stream, clock = Terminal(), Clock()
    bar = ProgressBar(stream, clock=clock)
    bar.start(2_000_000, "loading x")
    clock.now = 3
    bar.advance(1_000_000)
    bar.advance(500_000)
    bar.finish()
    shown = stream.getvalue()
    assert "loading x" in shown
    assert "MB" in shown
    assert shown.endswith("\x1b[2K") or "\x1b[2K" in shown.splitlines()[-1]  # the line is erased


def test_progress_bar_closes_when_the_work_fails(capsys):
    class Broken(Exception):
        pass

    try:
        with ProgressBar().showing(4, "work", "steps") as bar:
            bar._began -= 3  # three seconds ago
            bar.advance(1)
            raise Broken
    except Broken:
        pass
    assert capsys.readouterr().err.splitlines() == ["work: 25% of 4 steps", "work: 1 steps, finished"]


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
