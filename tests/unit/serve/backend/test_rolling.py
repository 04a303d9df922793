"""Engines that are replaced one after another, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from specinfer.serve.backend import replica
from specinfer.serve.backend.work import BackendError
from tests.unit.serve.backend.handles import MSS, Answering, Handle, cannot_start, given, replicas


async def test_engines_are_replaced_one_after_another_and_their_works_go_on(handles: list[Handle]) -> None:
    async with replicas(2) as backend:
        works = [Answering(backend, name, session=name) for name in "abcdef"]
        await asyncio.sleep(0)
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
    async with replicas(1) as backend:
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


async def test_an_engine_that_dies_while_it_is_about_to_be_replaced_is_replaced(
    handles: list[Handle],
) -> None:
    async with replicas(2) as backend:
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
    monkeypatch.setattr(replica, "EngineChild", cannot_start(1, 1000))
    with caplog.at_level("ERROR"):
        async with replicas(2) as backend:
            await backend.roll()
            assert not handles[0].closed
    assert "replica 0 is not replaced: no other replica can serve meanwhile" in caplog.messages
