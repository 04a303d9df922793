"""The engine's process as the server sees it: when it dies, who is blamed, what is counted over several."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.config import EngineConfig
from specinfer.engine.steps import Statistics
from specinfer.errors import UserError
from specinfer.request import Delta, FinishReason
from specinfer.serve import process_backend
from specinfer.serve.metrics import Metrics
from specinfer.serve.process_backend import ProcessBackend
from specinfer.serve.work import BackendError, EngineInfo, UnavailableError, Work
from tests.virtual_time import run_virtual

# It is ready at once, and the first time it ends at once as well.
ENGINE = """#!{python}
import pathlib, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[3]))
connection.recv_bytes()
connection.send(("ready", None))
begun = pathlib.Path(__file__).with_suffix(".begun")
if not begun.exists():
    begun.touch()
    sys.exit(3)
try:
    while True:
        connection.recv_bytes()
except EOFError:
    pass
"""
# It is ready at once; the first one hangs up then, and does not end.
LINGERING = """#!{python}
import pathlib, sys, time
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[3]))
connection.recv_bytes()
connection.send(("ready", None))
begun = pathlib.Path(__file__).with_suffix(".begun")
if not begun.exists():
    begun.touch()
    connection.close()
    time.sleep(600)
try:
    while True:
        connection.recv_bytes()
except EOFError:
    pass
"""
WORK = Work("w", (1,), SamplingParams(seed=1))


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(1000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


def threads() -> list[str]:
    return sorted(one.name for one in threading.enumerate() if one.name.startswith("engine-"))


def test_an_engine_that_dies_as_soon_as_it_is_ready_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "engine"
    script.write_text(ENGINE.format(python=sys.executable))
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    to_thread = asyncio.to_thread

    async def late(call: Callable[..., Any], *given: Any) -> Any:
        """As on a loop that is busy when the engine is ready."""
        made = await to_thread(call, *given)
        await asyncio.sleep(0.2)
        return made

    monkeypatch.setattr(asyncio, "to_thread", late)

    async def run() -> None:
        backend = ProcessBackend(EngineConfig(model="m"))
        await backend.start()
        await until(lambda: backend.restarts == 1)
        await until(lambda: threads() == ["engine-reader", "engine-writer"])  # none of the first one's
        assert backend.pid is not None
        await backend.close()
        await until(lambda: not threads())

    asyncio.run(run())


def test_the_loop_never_waits_for_a_process_that_hung_up_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "engine"
    script.write_text(LINGERING.format(python=sys.executable))
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    waits: list[str] = []
    wait = subprocess.Popen.wait

    def waiting(process: Any, timeout: float | None = None) -> int:
        waits.append(threading.current_thread().name)
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", waiting)

    async def run() -> None:
        backend = ProcessBackend(EngineConfig(model="m"))
        await backend.start()
        await until(lambda: backend.restarts == 1)
        waits.append("the second one")
        await backend.close()

    asyncio.run(run())
    first, of_second = waits[: waits.index("the second one")], waits[waits.index("the second one") + 1 :]
    assert set(first) == {"engine-reader"}
    assert of_second  # it was waited for
    assert threading.main_thread().name not in waits


class Handle:
    """In an EngineChild's place, an engine that does what a test says."""

    made: list[Handle] = []

    def __init__(self, log: tuple[str, str]) -> None:
        self.given: list[Work] = []
        self.status: int | None = None
        self.pid = 1
        self.killed = False
        self.is_stopped = False  # it answers nobody
        self.state = Statistics()  # its answer to whoever asks
        self.made.append(self)

    async def start(
        self, config: EngineConfig, loop: Any, deliver: Callable[..., None], died: Callable[..., None]
    ) -> EngineInfo:
        self._deliver, self._died = deliver, died
        return EngineInfo(10, 10, 1)

    def kill(self) -> None:
        self.killed = True
        asyncio.get_running_loop().call_soon(self.dies)

    async def close(self) -> None:
        pass

    def send(self, message: tuple[str, Any]) -> None:
        command, argument = message
        if command == "add":
            self.given += argument
        elif command == "ask" and not self.is_stopped:
            self.says("answer", argument, self.state)

    def says(self, *message: Any) -> None:
        self._deliver(self, message)

    def dies(self) -> None:
        self.status = -9
        self._died(self)


class Hopeless(Handle):
    """Only the first one ever starts."""

    async def start(self, *given: Any) -> EngineInfo:
        if len(self.made) > 1:
            raise UserError("the model is gone")
        return await super().start(*given)


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """The engines that were started, in order."""
    monkeypatch.setattr(process_backend, "EngineChild", Handle)
    monkeypatch.setattr(Handle, "made", [])
    return Handle.made


