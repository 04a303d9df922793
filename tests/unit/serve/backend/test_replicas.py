"""Two replicas of a tiny model, started by the command: kills, replacement, sessions and the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.served import Served
from tests.unit.serve.backend.listeners import Listeners, engines, ready, until
from tests.unit.serve.conftest import FLAGS


@pytest.fixture(scope="module")
def two(folder: Path, fork_server: type[subprocess.Popen[str]]) -> Iterator[Served]:
    flags = (*FLAGS, "--served-model-name", "tiny", "--replicas", "2")
    with Served(folder, *flags, popen=fork_server) as served:
        until(lambda: ready(served) == 2)
        yield served


def test_texts_are_those_of_their_seeds_whichever_replica_is_killed(two: Served, expected: list[str]) -> None:
    listeners = Listeners(two)
    os.kill(engines(two.process.pid)[0], signal.SIGKILL)
    until(lambda: ready(two) == 1)  # and never 0
    assert listeners.end() == expected
    assert two.metric("num_handed_on") >= 1
    assert any("ended with status -9 and is restarted; it had" in line for line in two.log)


def test_texts_are_those_of_their_seeds_while_engines_are_replaced(two: Served, expected: list[str]) -> None:
    until(lambda: ready(two) == 2)
    before, restarts = set(engines(two.process.pid)), two.metric("engine_restarts")
    two.process.send_signal(signal.SIGUSR1)
    rounds = 0
    while two.metric("engine_restarts") < restarts + 2 or ready(two) < 2:
        assert Listeners(two).end() == expected
        rounds += 1
    assert rounds
    assert not before & set(engines(two.process.pid))
    assert any("all engines have been replaced" in line for line in two.log)


def test_a_second_turn_finds_the_first_where_its_session_is(two: Served) -> None:
    prompt = "once upon a time there were " * 4
    found = []
    for n in range(8):
        for turn in (1, 2):
            answer = two.post(
                "/v1/completions",
                {"prompt": f"{n}{prompt}" + "a second turn" * (turn - 1), "max_tokens": 2},
                headers={"X-Session-Id": f"{n}"},
            ).json()
            found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found[::2] == [0] * 8
    assert all(tokens >= 96 for tokens in found[1::2])
    up = [line for line in two.get("/metrics").text.splitlines() if line.startswith("specinfer:replica_up{")]
    assert [line[-16:] for line in up] == ['replica="0"} 1.0', 'replica="1"} 1.0']


def test_a_session_may_be_as_long_as_a_header_and_no_longer(two: Served) -> None:
    asked = {"prompt": "a", "max_tokens": 1}
    assert two.post("/v1/completions", asked, headers={"X-Session-Id": "x" * 60_000}).status_code == 200
    try:
        answer = two.post("/v1/completions", asked, headers={"X-Session-Id": "x" * (1 << 24)})
    except httpx.TransportError:  # the server has answered, and reads no more
        pass
    else:
        assert answer.status_code == 431
    assert two.post("/v1/completions", asked).status_code == 200


def test_a_server_that_ends_while_a_replica_starts_leaves_no_processes(folder: Path) -> None:
    with Served(folder, *FLAGS, "--replicas", "2") as served:
        until(lambda: len(engines(served.process.pid)) == 2)
        pids = engines(served.process.pid)
        assert ready(served) == 1
        served.process.terminate()
        assert served.process.wait(30) == 0
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_server_that_ends_while_the_first_engine_starts_leaves_no_processes(folder: Path) -> None:
    command = [sys.executable, "-m", "specinfer", "serve", str(folder), "--port", "0", "--replicas", "2"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        until(lambda: len(engines(server.pid)) == 1)
        pids = engines(server.pid)
        time.sleep(0.5)
        server.terminate()
        server.wait(30)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
