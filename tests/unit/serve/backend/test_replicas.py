"""Two replicas of a tiny model, started by the command: kills, replacement, sessions and the end."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.served import Served
from tests.unit.serve.backend.listeners import Listeners, engines, ready, until
from tests.unit.serve.conftest import FLAGS

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def two(folder: Path, fork_server: type[subprocess.Popen[str]]) -> Iterator[Served]:
    flags = (*FLAGS, "--served-model-name", "tiny", "--replicas", "2")
    with Served(folder, *flags, popen=fork_server) as served:
        until(lambda: ready(served) == 2)
        yield served


# About 6 s: three engine processes start.
def test_texts_are_those_of_their_seeds_whichever_replica_is_killed(two: Served, expected: list[str]) -> None:
    listeners = Listeners(two)
    os.kill(engines(two.process.pid)[0], signal.SIGKILL)
    serving = set[int]()
    until(lambda: serving.add(ready(two)) or two.metric("engine_restarts") >= 1)
    assert 0 not in serving
    assert listeners.end() == expected
    assert two.metric("num_handed_on") >= 1
    assert any("ended with status -9 and is restarted; it had" in line for line in two.log)
    says = r"server: ready: .*; context \d+; \d+ threads; .* of memory; KV cache of \d+ tokens, .*; http://"
    assert sum(re.search(says, line) is not None for line in two.log) == 1


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


def test_a_server_that_ends_while_a_replica_starts_leaves_no_processes(folder: Path) -> None:
    with Served(folder, *FLAGS, "--replicas", "2") as served:
        until(lambda: len(engines(served.process.pid)) == 2)
        pids = engines(served.process.pid)
        assert ready(served) == 1
        served.process.terminate()
        assert served.process.wait(30) == 0
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
