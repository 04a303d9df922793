"""A loop in its own thread, on which callers wait."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest

from specinfer.engine.loop import MAX_FAILURES, EngineLoop
from specinfer.errors import ClosedError, PeerLostError
from specinfer.request import Delta, FinishReason
from tests.scripted_engine import Pause, ScriptedEngine, counted, said, waits
from tests.unit.engine.conftest import Make


@pytest.fixture
def running(loop: EngineLoop) -> EngineLoop:
    loop.start()
    return loop


def test_the_thread_sleeps_where_there_is_nothing_to_do(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    begun = waits(loop)
    asked: Counter[str] = Counter()
    has_work = ScriptedEngine.has_work.fget
    assert has_work is not None

    class Counting(ScriptedEngine):
        @property
        def has_work(self) -> bool:
            asked["has_work"] += 1
            return bool(has_work(self))

    engine.__class__ = Counting
    loop.start()
    begun.acquire()  # idle
    heard: list[Delta] = []
    loop.submit([make("a")], heard.append)
    begun.acquire()  # idle again
    assert len(heard) == 3
    assert asked["has_work"] <= 2 * 3
    assert not begun.acquire(blocking=False)
    engine.__class__ = ScriptedEngine


def test_a_failing_step_is_tried_again_and_then_costs_the_requests_not_the_thread(
    running: EngineLoop, engine: ScriptedEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    failing = {2, 3, *range(6, 6 + MAX_FAILURES)}

    def fail(step: int) -> None:
        if step in failing:
            raise SystemExit("no memory")

    engine.script = fail
    with caplog.at_level(logging.ERROR):
        last = list(running.stream([make("a", 9)]))[-1]
    assert last.token_ids == tuple(range(1, 6 + MAX_FAILURES))  # made by failing steps, too, and not lost
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == f"{MAX_FAILURES} steps of the engine failed: SystemExit('no memory')"
    assert last.internal_error
    assert caplog.text.count("step failed") == len(failing)
    assert said(running.stream([make("b")])) == counted("b")


def test_a_lost_rank_ends_all_requests_at_once_and_is_one_line_of_the_log(
    running: EngineLoop, engine: ScriptedEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    lost = PeerLostError("rank 1 is lost", 1)

    def lose(step: int) -> None:
        raise lost from OSError("the link is closed")

    heard: list[PeerLostError] = []
    running.on_lost = heard.append
    engine.script = lose
    with caplog.at_level(logging.ERROR):
        last = list(running.stream([make("a", 9)]))[-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "rank 1 is lost")
    assert heard == [lost]
    assert [(one.getMessage(), one.exc_info) for one in caplog.records] == [
        ("all requests end: rank 1 is lost", None)
    ]


def test_close_in_the_middle_of_a_step_of_the_thread(
    running: EngineLoop, engine: ScriptedEngine, make: Make, threads: Any
) -> None:
    engine.script = pause = Pause()
    answers = [threads(lambda name=name: said(running.stream([make(name, 99)]))) for name in ("a", "b")]
    pause.reached.wait()
    closing = threads(running.close)
    for answer in answers:
        with pytest.raises(ClosedError):
            answer.result()
    pause.go_on.set()
    closing.result()
    assert engine.happened.count("step") == 1
    running.close()
