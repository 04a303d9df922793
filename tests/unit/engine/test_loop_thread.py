"""A loop in its own thread, on which callers wait."""

from __future__ import annotations

import logging
import threading
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


def test_with_a_thread_of_its_own_the_others_only_wait(
    running: EngineLoop, engine: ScriptedEngine, make: Make, threads: Any
) -> None:
    running.start()  # it has one
    answers = [threads(lambda n=n: said(running.stream([make(f"{n}", 2 + n)]))) for n in range(6)]
    assert [a.result() for a in answers] == [counted(f"{n}", 2 + n) for n in range(6)]
    running.check_integrity()
    assert len(set(engine.steppers)) == 1
    assert engine.steppers[0] != threading.get_ident()
    assert [t.name for t in threading.enumerate()].count("specinfer-engine") == 1


def test_who_drove_before_the_thread_came_gets_the_rest_from_it(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    stream = loop.stream([make("a", 4)])
    next(stream)
    loop.start()
    assert said(stream) == counted("a", 4)[1:]
    assert len(set(engine.steppers)) == 2


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


def test_the_thread_answers_and_closes(running: EngineLoop, make: Make) -> None:
    assert said(running.stream([make("a")])) == counted("a")
    running.close()
    assert "specinfer-engine" not in [t.name for t in threading.enumerate()]


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


def test_a_receiver_that_waits_in_the_threads_own_time_is_told_so(
    running: EngineLoop, engine: ScriptedEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()

    def wait(delta: Delta) -> None:
        if delta.finished:
            ended.set()
        else:
            running.wait_until(lambda: False)

    running.submit([make("a")], wait)
    ended.wait()
    assert "called within one of its own steps" in caplog.text
