"""Crashes of engine processes: restarts, and works that are blamed."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from specinfer.engine.steps import Statistics
from specinfer.errors import UserError
from specinfer.request import Delta
from specinfer.serve.backend import engine_child, replica
from specinfer.serve.backend.engine_child import EngineChild
from specinfer.serve.backend.replica_backend import ReplicaBackend
from specinfer.serve.backend.work import BackendError
from tests.unit.serve.backend.handles import CONFIG, WORK, Answering, Handle, cannot_start, engines

# It is ready at once, and the first time it does something else then.
ENGINE = """#!{python}
import pathlib, sys, time
from multiprocessing.connection import Connection
from specinfer.serve.backend.work import EngineInfo
connection = Connection(int(sys.argv[3]))
connection.recv_bytes()
connection.send(("ready", EngineInfo(10, 10)))
begun = pathlib.Path(__file__).with_suffix(".begun")
if not begun.exists():
    begun.touch()
    {first}
try:
    while True:
        connection.recv_bytes()
except EOFError:
    pass
"""


def start_engines_that(first: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make engines' processes run ENGINE."""
    script = folder / "engine"
    script.write_text(ENGINE.format(python=sys.executable, first=first))
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


def restarts(backend: ReplicaBackend) -> int:
    return sum(one.restarts for one in backend._replicas)


async def test_what_a_dead_engine_sent_still_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The works of its last step are the ones to blame."""
    last = "connection.send(('a', 'x' * 100000)); connection.send(('b',)); sys.exit(3)"
    start_engines_that(last, tmp_path, monkeypatch)
    monkeypatch.setattr(engine_child, "_LARGE", 1000)  # a thread reads the first message, which stays first
    heard: list[tuple[Any, ...]] = []
    ended: list[int | None] = []
    child = EngineChild(("info", "text"))
    listeners = lambda _, message: heard.append(message), lambda one: ended.append(one.status)
    await child.start(CONFIG, asyncio.get_running_loop(), *listeners)
    child._process.wait()  # the loop has read nothing meanwhile
    child.send(("abort", []))
    await until(lambda: bool(ended))
    assert (heard, ended) == ([("a", "x" * 100000), ("b",)], [3])


async def test_an_engine_that_stays_stopped_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start_engines_that("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", tmp_path, monkeypatch)
    monkeypatch.setattr(replica, "_STOPPED_SECONDS", 1)
    async with engines(timeout=600) as backend:
        await until(lambda: restarts(backend) == 1)
    assert "the engine has been stopped for 1 seconds and is killed" in caplog.text


def test_a_closed_engine_is_hung_up_on_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are killed, and while they load, the reason may be memory."""
    start_engines_that("pass", tmp_path, monkeypatch)

    async def run() -> EngineChild:
        child, killed = EngineChild(("info", "text")), EngineChild(("info", "text"))
        given = CONFIG, asyncio.get_running_loop(), lambda *_: None, lambda *_: None
        killed.kill()
        with pytest.raises(BackendError, match="status -9 before it was ready: it was killed, as the system"):
            await killed.start(*given)
        await child.start(*given)
        await child.close()
        return child

    assert asyncio.run(run()).status == 0  # it was not killed


async def test_the_loop_waits_for_no_mute_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_engines_that("connection.close(); time.sleep(600)", tmp_path, monkeypatch)
    waits: list[str] = []
    wait = subprocess.Popen.wait

    def waiting(process: Any, timeout: float | None = None) -> int:
        waits.append(threading.current_thread().name)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", waiting)
    async with engines() as backend:
        await until(lambda: restarts(backend) == 1)
        before = len(waits)
    assert len(waits) > before > 0
    assert threading.main_thread().name not in waits


@dataclass(frozen=True)
class Deaths:
    """Works a, b, c and d, of three tokens each, in engines that die when they begin with one that kills."""

    killers: str
    blamed: str  # those that end with an error
    order: str = "abcd"  # in which engines admit what they are given: a grammar that compiles is overtaken
    room: int = 2  # works that an engine runs at a time
    mute: bool = False  # it dies before it has reported its busy works
    first: int = 0  # tokens a killer gets each time before its engine dies


