"""The loop that drives an engine: every request gets its own outputs, whoever drives and whatever happens."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest

from specinfer.engine import loop as loop_module
from specinfer.engine.admission import Admitted
from specinfer.engine.loop import PATIENCE, EngineLoop
from specinfer.errors import ClosedError, IntegrityError, RequestError, UserError
from specinfer.request import FinishReason, RequestOutput
from specinfer.tokenizer import Tokenizer
from tests.scripted_engine import ScriptedEngine, admitted
from tests.tiny_models import write_tiny_llama

T = TypeVar("T")
Make = Callable[..., Admitted]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes a request of an id, and of how far it counts."""
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
def threads() -> Iterator[Callable[[Callable[[], T]], Future[T]]]:
    with ThreadPoolExecutor(16) as pool:
        yield pool.submit


def said(outputs: Iterator[RequestOutput]) -> list[tuple[str, list[int]]]:
    return [(output.request_id, list(output.token_ids)) for output in outputs]


def counted(request_id: str, to: int = 3) -> list[tuple[str, list[int]]]:
    """What a request says, output by output."""
    return [(request_id, list(range(1, n + 1))) for n in range(1, to + 1)]


def waits(loop: EngineLoop) -> threading.Semaphore:
    """Released each time a thread begins to wait for the loop."""
    begun, wait = threading.Semaphore(0), loop._changed.wait

    def counted_wait(timeout: float | None = None) -> bool:
        begun.release()
        return wait(timeout)

    loop._changed.wait = counted_wait  # type: ignore[method-assign]
    return begun


# One caller.


