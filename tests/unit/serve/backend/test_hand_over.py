"""Several replicas in virtual time: moved works, cache sizes, engines left out or replaced one by one."""

import asyncio
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from specinfer import SamplingParams
from specinfer.engine.steps import Statistics
from specinfer.errors import UserError
from specinfer.serve.backend import replica, replica_backend
from specinfer.serve.backend.work import BackendError
from specinfer.serve.observe.metrics import Metrics
from tests.unit.serve.backend import handles as scripted
from tests.unit.serve.backend.handles import MSS, WORK, Answering, Handle, Late, answering, engines, given


async def test_a_sessions_works_share_a_replica_and_go_on_when_it_dies(handles: list[Handle]) -> None:
    async with scripted.replicas(2) as backend:
        assert [one.number for one in handles] == [0, 1]
        works = [Answering(backend, f"{who}{turn}", session=who) for turn in (1, 2) for who in "abcdef"]
        await asyncio.sleep(0)
        homes = {name: one.number for one in handles for name in given(one)}
        assert len(homes) == len(works)
        assert set(homes.values()) == {0, 1}
        assert all(homes[f"{who}1"] == homes[f"{who}2"] for who in "abcdef")
        first, second = handles
        mine, theirs = set(given(first)), set(given(second))
        for one in works:
            handles[homes[one.name]].writes(one.name, 1, 2)
        first.says("busy", sorted(mine))
        first.dies()
        assert given(second) == {name: (1, 2) if name in mine else () for name in mine | theirs}
        first.writes(min(mine), 3)  # a message that came late
        assert len(handles) == 2  # the next engine is not there yet
        for one in works:
            second.writes(one.name, 3, last=True)
        assert [await one.task for one in works] == [[1, 2, 3]] * len(works)
        await asyncio.sleep(1)
        for who in "abcdef":
            Answering(backend, f"{who}3", session=who)
        await asyncio.sleep(0)
        back = {name: one.number for one in handles[1:] for name in given(one) if name[1] == "3"}
        assert all(back[f"{who}3"] == homes[f"{who}1"] for who in "abcdef")
        assert (await backend.health()).handed_on == len(mine)


