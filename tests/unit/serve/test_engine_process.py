"""What an engine process says of itself, to a server that has to know when it has died."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from specinfer import LLM, SamplingParams
from specinfer.engine.trace import TreeEvent
from specinfer.serve.engine_process import EngineProcess
from specinfer.serve.work import Work

LONG = SamplingParams(seed=1, max_tokens=200, ignore_eos=True)


def hear(server: Connection, until: Any) -> list[tuple[Any, ...]]:
    """Messages up to the one that `until` holds for."""
    heard: list[tuple[Any, ...]] = []
    while not heard or not until(heard[-1]):
        assert server.poll(60), heard
        heard.append(server.recv())
    return heard


def ends(name: str) -> Any:
    return lambda message: (
        message[0] == "deltas"
        and any(delta.id == name and delta.finish_reason is not None for delta in message[1])
    )


def test_whom_it_is_busy_with_is_said_before_anything_is_computed(folder: Path) -> None:
    server, engine = Pipe()
    with LLM(folder, dtype="float32", kv_cache_memory=1 << 24, tree_size="fixed", max_batch_size=1) as llm:
        serving = threading.Thread(target=EngineProcess(llm, engine).serve)
        serving.start()
        try:
            assert server.recv()[0] == "ready"
            server.send(("add", [Work("a", (65, 66), LONG)]))
            hear(server, lambda message: message[0] == "deltas")
            server.send(("add", [Work("b", (67, 68), LONG)]))  # for which there is no room
            checked = hear(server, lambda message: message[0] == "busy" and "b" in message[1])
            assert checked[-1] == ("busy", ["b", "a"])
            of_a = hear(server, ends("a"))
            of_b = hear(server, ends("b"))
            done = llm.statistics().steps
        finally:
            server.close()
            serving.join(60)
    busy = [set(message[1]) for message in (*of_a, *of_b) if message[0] == "busy"]
    assert busy[:2] == [{"a"}, {"b"}]  # it was checked, it waited, and ran when there was room
    steps = [message[2].steps for message in (*of_a, *of_b) if message[0] == "deltas" and message[2]]
    assert steps == sorted(steps)
    assert steps[-1] == done


def test_a_tree_that_cannot_be_told_ends_no_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(event: TreeEvent, tokenizer: Any) -> Any:
        raise ValueError("a bug in telling trees")

    monkeypatch.setattr(TreeEvent, "to_json", broken)
    server, engine = Pipe()
    with LLM(folder, dtype="float32", kv_cache_memory=1 << 24, tree_size="fixed") as llm:
        serving = threading.Thread(target=EngineProcess(llm, engine).serve)
        serving.start()
        try:
            params = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
            server.send(("add", [Work("a", (65, 66), params, traced=True), Work("b", (67, 68), params)]))
            heard = hear(server, ends("a"))
        finally:
            server.close()
            serving.join(60)
    deltas = [delta for message in heard if message[0] == "deltas" for delta in message[1] if delta.id == "a"]
    assert [delta.finish_reason for delta in deltas][-1] == "length"
    assert sum(len(delta.token_ids) for delta in deltas) == 20
