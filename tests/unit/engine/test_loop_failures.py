"""Failing steps, failing receivers and interrupts around a loop cost no other request an output."""

from __future__ import annotations

import logging
import sys
from types import FrameType
from typing import Any

import pytest

from specinfer.engine import loop as loop_module
from specinfer.engine.loop import EngineLoop
from specinfer.request import Delta, FinishReason
from tests.scripted_engine import ScriptedEngine, counted, said
from tests.unit.engine.conftest import Make


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_step_that_raises_ends_the_streams_of_its_thread_alone_and_loses_no_output(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, error: type[BaseException]
) -> None:
    broken, other = loop.stream([make("b")]), loop.stream([make("a")])
    next(other)
    next(broken)

    def fail(step: int) -> None:
        if step == 3:
            raise error

    engine.script = fail
    with pytest.raises(error):
        next(broken)
    assert said(other) == counted("a")[1:]  # its second token was made by the step that failed
    assert engine.happened.count("abort b") == 1
    assert said(loop.stream([make("c")])) == counted("c")


def test_a_request_the_engine_cannot_take_fails_alone(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    engine.refuses = {"b"}
    last = {output.request_id: output for output in loop.stream([make("a"), make("b")])}
    assert last["a"].token_ids == (1, 2, 3)
    assert (last["b"].finish_reason, last["b"].error) == (FinishReason.ERROR, "no room")


def test_a_request_the_engine_loses_is_an_error_and_no_endless_wait(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    engine.script = lambda step: engine.requests.pop("b", None)
    last = {output.request_id: output for output in loop.stream([make("a"), make("b", 9)])}
    assert last["a"].token_ids == (1, 2, 3)
    assert last["b"].finish_reason is FinishReason.ERROR
    assert "the engine lost the request" in (last["b"].error or "")
    assert last["b"].internal_error


def test_a_receiver_that_raises_loses_its_request_and_nobody_elses(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(delta: Delta) -> None:
        raise OSError("the client is gone")

    loop.submit([make("a", 9)], refuse)
    with caplog.at_level(logging.ERROR):
        assert said(loop.stream([make("b")])) == counted("b")
    assert "request a is cancelled, as its receiver failed" in caplog.text
    assert "the client is gone" in caplog.text
    assert engine.happened == ["add a", "add b", "step", "abort a", "step", "step"]


def test_a_receiver_may_submit_and_cancel(loop: EngineLoop, engine: ScriptedEngine, make: Make) -> None:
    heard: list[tuple[str, FinishReason | None]] = []
    doomed, follower = make("doomed", 9), make("follower", 1)

    def receive(delta: Delta) -> None:
        heard.append((delta.id, delta.finish_reason))
        if delta.id == "a":
            loop.cancel([doomed])
            loop.submit([follower], receive)

    loop.submit([make("a", 1), doomed], receive)
    loop.wait_until(lambda: len(heard) == 4)
    assert heard == [
        ("a", FinishReason.LENGTH),
        ("doomed", None),
        ("doomed", FinishReason.ABORT),
        ("follower", FinishReason.LENGTH),
    ]


# An interrupt comes where Python looks for signals: where one of its functions begins, and behind calls.


class Interrupt:
    """Raises KeyboardInterrupt at the n-th place in the loop's own code at which a signal can arrive."""

    def __init__(self, place: int) -> None:
        self.left = place
        self._file = loop_module.__file__

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if frame.f_code.co_filename != self._file or event not in ("call", "c_return"):
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt


def test_an_interrupt_at_any_place_leaves_a_loop_that_works_and_loses_no_output(make: Make) -> None:
    place, interrupted = 0, True
    while interrupted:
        place += 1
        engine = ScriptedEngine()
        loop = EngineLoop(engine)
        other, cut = loop.stream([make("other", 4)]), loop.stream([make("cut", 2)])
        found = said(iter([next(other)]))
        heard: list[Delta] = []
        loop.submit([make("queued", 1)], heard.append)
        interrupt = Interrupt(place)
        interrupted = False
        sys.setprofile(interrupt)
        try:
            list(cut)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.setprofile(None)
        assert found + said(other) == counted("other", 4), place
        distinct = dict(zip(map(id, heard), heard, strict=True)).values()
        assert [(delta.id, delta.token_ids) for delta in distinct] == [("queued", (1,))], place
        cut.close()
        loop.check_integrity()
        assert not engine.has_work, place
        assert said(loop.stream([make("next", 2)])) == counted("next", 2), place
        loop.close()
    assert place > 50