def test_a_stream_is_every_output_of_its_requests(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    both = said(loop.stream([make("a"), make("b", 2)]))
    assert [o for o in both if o[0] == "a"] == counted("a")
    assert [o for o in both if o[0] == "b"] == counted("b", 2)
    assert engine.happened == ["add a", "add b", "step", "step", "step"]
    assert said(loop.stream([])) == []


def test_streams_of_one_thread_take_turns_and_share_steps(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    one, two = loop.stream([make("a")]), loop.stream([make("b")])
    next(one)
    next(two)
    assert said(one) == counted("a")[1:]
    assert said(two) == counted("b")[1:]  # some of it came in the steps of `one`
    assert engine.happened.count("step") == 4


def test_a_request_of_somebody_else_in_the_engine_harms_nobody(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    engine.add(make("foreign", 2))
    assert said(loop.stream([make("a")])) == counted("a")
    engine.add(make("foreign", 9))
    with pytest.raises(IntegrityError, match="the engine has work, and no request is left"):
        loop.check_integrity()
    engine.abort("foreign")


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


def test_a_receiver_hears_that_its_request_was_cancelled_once(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    heard: list[RequestOutput] = []
    one, ended = make("a"), make("b", 1)
    loop.submit([one], heard.append)
    loop.submit([ended], lambda output: None)
    loop.wait_until(lambda: heard)
    loop.cancel([one, ended, make("never submitted")])
    loop.cancel([one])
    assert [o.finish_reason for o in heard] == [None, FinishReason.ABORT]
    assert heard[-1].token_ids == (1,)
    assert engine.happened == ["add a", "add b", "step", "abort a"]


def test_a_request_cancelled_before_its_first_step_never_runs(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    heard: list[RequestOutput] = []
    one = make("a")
    loop.submit([one], heard.append)
    loop.cancel([one])
    assert [o.finish_reason for o in heard] == [FinishReason.ABORT]
    assert engine.happened == ["add a", "abort a"]


# Several threads.


def test_many_threads_at_once_each_get_exactly_their_own(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, threads: Any
) -> None:
    together = threading.Barrier(8)

    def ask(number: int) -> list[tuple[str, list[int]]]:
        together.wait()
        return [
            part
            for turn in range(5)
            for part in said(loop.stream([make(f"{number}.{turn}", 2 + (number + turn) % 3)]))
        ]

    answers = [threads(ask, number) for number in range(8)]
    for number, answer in enumerate(answers):
        expected = [counted(f"{number}.{turn}", 2 + (number + turn) % 3) for turn in range(5)]
        assert answer.result() == [part for text in expected for part in text]
    loop.check_integrity()


def test_who_waits_gets_the_outputs_that_another_threads_steps_made(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, threads: Any
) -> None:
    begun = waits(loop)
    in_step, go_on = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        if step == 1:
            in_step.set()
            go_on.wait()

    engine.script = hold
    driver = threads(lambda: said(loop.stream([make("a", 4)])))
    in_step.wait()
    reader = threads(lambda: said(loop.stream([make("b", 2)])))
    begun.acquire()  # the reader waits: the driver has the turn
    assert engine.happened == ["add a", "step"]
    go_on.set()
    assert driver.result() == counted("a", 4)
    assert reader.result() == counted("b", 2)
    assert engine.happened[:3] == ["add a", "step", "add b"]
    assert engine.happened.count("step") <= 5


def test_a_thread_that_leaves_hands_the_driving_over(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, threads: Any
) -> None:
    begun = waits(loop)
    in_step, go_on = threading.Event(), threading.Event()
    engine.script = lambda step: (in_step.set(), go_on.wait())
    driver = threads(lambda: next(loop.stream([make("a")])))  # drops its stream after one output
    in_step.wait()
    readers = [threads(lambda name=name: said(loop.stream([make(name)]))) for name in ("b", "c")]
    for _ in readers:
        begun.acquire()
    go_on.set()
    assert driver.result().token_ids == (1,)
    assert [reader.result() for reader in readers] == [counted("b"), counted("c")]
    assert "abort a" in engine.happened
    assert len(set(engine.steppers)) > 1


def test_integrity_is_asked_between_two_steps_of_another_thread(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, threads: Any
) -> None:
    begun = waits(loop)
    in_step, go_on = threading.Event(), threading.Event()
    engine.script = lambda step: (in_step.set(), go_on.wait())
    driver = threads(lambda: said(loop.stream([make("a", 2)])))
    in_step.wait()
    asked = threads(loop.check_integrity)
    begun.acquire()
    go_on.set()
    asked.result()
    assert driver.result() == counted("a", 2)
    assert engine.happened == ["add a", "step", "check", "step"]


# What goes wrong.


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


def test_a_step_that_raises_in_one_thread_leaves_the_driving_to_another(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, threads: Any
) -> None:
    begun = waits(loop)
    in_step, go_on = threading.Event(), threading.Event()

    def fail_first(step: int) -> None:
        if step == 1:
            in_step.set()
            go_on.wait()
            raise RuntimeError("out of memory")

    engine.script = fail_first
    broken = threads(lambda: said(loop.stream([make("a")])))
    in_step.wait()
    other = threads(lambda: said(loop.stream([make("b")])))
    begun.acquire()
    go_on.set()
    with pytest.raises(RuntimeError, match="out of memory"):
        broken.result()
    assert other.result() == counted("b")


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


def test_to_wait_for_what_cannot_come_is_an_error_and_no_endless_wait(loop: EngineLoop) -> None:
    with pytest.raises(IntegrityError, match="the loop has no request left"):
        loop.wait_until(lambda: False)


def test_time_runs_out_between_steps(loop: EngineLoop, engine: ScriptedEngine, make: Make) -> None:
    assert loop.wait_until(lambda: True, timeout=0)
    loop.submit([make("a")], lambda output: None)
    assert not loop.wait_until(lambda: False, timeout=0)
    assert engine.happened == []


@pytest.mark.parametrize("what", ["wait_until", "stream", "drain", "close", "check_integrity"])
def test_a_step_that_waits_for_the_loop_is_told_so(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, what: str
) -> None:
    calls: dict[str, Callable[[], object]] = {
        "wait_until": lambda: loop.wait_until(lambda: False),
        "stream": lambda: list(loop.stream([make("inner")])),
        "drain": loop.drain,
        "close": loop.close,
        "check_integrity": loop.check_integrity,
    }

    def call_once(step: int) -> None:
        if step == 1:
            calls[what]()

    engine.script = call_once
    with pytest.raises(UserError, match="asked from within one of its own steps"):
        list(loop.stream([make("a")]))
    assert said(loop.stream([make("b")])) == counted("b")


def test_a_receiver_that_raises_loses_its_request_and_nobody_elses(
    loop: EngineLoop, engine: ScriptedEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(output: RequestOutput) -> None:
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

    def receive(output: RequestOutput) -> None:
        heard.append((output.request_id, output.finish_reason))
        if output.request_id == "a":
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
        heard: list[RequestOutput] = []
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
        assert said(iter(dict(zip(map(id, heard), heard, strict=True)).values())) == counted("queued", 1), (
            place
        )
        cut.close()
        loop.check_integrity()
        assert not engine.has_work, place
        assert said(loop.stream([make("next", 2)])) == counted("next", 2), place
        loop.close()
    assert place > 50


# The end.


def test_draining_finishes_what_is_there_and_takes_nothing_new(
    loop: EngineLoop, engine: ScriptedEngine, make: Make
) -> None:
    heard: list[RequestOutput] = []
    loop.submit([make("a")], heard.append)
    begun = loop.stream([make("b")])
    next(begun)
    assert not loop.drain(timeout=0)
    with pytest.raises(ClosedError, match="finishing its last requests"):
        next(loop.stream([make("c")]))
    assert loop.drain()
    assert [list(output.token_ids) for output in heard] == [[1], [1, 2], [1, 2, 3]]
    assert said(begun) == counted("b")[1:]
    assert not engine.has_work


def test_a_closed_loop_says_so_once_to_everybody_who_waits(
    engine: ScriptedEngine, make: Make, threads: Any
) -> None:
    loop = EngineLoop(engine)
    begun = waits(loop)
    in_step, go_on = threading.Event(), threading.Event()
    engine.script = lambda step: (in_step.set(), go_on.wait())
    driver = threads(lambda: said(loop.stream([make("a", 100)])))
    in_step.wait()
    waiting = [threads(lambda name=name: said(loop.stream([make(name, 100)]))) for name in ("b", "c")]
    closers = [threads(loop.close) for _ in range(2)]
    for _ in (*waiting, *closers):
        begun.acquire()
    go_on.set()
    for future in (driver, *waiting):
        with pytest.raises(ClosedError, match="the LLM was closed; make a new one"):
            future.result()
    for closer in closers:
        closer.result()
    assert engine.happened.count("step") == 1
    assert not engine.has_work


def test_after_closing_outputs_that_are_there_can_be_read_and_nothing_else_works(
    engine: ScriptedEngine, make: Make
) -> None:
    loop = EngineLoop(engine)
    heard: list[RequestOutput] = []
    ended, cut = loop.stream([make("a", 2)]), loop.stream([make("b", 9)])
    next(ended)
    loop.submit([make("c", 9)], heard.append)
    next(cut)  # and in this step `a` ended
    loop.close()
    loop.close()
    assert said(ended) == [("a", [1, 2])]
    with pytest.raises(ClosedError):
        next(cut)
    assert list(cut) == []
    assert [output.finish_reason for output in heard] == [None, FinishReason.ABORT]
    calls: list[Callable[[], object]] = [
        lambda: next(loop.stream([make("d")])),
        lambda: loop.submit([make("d")], heard.append),
        lambda: loop.wait_until(lambda: False),
        loop.check_integrity,
        loop.start,
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="the LLM was closed"):
            call()
    loop.cancel([make("d")])
    assert loop.drain()  # nothing is there


# A thread of its own.


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
    heard: list[RequestOutput] = []
    loop.submit([make("a")], heard.append)
    begun.acquire()  # idle again
    assert len(heard) == 3
    assert asked["has_work"] <= 2 * 3
    assert not begun.acquire(blocking=False)
    engine.__class__ = ScriptedEngine


def test_a_failing_step_is_tried_again_and_then_costs_the_requests_not_the_thread(
    running: EngineLoop, engine: ScriptedEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    failing = {2, 3, *range(6, 6 + PATIENCE)}

    def fail(step: int) -> None:
        if step in failing:
            raise SystemExit("no memory")

    engine.script = fail
    with caplog.at_level(logging.ERROR):
        last = list(running.stream([make("a", 9)]))[-1]
    assert last.token_ids == tuple(range(1, 6 + PATIENCE))  # made by failing steps, too, and not lost
    assert last.finish_reason is FinishReason.ERROR
    assert last.error == f"{PATIENCE} steps of the engine failed: SystemExit('no memory')"
    assert caplog.text.count("step failed") == len(failing)
    assert said(running.stream([make("b")])) == counted("b")


def test_the_thread_drains_and_closes(
    running: EngineLoop, engine: ScriptedEngine, make: Make, threads: Any
) -> None:
    in_step, go_on = threading.Event(), threading.Event()
    engine.script = lambda step: (in_step.set(), go_on.wait())
    answer = threads(lambda: said(running.stream([make("a")])))
    in_step.wait()
    assert not running.drain(timeout=0)
    go_on.set()
    assert running.drain()
    assert answer.result() == counted("a")
    running.close()
    assert "specinfer-engine" not in [t.name for t in threading.enumerate()]


def test_close_in_the_middle_of_a_step_of_the_thread(
    running: EngineLoop, engine: ScriptedEngine, make: Make, threads: Any
) -> None:
    in_step, go_on = threading.Event(), threading.Event()
    engine.script = lambda step: (in_step.set(), go_on.wait())
    answers = [threads(lambda name=name: said(running.stream([make(name, 99)]))) for name in ("a", "b")]
    in_step.wait()
    closing = threads(running.close)
    for answer in answers:
        with pytest.raises(ClosedError):
            answer.result()
    go_on.set()
    closing.result()
    assert engine.happened.count("step") == 1
    running.close()


def test_a_receiver_that_waits_in_the_threads_own_time_is_told_so(
    running: EngineLoop, engine: ScriptedEngine, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    ended = threading.Event()

    def wait(output: RequestOutput) -> None:
        if output.finished:
            ended.set()
        else:
            running.wait_until(lambda: False)

    running.submit([make("a")], wait)
    ended.wait()
    assert "asked from within one of its own steps" in caplog.text


EXIT = """
import atexit, sys, threading
sys.path.insert(0, {root!r})
from pathlib import Path
from specinfer.engine.loop import EngineLoop
from specinfer.tokenizer import Tokenizer
from tests.scripted_engine import ScriptedEngine, admitted

engine, stepping = ScriptedEngine(), threading.Event()
engine.script = lambda step: stepping.set()
loop = EngineLoop(engine)
last = []
atexit.register(lambda: print(last[-1].finish_reason, engine.has_work))  # after what `start` registers
loop.start()
loop.submit([admitted(Tokenizer.load(Path({folder!r})), "a", 1 << 19)], last.append)
stepping.wait()
{ending}
"""


@pytest.mark.parametrize(("ending", "status"), [("", 0), ("sys.exit(3)", 3)])
def test_the_interpreter_ends_with_the_thread_in_the_middle_of_its_work(
    tmp_path_factory: pytest.TempPathFactory, ending: str, status: int
) -> None:
    folder = write_tiny_llama(tmp_path_factory.mktemp("exit"), vocab_size=256, tokenizer=True)
    code = EXIT.format(root=str(Path(__file__).parents[3]), folder=str(folder), ending=ending)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (status, "abort False\n", "")