@dataclass(frozen=True)
class Deaths:
    """Works a, b, c and d, of three tokens each, in engines that die when they begin with one that kills."""

    killers: str
    blamed: str  # those that end with an error
    order: str = "abcd"  # in which engines admit what they are given: a grammar that compiles is overtaken
    room: int = 2  # works that an engine runs at a time
    mute: bool = False  # it dies before it has said whom it is busy with
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
    "nobody whose text grows": Deaths("ab", "", first=1),
    "one after the other, if nothing is known": Deaths("", "abcd", mute=True),
}


@pytest.mark.parametrize("name", DEATHS)
def test_of_an_engines_death_is_blamed(name: str, handles: list[Handle]) -> None:
    case = DEATHS[name]
    ended: dict[str, str] = {}
    said: dict[str, int] = {}

    async def ask(backend: ProcessBackend, name: str) -> None:
        try:
            async for delta in backend.generate([replace(WORK, id=name)]):
                said[name] = said.get(name, 0) + len(delta.token_ids)
        except BackendError as error:
            ended[name] = str(error)

    def step(engine: Handle, tokens: dict[str, int], ends: list[str]) -> bool:
        """One step of an engine; whether it has survived it."""
        works = sorted((w for w in engine.given if w.id not in ends), key=lambda w: case.order.index(w.id))
        batch = works[: case.room]
        if not case.mute:
            engine.says("busy", [work.id for work in batch])
        kills = any(work.id in case.killers and tokens.get(work.id, 0) >= case.first for work in batch)
        if kills or (case.mute and works):
            engine.dies()
            return False
        for work in batch:
            tokens[work.id] = tokens.get(work.id, 0) + 1
            last = len(work.said) + tokens[work.id] == 3
            reason = FinishReason.LENGTH if last else None
            engine.says("deltas", [Delta(work.id, "x", (7,), finish_reason=reason)], None)
            ends += [work.id] * last
        return True

    async def run() -> None:
        backend = ProcessBackend(EngineConfig(model="m").with_options({"max_batch_size": 2}))
        await backend.start()
        asked = [asyncio.ensure_future(ask(backend, name)) for name in "abcd"]
        await asyncio.sleep(0)
        while not all(one.done() for one in asked):
            assert len(handles) < 40, "it would die for ever"
            tokens: dict[str, int] = {}  # of this engine's
            ends: list[str] = []
            while step(handles[-1], tokens, ends) and not all(one.done() for one in asked):
                await asyncio.sleep(1)
            await asyncio.sleep(10)
        await backend.close()

    run_virtual(run())
    assert sorted(ended) == list(case.blamed)
    assert all("died 3 times in a row" in reason for reason in ended.values())
    assert said == {name: 3 for name in "abcd" if name not in case.blamed}


def test_what_was_reported_of_a_prompt_is_not_computed_again(handles: list[Handle]) -> None:
    got: list[Delta] = []

    async def ask(backend: ProcessBackend) -> None:
        params = SamplingParams(seed=1, prompt_logprobs=2)
        got.extend([delta async for delta in backend.generate([replace(WORK, params=params)])])

    async def run() -> None:
        backend = ProcessBackend(EngineConfig(model="m"))
        await backend.start()
        asked = asyncio.ensure_future(ask(backend))
        await asyncio.sleep(0)
        assert [work.params.prompt_logprobs for work in handles[-1].given] == [2]
        handles[-1].says("deltas", [Delta("w", "x", (7,), prompt_logprobs=(None,))], None)
        handles[-1].says("deltas", [Delta("w", "y", (8, 9))], None)
        handles[-1].dies()
        await asyncio.sleep(10)
        [work] = handles[-1].given
        assert (work.params.prompt_logprobs, work.said) == (None, (7, 8, 9))
        handles[-1].says("deltas", [Delta("w", "z", (3,), finish_reason=FinishReason.LENGTH)], None)
        await asked
        await backend.close()

    run_virtual(run())
    assert [(delta.text, delta.prompt_logprobs) for delta in got] == [("xy", (None,)), ("z", None)]


