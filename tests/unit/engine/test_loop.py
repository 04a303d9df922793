"""The loop that drives an engine: streams, receivers and cancelling, from one thread and from several."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from specinfer.engine.loop import EngineLoop
from specinfer.engine.transcript import Transcript
from specinfer.errors import RequestError
from specinfer.request import Delta, FinishReason, RequestOutput
from tests.scripted_engine import Pause, ScriptedEngine, counted, said, waits
from tests.unit.engine.conftest import Make

# One caller.


def test_a_stream_is_every_output_of_its_requests(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    both = said(loop.stream([make("a"), make("b", 2)]))
    assert [o for o in both if o[0] == "a"] == counted("a")
    assert [o for o in both if o[0] == "b"] == counted("b", 2)
    assert engine.happened == ["add a", "add b", "step", "step", "step"]
    assert said(loop.stream([])) == []


def test_a_stream_of_ended_requests_makes_one_output_of_each(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    output = Transcript.output

    def counting(transcript: Transcript, new_text: str = "") -> RequestOutput:
        made.append(transcript.request.request_id)
        return output(transcript, new_text)

    monkeypatch.setattr(Transcript, "output", counting)
    found = [*loop.stream([make("a"), make("b", 2)], ended_only=True)]
    assert [(one.request_id, one.finished) for one in found] == [("b", True), ("a", True)]
    assert made == ["b", "a"]
    assert said(found) == [counted("b", 2)[-1], counted("a")[-1]], "they are the last ones of a whole stream"


def test_an_id_in_use_is_refused_and_the_request_that_has_it_goes_on(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    first = loop.stream([make("a")])
    next(first)
    for requests in ([make("b"), make("a")], [make("c"), make("c")]):
        with pytest.raises(RequestError, match=r"request id '[ac]' is in use"):
            next(loop.stream(requests))
    assert said(first) == counted("a")[1:]
    assert engine.happened.count("add b") == engine.happened.count("add c") == 0
    assert said(loop.stream([make("a")])) == counted("a")  # free again


# Cancelling.


@pytest.mark.parametrize("drop", ["close", "forget", "never begun"])
def test_a_dropped_stream_cancels_its_request(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, drop: str
) -> None:
    stream = loop.stream([make("a"), make("b")])
    if drop == "never begun":
        del stream
        assert engine.happened == []
        return
    next(stream)
    if drop == "close":
        stream.close()
    else:
        del stream
        gc.collect()
    assert engine.happened == ["add a", "add b", "step", "abort a", "abort b"]
    loop.check_integrity()


def test_what_is_cancelled_within_a_step_takes_part_in_no_other(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    dropped = loop.stream([make("b")])
    kept = loop.stream([make("a")])
    next(kept)
    next(dropped)
    engine.script = lambda step: dropped.close()
    assert said(kept) == counted("a")[1:]
    assert engine.happened == ["add a", "step", "add b", "step", "step", "abort b"]


def test_a_request_cancelled_before_its_first_step_never_runs(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    heard: list[Delta] = []
    one = make("a")
    loop.submit([one], heard.append)
    loop.cancel([one])
    assert [o.finish_reason for o in heard] == [FinishReason.ABORT]
    assert engine.happened == ["add a", "abort a"]


# Several threads.


def test_who_waits_gets_the_outputs_that_another_threads_steps_made(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, threads: Any
) -> None:
    begun = waits(loop)
    engine.script = pause = Pause()
    driver = threads(lambda: said(loop.stream([make("a", 4)])))
    pause.reached.wait()
    reader = threads(lambda: said(loop.stream([make("b", 2)])))
    begun.acquire()  # the reader waits: the driver has the turn
    assert engine.happened == ["add a", "step"]
    pause.go_on.set()
    assert driver.result() == counted("a", 4)
    assert reader.result() == counted("b", 2)
    assert engine.happened[:3] == ["add a", "step", "add b"]
    assert engine.happened.count("step") <= 5


def test_a_thread_that_leaves_hands_the_driving_over(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, threads: Any
) -> None:
    begun = waits(loop)
    engine.script = pause = Pause()
    driver = threads(lambda: next(loop.stream([make("a")])))  # drops its stream after one output
    pause.reached.wait()
    readers = [threads(lambda name=name: said(loop.stream([make(name)]))) for name in ("b", "c")]
    for _ in readers:
        begun.acquire()
    pause.go_on.set()
    assert driver.result().token_ids == (1,)
    assert [reader.result() for reader in readers] == [counted("b"), counted("c")]
    assert "abort a" in engine.happened
    assert len(set(engine.steppers)) > 1