async def test_a_text_keeps_its_fingerprint(handles: list[Handle], monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted.replicas(1) as backend:
        monkeypatch.setattr(Handle, "fingerprint", "another")
        started, new = Answering(backend, "begun"), Answering(backend, "new")
        await asyncio.sleep(0)
        handles[0].writes("begun", 1)
        handles[0].dies()
        with pytest.raises(BackendError, match="have another model, kernels or code"):
            await started.task
        assert started.tokens == [1]
        assert list(given(handles[1])) == ["new"]
        handles[1].writes("new", 1, last=True)
        assert await new.task == [1]


async def test_a_suspect_waits_to_be_alone(handles: list[Handle], monkeypatch: pytest.MonkeyPatch) -> None:
    async with scripted.replicas(3) as backend:
        monkeypatch.setattr(replica, "EngineChild", Late)
        works = await answering(backend, "abcdefghi")
        killer = "a"
        for _ in range(2):
            [where] = [one for one in handles if one.status is None and killer in given(one)]
            for name in set(given(where)) - {killer}:
                where.writes(name, 1)
                where.writes(name, 1)
            where.says("busy", list(given(where)))
            where.dies()
        last = next(one for one in handles if one.status is None)
        assert sorted(given(last)) == list("bcdefghi")
        await asyncio.sleep(11)
        fresh = [one for one in handles[3:] if given(one)]
        assert [list(given(one)) for one in fresh] == [[killer]]
        await answering(backend, "uvwxyz")
        assert list(given(fresh[0])) == [killer]
        assert sum(name in "uvwxyz" for one in handles if one.status is None for name in given(one)) == 6
        fresh[0].says("busy", [killer])
        fresh[0].dies()
        with pytest.raises(BackendError, match="died 3 times in a row"):
            await works[0].task


class OfItsOwnKind(Handle):
    """An engine whose texts are those of its replica alone."""

    def __init__(self, log: tuple[str, str], number: int = 0, count: int = 1, cluster: Any = None) -> None:
        super().__init__(log, number, count)
        self.fingerprint = f"kind {number}"


async def test_a_work_awaits_its_fingerprint(handles: list[Handle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "EngineChild", OfItsOwnKind)
    async with scripted.replicas(2) as backend:
        await answering(backend, "abcdef")
        untouched, *started = sorted(given(handles[0]))
        for name in started:
            handles[0].writes(name, 1)
        before = set(given(handles[1]))
        handles[0].dies()
        assert set(given(handles[1])) - before == {untouched}
        assert started
        await asyncio.sleep(1)
        assert handles[2].number == 0
        assert given(handles[2]) == dict.fromkeys(started, (1,))


async def test_replicas_share_the_cores(handles: list[Handle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_backend, "usable_cores", lambda: 5)
    cases: list[tuple[dict[str, Any], int, list[int]]] = [
        ({}, 2, [2, 3]),
        ({}, 8, [1] * 8),
        ({"threads": 4}, 2, [4, 4]),
        ({"tensor_parallel": 2, "quantization": "int8"}, 2, [1, 1]),
    ]
    for options, count, threads in cases:
        handles.clear()
        async with engines(count, scripted.CONFIG.with_options(options)):
            await asyncio.sleep(1)
            assert [one.config.threads for one in handles] == threads


async def test_on_a_cluster_nodes_share_their_own_cores(handles: list[Handle]) -> None:
    nodes = object()
    first: Any = Handle(("info", "text"), 0, 2, nodes)
    async with engines(2, child=first):
        await asyncio.sleep(1)
        assert [one.config.threads for one in handles] == [None, None]
        assert [one.cluster for one in handles] == [nodes, nodes]


async def test_a_work_goes_where_it_has_room(handles: list[Handle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Handle, "max_length", 100)
    async with engines(2) as backend:
        monkeypatch.setattr(Handle, "max_length", 1000)
        await asyncio.sleep(1)
        sizes = {"fits": 50, "is long": 500, "is too long": 5000}
        for (what, size), n in product(sizes.items(), "0123"):
            params = SamplingParams(seed=1, max_tokens=size)
            Answering(backend, f"{what} {n}", replace(WORK, params=params), n)
        await asyncio.sleep(0)
        assert {name[:-2] for name in given(handles[0])} == {"fits"}
        assert {"is long", "is too long"} <= {name[:-2] for name in given(handles[1])}
        monkeypatch.setattr(replica, "EngineChild", scripted.cannot_start(1, 1000))
        handles[1].dies()
        assert {name[:-2] for name in given(handles[0])} == {"fits"}
        await asyncio.sleep(20)  # the replica with the larger cache is left out now
        assert {name[:-2] for name in given(handles[0])} == set(sizes)


@pytest.mark.parametrize("error", [UserError("no memory"), BackendError("no memory")])
async def test_a_replica_that_cannot_start_is_left_out_and_tried_now_and_then(
    error: Exception, handles: list[Handle], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica, "EngineChild", scripted.cannot_start(1, 5, error))
    with caplog.at_level("ERROR"):
        async with scripted.replicas(3) as backend:
            await asyncio.sleep(8)
            assert [one.runs for one in backend._replicas] == [True, False, True]
            assert backend._replicas[1].is_left_out
            health = await backend.health()
            assert health.trouble == ""
            troubles = [one.trouble for one in health.replicas]
            assert troubles == ["", "replica 1 cannot be started: no memory", ""]
            await answering(backend, "abcdefgh")
            assert sum(len(given(one)) for one in handles if one.number != 1) == 8
            await asyncio.sleep(200)
            assert all(one.runs for one in backend._replicas)
    assert [line for line in caplog.messages if "left out" in line] == ["replica 1 is left out for now"]


async def test_replicas_are_counted_together_and_separately(handles: list[Handle]) -> None:
    one = Statistics(running=2, waiting=1, steps=10, kv_cache_usage=0.5, cost_factors={"target": 1.5})
    other = Statistics(running=1, steps=5, prefix_queries=8, prefix_hits=6, speculation_on=False)
    async with scripted.replicas(2) as backend:
        for handle, state in zip(handles, (one, other), strict=True):
            handle.state = state
        health = await backend.health()
        prefix = {"prefix_queries": 8, "prefix_hits": 6}
        both = replace(one, running=3, steps=15, kv_cache_usage=0.25, **prefix)
        assert health.state == both
        text = Metrics("m").text(health).decode()
        for line in (
            'num_requests_running{model_name="m"} 3.0',
            'engine_steps{model_name="m"} 15.0',
            'replica_up{model_name="m",replica="1"} 1.0',
            'replica_requests_running{model_name="m",replica="0"} 2.0',
            'replica_prefix_hits{model_name="m",replica="1"} 6.0',
        ):
            assert f"specinfer:{line}\n" in text
        handles[1].is_stopped = True  # its last report still counts
        health = await backend.health()
        assert (health.state.steps, health.trouble) == (15, "")
        assert health.replicas[1].trouble == "replica 1 does not answer"
        handles[0].is_stopped = True
        health = await backend.health()
        assert health.state.steps == 15
        assert health.trouble == "replica 0 does not answer; replica 1 does not answer"


async def test_engines_are_replaced_one_after_another_and_their_works_go_on(handles: list[Handle]) -> None:
    async with scripted.replicas(2) as backend:
        works = await answering(backend, "abcdef")
        mine, theirs = sorted(given(handles[0])), sorted(given(handles[1]))
        bound = Answering(backend, "bound", MSS, session=mine[0])
        await asyncio.sleep(0)
        for name in (*mine, "bound"):
            handles[0].writes(name, 1)
        backend.begin_roll()
        backend.begin_roll()  # once more is not twice
        await asyncio.sleep(1)
        assert sorted(handles[0].gone) == mine
        assert given(handles[1]) == {**dict.fromkeys(theirs, ()), **dict.fromkeys(mine, (1,))}
        assert not handles[0].closed  # it has a text that no other engine may go on with
        new = Answering(backend, "new", session=mine[0])
        await asyncio.sleep(0)
        assert "new" in given(handles[1])
        health = await backend.health()
        assert (health.trouble, health.replicas[0].trouble) == ("", "replica 0 is being replaced")
        handles[0].writes("bound", 2, last=True)
        assert await bound.task == [1, 2]
        await asyncio.sleep(5)
        assert handles[0].closed
        assert handles[1].closed
        assert [one.number for one in handles] == [0, 1, 0, 1]
        for one in (*works, new):
            [now] = [h for h in handles if not h.closed and one.name in given(h)]
            assert given(now)[one.name] == ((1,) if one.name in mine else ())
            now.writes(one.name, 5, last=True)
            assert await one.task == [1, 5] if one.name in mine else [5]
        health = await backend.health()
        assert (health.trouble, health.restarts) == ("", 2)


async def test_a_single_replica_finishes_texts_before_it_is_replaced(handles: list[Handle]) -> None:
    async with scripted.replicas(1) as backend:
        old = Answering(backend, "old")
        await asyncio.sleep(0)
        handles[0].writes("old", 1)
        backend.begin_roll()
        await asyncio.sleep(1)
        new = Answering(backend, "new")
        await asyncio.sleep(1)
        assert (await backend.health()).trouble == "the engine is being replaced"
        assert list(given(handles[0])) == ["old"]
        handles[0].writes("old", 2, last=True)
        await asyncio.sleep(1)
        assert list(given(handles[1])) == ["new"]
        handles[1].writes("new", 3, last=True)
        assert (await old.task, await new.task) == ([1, 2], [3])


async def test_an_engine_that_dies_before_it_is_replaced_is_replaced(handles: list[Handle]) -> None:
    async with scripted.replicas(2) as backend:
        bound = Answering(backend, "bound", MSS, session="a")
        await asyncio.sleep(0)
        [mine] = [one for one in handles if given(one)]
        mine.writes("bound", 1)
        backend.begin_roll()
        await asyncio.sleep(5)
        assert not mine.closed
        mine.dies()
        with pytest.raises(BackendError, match="under mss"):
            await bound.task
        await asyncio.sleep(5)
        assert sorted(one.number for one in handles) == [0, 0, 1, 1]
        assert not (await backend.health()).trouble
        assert all(one.serves for one in backend._replicas)


async def test_the_only_replica_that_serves_is_not_replaced_where_there_should_be_others(
    handles: list[Handle], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica, "EngineChild", scripted.cannot_start(1, 1000))
    with caplog.at_level("ERROR"):
        async with scripted.replicas(2) as backend:
            await backend.roll()
            assert not handles[0].closed
    assert "replica 0 is not replaced: no other replica can serve meanwhile" in caplog.messages