def test_what_engines_count_is_added_up_over_all_of_them(handles: list[Handle]) -> None:
    """And never falls, whenever an engine dies and whenever somebody asks."""
    first = Statistics(
        running=2,
        steps=10,
        preemptions=1,
        prefix_queries=100,
        prefix_hits=50,
        stage_seconds={"schedule": 1.0, "commit": 2.0},
        speculation_off_steps=5,
        guessed_tokens={"lookup": 8, "draft": 4},
        speculation_on=False,
        cost_factors={"target": 1.5},
    )
    second = Statistics(
        running=1,
        steps=3,
        prefix_queries=60,
        stage_seconds={"schedule": 0.5, "commit": 0.25},
        speculation_off_steps=2,
        guessed_tokens={"lookup": 0, "0-draft": 3},
        cost_factors={"target": 1.25, "0-draft": 2.0},
    )
    metrics = Metrics("m")

    def figures(text: str) -> dict[str, float]:
        found = {}
        for line in text.splitlines():
            if not line.startswith("#"):
                name, _, number = line.rpartition(" ")
                found[name.removeprefix("specinfer:").replace('model_name="m"', "")] = float(number)
        wanted = ("num_pre", "num_requests_running", "engine_s", "engine_restarts", "prefix_cache_hit_rate")
        wanted += ("speculation_o", "guessed_tokens", "pass_cost_factor")
        return {name: number for name, number in found.items() if name.startswith(wanted)}

    async def run() -> None:
        backend = ProcessBackend(EngineConfig(model="m"))
        await backend.start()

        async def told() -> dict[str, float]:
            return figures(metrics.text(await backend.health()).decode())

        handles[0].state = replace(first, steps=4)
        found = await told()
        assert (found["engine_steps{}"], found["speculation_on{}"]) == (4, 0)
        handles[0].says("deltas", [Delta("w", "x", (7,))], first)  # nobody asks between this and its death
        asked = asyncio.ensure_future(told())  # in just that moment
        handles[0].state = first
        await asyncio.sleep(0)
        handles[0].dies()
        assert (await asked)["engine_steps{}"] == 10
        await asyncio.sleep(1)
        assert (await told())["engine_steps{}"] == 10  # of the second one, which has not begun
        handles[1].state = second
        assert await told() == {
            "num_preemptions{}": 1,
            "num_requests_running{}": 1,
            "engine_steps{}": 13,
            'engine_stage_seconds{,stage="schedule"}': 1.5,
            'engine_stage_seconds{,stage="commit"}': 2.25,
            "engine_restarts{}": 1,
            "prefix_cache_hit_rate{}": 50 / 160,
            "speculation_off_steps{}": 7,
            "speculation_on{}": 1,
            **{f'guessed_tokens{{,speculator="{name}"}}': 8 for name in ("lookup", "ngram", "suffix")},
            'guessed_tokens{,speculator="draft"}': 4,
            'guessed_tokens{,speculator="0-draft"}': 3,
            'pass_cost_factor{model="target",}': 1.25,
            'pass_cost_factor{model="0-draft",}': 2.0,
        }
        await backend.close()

    run_virtual(run())


def test_while_no_engine_runs_all_requests_wait(handles: list[Handle]) -> None:
    running = Statistics(running=2, steps=7, kv_cache_usage=0.5, cost_factors={"target": 1.5})

    async def run() -> None:
        backend = ProcessBackend(EngineConfig(model="m"))
        await backend.start()
        works = [replace(WORK, id=f"w{i}") for i in range(3)]
        heard = [asyncio.ensure_future(anext(backend.generate([one]))) for one in works]
        await asyncio.sleep(0)
        handles[0].state = running
        health = await backend.health()
        assert (health.ready, health.state) == (True, running)
        handles[0].dies()
        health = await backend.health()
        assert (health.ready, health.state) == (False, Statistics(waiting=3, steps=7))
        for task in heard:
            task.cancel()
        await backend.close()

    run_virtual(run())


