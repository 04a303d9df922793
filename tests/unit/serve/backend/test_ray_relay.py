"""The relay of an actor with a fake Ray: its messages and its end."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

NAME = "specinfer.serve.backend.ray_relay"


@pytest.fixture
def ray_relay(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with a Ray that has only names."""
    names = {
        "ray": ["get"],
        "ray.exceptions": ["RayError"],
        "ray.util": ["placement_group"],
        "ray.util.scheduling_strategies": ["PlacementGroupSchedulingStrategy"],
    }
    for module, members in names.items():
        made = ModuleType(module)
        for member in members:
            setattr(made, member, type(member, (Exception,), {}))
        monkeypatch.setitem(sys.modules, module, made)
    monkeypatch.setitem(sys.modules, NAME, None)  # forgotten afterwards
    del sys.modules[NAME]
    return importlib.import_module(NAME)


def method(call: Callable[..., object]) -> Any:
    """A method of an actor."""
    return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=call))


@pytest.mark.parametrize(("lost", "status"), [(False, 0), (True, 75)])
def test_messages_after_the_servers_end_are_dropped(
    ray_relay: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    *,
    lost: bool,
    status: int,
) -> None:
    received: Queue[bytes] = Queue()

    def engine() -> Iterator[list[tuple[bool, bytes]]]:
        yield [(False, b"ready")]
        if lost:
            raise RuntimeError("its node is gone")
        assert received.get(timeout=10) == b""
        yield [(False, b"one more"), (True, b"the last line\n")]

    actor = SimpleNamespace(serve=method(lambda *_: engine()), send=method(received.put))
    monkeypatch.setattr(ray_relay, "connect", lambda _: None)
    monkeypatch.setattr(ray_relay, "start_actor", lambda *_: actor)
    monkeypatch.setattr(ray_relay.ray, "get", lambda value: value)
    server, its = Pipe()
    server.send_bytes(b"a config")
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(ray_relay.relay, its, ("text", "info", "engine"), "", 1)
        assert server.recv_bytes() == b"ready"
        if not lost:
            server.close()
        assert ended.result(10) == status
    assert ("the last line" in capsys.readouterr().err) is not lost
    assert ("the actor is lost: its node is gone" in caplog.text) is lost
    server.close()
    its.close()
