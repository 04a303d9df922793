"""The server's side of a Ray cluster, without Ray: its address, its free CPUs, and the relay of an actor."""

import importlib
import importlib.util
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from specinfer.cli.serve import _engine, configs
from specinfer.config import EngineConfig
from specinfer.errors import ConfigError
from specinfer.serve.backend import cluster
from specinfer.serve.backend.cluster import Cluster, configured_address, cpus_of_each

ENGINE = EngineConfig(model="m")


def test_replicas_share_the_cpus_of_a_cluster() -> None:
    cases: list[tuple[list[float], int, int, int | None, int]] = [
        ([8], 1, 1, None, 8),
        ([8], 2, 1, None, 4),
        ([8], 3, 1, None, 2),
        ([8, 8], 3, 1, None, 4),  # a replica is on one node
        ([8, 2], 3, 1, None, 2),
        ([4.5], 2, 2, None, 2),
        ([8, 2], 3, 1, 1, 1),
        ([8, 2], 2, 2, 4, 4),
        ([2], 1, 2, None, 2),
    ]
    for free, count, ranks, requested, cpus in cases:
        assert cpus_of_each(free, count, ranks, requested) == cpus, (free, count)


def test_replicas_that_do_not_fit_are_refused_with_the_free_cpus() -> None:
    cases: list[tuple[list[float], int, int, int | None, str]] = [
        ([2], 3, 1, None, r"--replicas 3 with at least 1 CPUs each do not fit .* 2 free CPUs, room for 2"),
        ([1, 3, 1], 2, 2, None, r"with at least 2 CPUs each .* have 1, 3, 1 free CPUs, room for 1"),
        ([8, 4], 3, 2, 6, r"with at least 6 CPUs each .* have 8, 4 free CPUs, room for 1"),
        ([], 1, 1, None, r"have 0 free CPUs, room for 0"),
    ]
    for free, count, ranks, requested, message in cases:
        with pytest.raises(ConfigError, match=message):
            pytest.fail(f"{free!r}: {cpus_of_each(free, count, ranks, requested)}")


def test_the_cluster_is_named_or_that_of_ray_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with pytest.raises(ConfigError, match="no Ray cluster runs on this host; start one with `ray start"):
        configured_address()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray/ray_current_cluster").write_text("10.0.0.1:6379\n")
    assert configured_address() == "10.0.0.1:6379"
    for value, address in {"": "10.0.0.1:6379", "auto": "10.0.0.1:6379", "h:1": "h:1"}.items():
        monkeypatch.setenv("RAY_ADDRESS", value)
        assert configured_address() == address
    for value in ("ray://10.0.0.1:10001", "10.0.0.1", "host:port", "local"):
        monkeypatch.setenv("RAY_ADDRESS", value)
        with pytest.raises(ConfigError, match="allowed: HOST:PORT of a cluster"):
            configured_address()


def test_a_cluster_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^ray is not installed; .* pip install 'specinfer\[cluster\]'$"):
        Cluster(ENGINE, 1)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{head.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=f"no Ray cluster answers at {address} "):
            Cluster(ENGINE, 1)
        head.listen()
        ends = {
            "raise SystemExit(1)": f"the Ray cluster at {address} does not answer; see Ray's own logs",
            "print('it has no disk'); raise SystemExit(2)": "^it has no disk$",
        }
        for program, message in ends.items():
            monkeypatch.setattr(cluster, "_QUERY", ["-c", program])
            with pytest.raises(ConfigError, match=message):
                Cluster(ENGINE, 1)
        monkeypatch.setattr(cluster, "_QUERY", ["-c", "print([4.0, 2.0])"])
        assert Cluster(ENGINE, 2).relay == ("specinfer.serve.backend.ray_relay", address, "2")
        assert Cluster(ENGINE.with_options({"threads": 3}), 1).relay[2] == "3"


def test_options_that_actors_lack_are_refused() -> None:
    master = {"tensor_parallel": 2, "quantization": "int8", "master": "10.0.0.1:29500", "key_file": "k"}
    cases: list[tuple[dict[str, Any], str]] = [
        (master, "cluster is ray with master; an actor's ranks are processes of its node"),
        ({"device": "cuda"}, "cluster is ray with device 'cuda'; actors are given CPUs alone"),
    ]
    for options, message in cases:
        given, config = configs({"cluster": "ray", **options}, None)
        with pytest.raises(ConfigError, match=message):
            pytest.fail(f"{options!r}: {_engine(given, config)}")


NAME = "specinfer.serve.backend.ray_relay"


@pytest.fixture
def ray_relay(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module with a Ray that has only names."""
    scheduling = "ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy"
    for name in ("ray.get", "ray.exceptions.RayError", "ray.util.placement_group", scheduling):
        module, _, member = name.rpartition(".")
        made = ModuleType(module)
        setattr(made, member, type(member, (Exception,), {}))
        monkeypatch.setitem(sys.modules, module, made)
    monkeypatch.setitem(sys.modules, NAME, None)  # forgotten afterwards
    del sys.modules[NAME]
    return importlib.import_module(NAME)


def remote(call: Callable[..., object]) -> Any:
    """A method of an actor."""
    return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=call))


@pytest.mark.parametrize("lost", [False, True])
def test_messages_after_the_servers_end_are_dropped(
    ray_relay: Any, lost: bool, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    received: Queue[bytes] = Queue()

    def engine() -> Iterator[list[tuple[bool, bytes]]]:
        yield [(False, b"ready")]
        if lost:
            raise RuntimeError("its node is gone")
        assert received.get(timeout=10) == b""
        yield [(False, b"one more"), (True, b"the last line\n")]

    actor = SimpleNamespace(serve=remote(lambda *_: engine()), send=remote(received.put))
    ray_relay.connect, ray_relay.start_actor = lambda _: None, lambda *_: actor
    ray_relay.ray.get = lambda value: value
    server, its = Pipe()
    server.send_bytes(b"a config")
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(ray_relay.relay, its, ("text", "info", "engine"), "", 1)
        assert server.recv_bytes() == b"ready"
        if not lost:
            server.close()
        assert ended.result(10) == (75 if lost else 0)
    assert ("the last line" in capsys.readouterr().err) is not lost
    assert ("the actor is lost: its node is gone" in caplog.text) is lost
    server.close()
    its.close()