def test_nobody_waits_for_an_engine_that_cannot_be_started(
    handles: list[Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_backend, "EngineChild", Hopeless)

    async def ask(backend: ProcessBackend) -> None:
        async for _ in backend.generate([WORK]):
            raise AssertionError("nobody answers")

    async def test() -> None:
        backend = ProcessBackend(EngineConfig(model="m"))
        await backend.start()
        handles[0].dies()
        for _ in range(2):  # who was there before it was given up, and who came when it was
            with pytest.raises(BackendError, match="cannot be started again: the model is gone"):
                await asyncio.wait_for(ask(backend), 300)
            await asyncio.sleep(1000)
        await asyncio.sleep(2000 * 60)  # it is tried again, however often
        tried = len(handles)
        assert tried > 1500
        await asyncio.sleep(120)
        assert len(handles) > tried
        await backend.close()

    run_virtual(test())


def test_an_engine_that_gives_no_sign_of_life_is_started_again(handles: list[Handle]) -> None:
    async def run() -> None:
        backend = ProcessBackend(EngineConfig(model="m"), timeout=120.0)
        await backend.start()
        heard = asyncio.ensure_future(anext(backend.generate([WORK])))
        await asyncio.sleep(1000)
        assert not handles[0].killed  # it is in a long step, and answers
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
        assert backend.restarts == 1
        assert [work.id for work in handles[1].given] == ["w"]
        handles[1].says("deltas", [Delta("w", "x", (7,))], None)
        assert (await heard).text == "x"
        await asyncio.sleep(1000)
        assert len(handles) == 2
        await backend.close()
        await asyncio.sleep(1)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(run())


REFUSED = "the request has waited for 5 seconds, --max-wait, and others are still before it; come again"


def test_a_request_waits_no_longer_than_it_may_unless_its_first_step_has_begun(handles: list[Handle]) -> None:
    async def ask(backend: ProcessBackend, *names: str) -> list[tuple[str, float]]:
        """What came of them, and when."""
        heard: list[tuple[str, float]] = []
        loop, deltas = asyncio.get_running_loop(), backend.generate([replace(WORK, id=n) for n in names])
        try:
            heard.extend([(delta.id, loop.time()) async for delta in deltas])
        except UnavailableError as error:
            heard.append((str(error), loop.time()))
        return heard

    async def run() -> None:
        backend = ProcessBackend(EngineConfig(model="m"), max_wait=5.0)
        await backend.start()
        asked = [asyncio.ensure_future(ask(backend, *names)) for names in ("a", "b", "cd")]
        await asyncio.sleep(1)
        for name in "abcd":
            handles[0].says("deltas", [Delta(name)], None)
        await asyncio.sleep(3)
        for name in "ac":  # of c and d one has been computed, and what is computed is not thrown away
            handles[0].says("deltas", [Delta(name, begun=True)], None)
        await asyncio.sleep(6)
        ended = FinishReason.LENGTH
        for name in "acd":
            handles[0].says("deltas", [Delta(name, "x", (7,), finish_reason=ended)], None)
        assert [await one for one in asked] == [
            [("a", 1), ("a", 4), ("a", 10)],
            [(REFUSED, 5)],
            [("c", 1), ("d", 1), ("c", 4), ("c", 10), ("d", 10)],
        ]
        await backend.close()

    run_virtual(run())


def test_answers_can_be_cut_with_a_reason_and_are_counted(handles: list[Handle]) -> None:
    async def ask(backend: ProcessBackend, name: str) -> str:
        async for _ in backend.generate([replace(WORK, id=name)]):
            pass
        return "whole"

    async def run() -> None:
        backend = ProcessBackend(EngineConfig(model="m"))
        await backend.start()
        asked = [asyncio.ensure_future(ask(backend, name)) for name in "abc"]
        await asyncio.sleep(1)
        handles[0].says("deltas", [Delta("a", "x", (7,), finish_reason=FinishReason.LENGTH)], None)
        assert await asked[0] == "whole"
        assert backend.cut("it is over") == 2
        for one in asked[1:]:
            with pytest.raises(UnavailableError, match="it is over"):
                await one
        assert backend.cut("it is over") == 0
        await backend.close()

    run_virtual(run())


@pytest.mark.thorough
def test_the_books_of_a_real_engine_are_right_behind_kills_and_aborts(folder: Path) -> None:
    options = {"dtype": "float32", "kv_cache_memory": 1 << 24, "tree_size": "fixed", "lookup": True}
    config = EngineConfig.from_options(str(folder), options)
    works = [
        Work(f"w{i}", (65, 66, 67 + i), SamplingParams(seed=i, max_tokens=300, ignore_eos=True))
        for i in range(6)
    ]

    async def hear(backend: ProcessBackend, work: Work, until_tokens: int) -> list[int]:
        tokens: list[int] = []
        async with aclosing(backend.generate([work])) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
                if len(tokens) >= until_tokens:
                    break
        return tokens

    async def run() -> None:
        backend = ProcessBackend(config)
        await backend.start()
        try:
            expected = [await hear(backend, work, 300) for work in works[:3]]
            again = [replace(work, id=f"again {work.id}") for work in works[:3]]
            heard = [asyncio.ensure_future(hear(backend, work, 300)) for work in again]
            gone = [asyncio.ensure_future(hear(backend, work, 5)) for work in works[3:]]
            await asyncio.gather(*gone)
            assert backend.pid is not None
            os.kill(backend.pid, signal.SIGKILL)
            assert await asyncio.gather(*heard) == expected
            await asyncio.sleep(0.5)  # the last step tells of its tokens before it lets go of their blocks
            health = await backend.health()
            assert health.restarts == 1
            assert health.state is not None
            assert (health.state.running, health.state.waiting, health.state.kv_cache_usage) == (0, 0, 0.0)
        finally:
            await backend.close()

    asyncio.run(run())
