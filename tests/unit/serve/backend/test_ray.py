"""Replicas as actors of a Ray cluster; their texts equal those of one process."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.served import Served
from tests.tiny_models import write_tiny_llama
from tests.unit.serve.backend.listeners import Listeners, ready, until
from tests.unit.serve.conftest import FLAGS

pytest.importorskip("ray", reason="ray is not installed: pip install 'specinfer[cluster]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RAY = ("--cluster", "ray", "--served-model-name", "tiny", *FLAGS)


def actors(head: int) -> list[psutil.Process]:
    """The processes of the actors that run on a head's node."""
    return [one for one in below(head) if "EngineActor" in name(one)]


def below(process: int) -> list[psutil.Process]:
    return psutil.Process(process).children(recursive=True)


def name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def address() -> Iterator[int]:
    """The port of a head which servers are to find."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = int(free.getsockname()[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", f"127.0.0.1:{number}")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        yield number


@contextmanager
def on_a_head(folder: Path, *flags: str) -> Iterator[tuple[Served, int]]:
    """A server, and the process of the head of its cluster."""
    with address() as number, node(number, 2) as head, Served(folder, *RAY, *flags) as served:
        yield served, head


@pytest.fixture(scope="module")
def both(folder: Path) -> Iterator[tuple[Served, int]]:
    with on_a_head(folder, "--replicas", "2", "--engine-timeout", "10") as made:
        yield made


def whole(served: Served) -> None:
    until(lambda: ready(served) == 2)


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_texts_outlive_any_actor(both: tuple[Served, int], expected: list[str], stop: signal.Signals) -> None:
    two, head = both
    whole(two)
    assert sum("an actor with 1 CPUs of node " in line for line in two.log) >= 2
    restarts, handed_on = two.metric("engine_restarts"), two.metric("num_handed_on")
    actor = actors(head)[0]
    listeners = Listeners(two)
    actor.send_signal(stop)
    assert listeners.end() == expected
    until(lambda: two.metric("engine_restarts") == restarts + 1)
    assert two.metric("num_handed_on") > handed_on
    whole(two)
    until(lambda: len(actors(head)) == 2)


def test_texts_go_on_while_engines_are_replaced(both: tuple[Served, int], expected: list[str]) -> None:
    two, _ = both
    whole(two)
    restarts = two.metric("engine_restarts")
    two.process.send_signal(signal.SIGUSR1)
    while two.metric("engine_restarts") < restarts + 2 or ready(two) < 2:
        assert Listeners(two).end() == expected
    assert any("all engines have been replaced" in line for line in two.log)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_leaves_no_processes(folder: Path, stop: signal.Signals) -> None:
    with on_a_head(folder, "--replicas", "2") as (served, head):
        if stop == signal.SIGKILL:
            whole(served)  # else the second one is being started
        processes = [*below(served.process.pid), *actors(head)]
        served.process.send_signal(stop)
        served.process.wait(30)
        until(lambda: not any(one.is_running() for one in processes))
        served.process.returncode = 0  # so it was meant to be


def test_ranks_are_a_gang_on_the_node_of_their_actor(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "num_kv_heads": 2}
    sizes |= {"vocab_size": 256, "max_context": 2048, "eos_token_id": 0}
    made = write_tiny_llama(tmp_path / "tiny", tokenizer=True, **sizes)
    with on_a_head(made, "--tensor-parallel", "2", "--quantization", "int8") as (served, head):
        asked = {"prompt": "abc", "max_tokens": 400, "seed": 1, "ignore_eos": True}
        text = served.post("/v1/completions", asked).json()["choices"][0]["text"]
        [actor] = actors(head)
        [follower] = [one for one in actor.children() if "follower" in name(one)]
        follower.kill()
        until(lambda: served.metric("engine_restarts") == 1)
        assert served.post("/v1/completions", asked).json()["choices"][0]["text"] == text
        assert any("rank 1" in line and "has ended" in line for line in served.log)
        assert "Traceback" not in "".join(served.log)


@contextmanager
def node(port: int, cpus: int, number: int = 0) -> Iterator[int]:
    """The process of a node of a cluster of this host, as of `ray start`; number 0 is the head."""
    folder = tempfile.mkdtemp(prefix="ray-")  # sockets lie there, whose paths must not be long
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={cpus}"]
    command += [f"--node-ip-address=127.0.0.{number + 1}", "--object-store-memory=100000000"]
    command.append("--disable-usage-stats")
    if number:
        command += [f"--address=127.0.0.1:{port}"]
    else:
        command += ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
    env = {one: value for one, value in os.environ.items() if one != "RAY_ADDRESS"}
    env["RAY_TMPDIR"] = folder
    matching = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env=env, **matching) as process:
        try:
            assert any("will now block" in line for line in process.stdout)  # it has joined
            yield process.pid
        finally:
            for one in [*below(process.pid), process]:
                one.kill()
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def port() -> Iterator[int]:
    with address() as number:
        yield number


def test_replicas_go_and_come_with_their_head(folder: Path, expected: list[str], port: int) -> None:
    with ExitStack() as first:
        first.enter_context(node(port, 2))
        with Served(folder, *RAY, "--replicas", "2") as served:
            whole(served)
            assert Listeners(served).end() == expected
            first.close()
            until(lambda: ready(served) == 0)
            asked = served.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
            assert "no Ray cluster answers at" in asked.text
            with node(port, 2):
                whole(served)
                assert Listeners(served).end() == expected


def test_a_lost_node_is_done_without_for_a_time(folder: Path, expected: list[str], port: int) -> None:
    with node(port, 1), ExitStack() as second:
        second.enter_context(node(port, 1, 1))
        with Served(folder, *RAY, "--replicas", "2") as served:
            whole(served)
            for node_of in ("of node 127.0.0.1", "of node 127.0.0.2"):
                assert sum(node_of in line for line in served.log) == 1
            listeners = Listeners(served)
            second.close()
            assert listeners.end() == expected
            assert ready(served) == 1
            with node(port, 1, 2):
                whole(served)
                assert Listeners(served).end() == expected