DEATHS = {
    "the one that kills": Deaths("a", "a"),
    "who is behind it in the batch": Deaths("b", "b"),
    "who waited while others ran": Deaths("d", "d"),
    "each of two": Deaths("ac", "ac"),
    "each of three": Deaths("acd", "acd"),
    "all of them, if all do it": Deaths("abcd", "abcd"),
    "who came last and was begun first": Deaths("d", "d", order="dcba"),
    "nobody who waits for blocks": Deaths("a", "a", room=1),
    "nobody whose text grows": Deaths("ab", "", first=2),
    "one after the other, if nothing is known": Deaths("", "abcd", mute=True),
}


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("name", DEATHS)
async def test_busy_works_are_blamed_for_a_crash(name: str, replicas: int, handles: list[Handle]) -> None:
    case = DEATHS[name]
    ended: dict[str, str] = {}
    lengths: dict[str, int] = {}

    async def ask(backend: ReplicaBackend, name: str) -> None:
        try:
            async for delta in backend.generate([replace(WORK, id=name)]):
                lengths[name] = lengths.get(name, 0) + len(delta.token_ids)
        except BackendError as error:
            ended[name] = str(error)

    def step(engine: Handle) -> None:
        """One step of an engine, which may be its last."""
        left = [work for work in engine.given if work.id not in engine.gone]
        batch = sorted(left, key=lambda work: case.order.index(work.id))[: case.room]
        if not case.mute:
            engine.says("busy", [work.id for work in batch])
        kills = any(w.id in case.killers and engine.written.get(w.id, 0) >= case.first for w in batch)
        if kills or (case.mute and left):
            engine.dies()
            return
        for work in batch:
            last = len(work.prior_output) + engine.written.get(work.id, 0) == 2
            engine.gone += [work.id] * last
            engine.writes(work.id, 7, last=last)

    async with engines(replicas, CONFIG.with_options({"max_batch_size": 2})) as backend:
        await asyncio.sleep(1)
        asked = [asyncio.ensure_future(ask(backend, name)) for name in "abcd"]
        await asyncio.sleep(0)
        while not all(one.done() for one in asked):
            assert len(handles) < 40, "it would die for ever"
            for engine in [one for one in handles if one.status is None]:
                step(engine)
            await asyncio.sleep(1)
    assert sorted(ended) == list(case.blamed)
    assert all("died 3 times in a row" in reason for reason in ended.values())
    assert lengths == {name: 3 for name in "abcd" if name not in case.blamed}


async def test_requests_fail_without_engines(handles: list[Handle], monkeypatch: pytest.MonkeyPatch) -> None:
    async with engines() as backend:
        monkeypatch.setattr(replica, "EngineChild", cannot_start(0, 10_000, UserError("the model is gone")))
        handles[0].dies()
        for _ in range(2):  # works from before and after the replica was given up
            with pytest.raises(BackendError, match="cannot be restarted: the model is gone"):
                await asyncio.wait_for(Answering(backend, "w").task, 300)
            await asyncio.sleep(1000)
        await asyncio.sleep(2000 * 60)  # it is tried again, however often
        tried = len(handles)
        assert tried > 1500
        await asyncio.sleep(120)
        assert len(handles) > tried


async def test_an_engine_that_gives_no_sign_of_life_is_started_again(handles: list[Handle]) -> None:
    async with engines(timeout=120.0) as backend:
        received = asyncio.ensure_future(anext(backend.generate([WORK])))
        await asyncio.sleep(1000)
        assert not handles[0].killed  # it is idle
        for step in range(50):  # steps end, or the running step reads weights
            handles[0].state = Statistics(steps=1 + step // 9, streamed_bytes=step, step_seconds=1e4)
            await asyncio.sleep(100)
        assert not handles[0].killed
        handles[0].state = Statistics()
        await asyncio.sleep(100)
        handles[0].is_stopped = True
        await asyncio.sleep(60)
        handles[0].is_stopped = False  # half of the time is not enough
        await asyncio.sleep(1000)
        assert not handles[0].killed
        handles[0].is_stopped = True
        await asyncio.sleep(119)
        assert not handles[0].killed
        await asyncio.sleep(20)
        assert handles[0].killed
        assert restarts(backend) == 1
        assert [work.id for work in handles[1].given] == ["w"]
        handles[1].says("deltas", [Delta("w", "x", (7,))], None)
        assert (await received).text == "x"
        await asyncio.sleep(1000)
        assert len(handles) == 2
    await asyncio.sleep(1)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_step_that_hangs_is_ended(handles: list[Handle], caplog: pytest.LogCaptureFixture) -> None:
    async with engines(timeout=120.0) as backend:
        received = asyncio.ensure_future(anext(backend.generate([WORK])))
        await asyncio.sleep(13)
        began = asyncio.get_running_loop().time()
        for _ in range(119):  # until a second before the limit
            seconds = asyncio.get_running_loop().time() - began
            handles[0].state = Statistics(steps=7, running=1, step_seconds=seconds)
            await asyncio.sleep(1)
        assert not handles[0].killed
        await asyncio.sleep(14)
        assert handles[0].killed
        handles[1].says("deltas", [Delta("w", "x", (7,))], None)
        assert (await received).text == "x"
    assert "step 7 of the engine has made no progress for 120 seconds" in caplog.text
