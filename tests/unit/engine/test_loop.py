"""The loop that drives an engine: streams, receivers, cancelling, failures and the end."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from specinfer.engine.admission import AdmittedRequest
from specinfer.engine.loop import EngineLoop
from specinfer.engine.transcript import Transcript
from specinfer.errors import ClosedError, PeerLostError, RequestError, UserError
from specinfer.request import Delta, FinishReason
from specinfer.tokenizer import Tokenizer
from tests.scripted_engine import Pause, ScriptedEngine, admitted, counted, said
from tests.spies import spied
from tests.tiny_models import write_tiny_llama

Make = Callable[..., AdmittedRequest]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a function that makes a request with an id and a number of tokens."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("t"), vocab_size=256, tokenizer=True)
    tokenizer = Tokenizer.load(folder)
    return lambda request_id, max_tokens=3: admitted(tokenizer, request_id, max_tokens)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def loop(engine: ScriptedEngine) -> Iterator[EngineLoop]:
    loop = EngineLoop(engine)
    yield loop
    loop.close()
    assert not engine.has_work


@pytest.fixture
def threads() -> Iterator[Any]:
    with ThreadPoolExecutor(16) as pool:
        yield pool.submit


def test_a_stream_is_all_outputs_of_requests(loop: EngineLoop, engine: ScriptedEngine, make: Make) -> None:
    both = said(loop.stream([make("a"), make("b", 2)]))
    assert [o for o in both if o[0] == "a"] == counted("a")
    assert [o for o in both if o[0] == "b"] == counted("b", 2)
    assert engine.happened == ["add a", "add b", "step", "step", "step"]
    assert said(loop.stream([])) == []


def test_a_stream_of_ended_requests(loop: EngineLoop, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = spied(monkeypatch, Transcript, "output", lambda made, *_, **__: made.request.request_id)
    found = [*loop.stream([make("a"), make("b", 2)], ended_only=True)]
    assert [(one.request_id, one.finished) for one in found] == [("b", True), ("a", True)]
    assert made == ["b", "a"]
    assert said(found) == [counted("b", 2)[-1], counted("a")[-1]], "they are the last ones of a whole stream"


def test_an_id_that_is_in_use_is_refused(loop: EngineLoop, engine: ScriptedEngine, make: Make) -> None:
    engine.script = pause = Pause()
    first = loop.stream([make("a")])
    heard: list[Delta] = []
    loop.submit([make("a2", 1)], heard.append)
    pause.reached.wait()
    for requests in ([make("b"), make("a2")], [make("c"), make("c")]):
        with pytest.raises(RequestError, match=r"request id '(a2|c)' is in use"):
            next(loop.stream(requests))
    pause.go_on.set()
    assert said(first) == counted("a")
    assert engine.happened.count("add b") == engine.happened.count("add c") == 0
    assert said(loop.stream([make("a2")])) == counted("a2")  # free again


def test_a_request_is_cancelled_before_it_runs(loop: EngineLoop, engine: ScriptedEngine, make: Make) -> None:
    engine.script = pause = Pause()
    first, late = loop.stream([make("a")]), make("late")
    heard: list[Delta] = []
    loop.submit([make("b")], heard.append)
    pause.reached.wait()
    loop.cancel([late])  # by a thread that is faster than the rest of `submit`
    loop.submit([late], heard.append)
    pause.go_on.set()
    assert said(first) == counted("a")
    assert [one.finish_reason for one in heard if one.id == "late"] == [FinishReason.ERROR]
    assert "add late" not in engine.happened


@pytest.mark.parametrize("drop", ["close", "forget", "never begun"])
def test_dropped_streams_are_ended(loop: EngineLoop, engine: ScriptedEngine, make: Make, drop: str) -> None:
    stream = loop.stream([make("a", 999), make("b", 999)])
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
    loop.check_integrity()
    assert engine.happened[-3:] == ["abort a", "abort b", "check"]
    assert not engine.has_work


def test_a_cancelled_request_is_in_no_step(loop: EngineLoop, engine: ScriptedEngine, make: Make) -> None:
    one, other = make("a"), make("b", 99)
    engine.script = lambda step: loop.cancel([other]) if step == 2 else None
    heard: list[Delta] = []
    loop.submit([other], heard.append)
    assert said(loop.stream([one])) == counted("a")
    assert engine.happened.index("abort b") <= 4
    assert heard[-1].finish_reason is FinishReason.ABORT


def test_threads_wait_for_one_loop(loop: EngineLoop, make: Make, threads: Any) -> None:
    reading = [threads(lambda name=name: said(loop.stream([make(name, 9)]))) for name in "abcdefgh"]
    assert [one.result() for one in reading] == [counted(name, 9) for name in "abcdefgh"]


def test_the_thread_sleeps_where_there_is_nothing_to_do(engine: ScriptedEngine, make: Make) -> None:
    asked = 0

    class Counting(ScriptedEngine):
        @property
        def has_work(self) -> bool:
            nonlocal asked
            asked += 1
            return bool(self.requests)

    loop = EngineLoop(Counting())
    assert said(loop.stream([make("a")])) == counted("a")
    threading.Event().wait(0.2)
    assert asked <= 4 * 3 + 2
    loop.close()


def test_a_step_may_not_wait_for_itself(loop: EngineLoop, engine: ScriptedEngine, make: Make) -> None:
    refused: list[str] = []

    def call(step: int) -> None:
        for wrong in (lambda: next(loop.stream([make("b")])), loop.close, loop.check_integrity, loop.rest):
            with pytest.raises(UserError, match="within one of its own steps") as error:
                wrong()
            refused.append(str(error.value))

    engine.script = call
    assert said(loop.stream([make("a", 1)])) == counted("a", 1)
    assert len(refused) == 4


# Failures.


def test_a_step_that_raises_ends_its_requests_and_the_loop_goes_on(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[tuple[type[BaseException], Sequence[str]]] = []
    loop.on_failed = lambda error, names: heard.append((type(error), names))

    def fail(step: int) -> None:
        if step == 3:
            raise SystemExit("no memory")

    engine.script = fail
    with caplog.at_level(logging.ERROR):
        last = list(loop.stream([make("a", 9)]))[-1]
    assert (last.token_ids, last.finish_reason) == ((1, 2, 3), FinishReason.ERROR)
    assert last.error == "SystemExit('no memory')"
    assert last.internal_error
    assert heard == [(SystemExit, ["a"])]
    assert "a step failed, and its requests end" in caplog.text
    assert said(loop.stream([make("b")])) == counted("b")


def test_a_lost_rank_is_raised_and_is_one_line_of_the_log(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    lost = PeerLostError("rank 1 is lost", 1)

    def lose(step: int) -> None:
        raise lost from OSError("the link is closed")

    engine.script = lose
    with caplog.at_level(logging.ERROR), pytest.raises(PeerLostError, match="rank 1 is lost"):
        list(loop.stream([make("a", 9)]))
    assert [(one.getMessage(), one.exc_info) for one in caplog.records] == [
        ("all requests end: rank 1 is lost", None)
    ]


def test_an_engine_that_cannot_even_fail_ends_all_requests(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[type[BaseException]] = []
    loop.on_failed = lambda error, names: heard.append(type(error))
    engine.script = lambda step: 1 / 0
    engine.fail = lambda error: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with caplog.at_level(logging.ERROR):
        last = list(loop.stream([make("a", 9)]))[-1]
    assert last.error == "the engine's thread has ended; please report it"
    assert heard == [ZeroDivisionError] * 2
    assert "the engine's thread ends; please report it" in caplog.text
    with pytest.raises(ClosedError, match="the engine's thread has ended"):
        next(loop.stream([make("b")]))
    engine.requests.clear()


def test_a_request_that_is_refused_fails_alone(loop: EngineLoop, engine: ScriptedEngine, make: Make) -> None:
    engine.refuses = {"b"}
    last = {output.request_id: output for output in loop.stream([make("a"), make("b")])}
    assert last["a"].token_ids == (1, 2, 3)
    assert (last["b"].finish_reason, last["b"].error) == (FinishReason.ERROR, "no room")
    assert last["b"].internal_error


def test_a_receiver_that_raises_loses_its_request_and_nobody_elses(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(delta: Delta) -> None:
        raise OSError("the client is gone")

    loop.submit([make("a", 999)], refuse)
    with caplog.at_level(logging.ERROR):
        assert said(loop.stream([make("b")])) == counted("b")
    assert "request a is cancelled, as its receiver failed" in caplog.text
    assert "the client is gone" in caplog.text
    assert "abort a" in engine.happened


def test_a_receiver_may_submit_and_cancel(loop: EngineLoop, make: Make) -> None:
    heard: SimpleQueue[tuple[str, FinishReason | None]] = SimpleQueue()
    doomed, follower = make("doomed", 999), make("follower", 1)

    def receive(delta: Delta) -> None:
        heard.put((delta.id, delta.finish_reason))
        if delta.id == "a":
            loop.cancel([doomed])
            loop.submit([follower], receive)

    loop.submit([make("a", 1), doomed], receive)
    found = [heard.get(timeout=20) for _ in range(4)]
    assert (found[0], found[-1]) == (("a", FinishReason.LENGTH), ("follower", FinishReason.LENGTH))
    assert ("doomed", FinishReason.ABORT) in found


# The end.


def test_a_closed_loop_tells_everybody_who_waits(engine: ScriptedEngine, make: Make, threads: Any) -> None:
    loop = EngineLoop(engine)
    engine.script = pause = Pause()
    waiting = [threads(lambda name=name: said(loop.stream([make(name, 999)]))) for name in ("a", "b")]
    pause.reached.wait()
    closers = [threads(loop.close) for _ in range(2)]
    while not loop._refusing:
        pass
    pause.go_on.set()
    for future in waiting:
        with pytest.raises(ClosedError, match="the LLM was closed; make a new one"):
            future.result()
    for closer in closers:
        closer.result()
    assert engine.happened.count("step") == 1
    assert not engine.has_work
    heard: list[Delta] = []
    calls: list[Callable[[], object]] = [
        *(lambda: next(loop.stream([make("d")])), lambda: loop.submit([make("d")], heard.append)),
        *(loop.check_integrity, loop.rest, loop.rest_when_idle),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="the LLM was closed"):
            call()
    loop.cancel([make("d")])
    loop.close()


def test_outputs_that_are_there_can_be_read_after_the_end(make: Make) -> None:
    loop = EngineLoop(ScriptedEngine())
    ended = loop.stream([make("a", 2)])
    next(ended)
    assert said(loop.stream([make("b", 4)])) == counted("b", 4)  # and meanwhile `a` ended
    loop.close()
    assert said(ended) == [("a", [1, 2])]


EXIT = """
import sys, threading, weakref
sys.path.insert(0, {root!r})
from pathlib import Path
from specinfer.engine.loop import EngineLoop
from specinfer.tokenizer import Tokenizer
from tests.scripted_engine import ScriptedEngine, admitted

class Owner: pass
engine, stepping, owner = ScriptedEngine(), threading.Event(), Owner()
engine.script = lambda step: stepping.set()
loop = EngineLoop(engine)
last = []
weakref.finalize(owner, lambda: (loop.stop(), print(last[-1].finish_reason, engine.has_work)))
loop.submit([admitted(Tokenizer.load(Path({folder!r})), "a", 1 << 19)], last.append)
stepping.wait()
{ending}
"""


@pytest.mark.parametrize(("ending", "status"), [("", 0), ("sys.exit(3)", 3), ("del owner", 0)])
def test_the_interpreter_ends_with_the_thread_in_the_middle_of_its_work(
    tmp_path_factory: pytest.TempPathFactory, ending: str, status: int
) -> None:
    folder = write_tiny_llama(tmp_path_factory.mktemp("exit"), vocab_size=256, tokenizer=True)
    code = EXIT.format(root=str(Path(__file__).parents[3]), folder=str(folder), ending=ending)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (status, "abort False\n", "")
