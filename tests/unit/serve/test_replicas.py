"""Two replicas of a tiny model as users start them: kills, replacing, sessions, the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from specinfer import LLM, SamplingParams
from specinfer.bench.exchange import EventStream
from tests.served import Served
from tests.unit.serve.conftest import FLAGS

TOKENS = 1500
SEEDS = range(6)


def until(so: Callable[[], bool]) -> None:
    """Return when it is so; fails after a minute."""
    end = time.monotonic() + 60
    while not so():
        assert time.monotonic() < end
        time.sleep(0.02)


def engines(server: int) -> list[int]:
    """The process ids of a server's engines."""
    found = []
    for child in psutil.Process(server).children():
        try:
            found += [child.pid] * ("specinfer.serve.engine_process" in child.cmdline())
        except psutil.Error:
            continue
    return found


def ready(served: Served) -> int:
    """How many replicas serve."""
    answer = served.get("/ready").json()
    return int(answer["serving"]) if answer.get("status") == "ready" else 0


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Served]:
    with Served(folder, *FLAGS, "--served-model-name", "tiny", "--replicas", "2") as served:
        until(lambda: ready(served) == 2)
        yield served


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """The texts of all seeds, made offline."""
    params = [SamplingParams(temperature=1, seed=s, max_tokens=TOKENS, ignore_eos=True) for s in SEEDS]
    with LLM(folder, lookup=False, dtype="float32", kv_cache_memory=1 << 24) as llm:
        return [output.text for output in llm.generate([f"{s}abc" for s in SEEDS], params)]


class Listeners:
    """Somebody who streams the text of each seed, in a session of its own."""

    def __init__(self, served: Served) -> None:
        self.texts = ["" for _ in SEEDS]
        self.failures: list[str] = []
        self._served = served
        self._threads = [threading.Thread(target=self._listen, args=(seed,)) for seed in SEEDS]
        for one in self._threads:
            one.start()
        until(lambda: all(self.texts))

    def _listen(self, seed: int) -> None:
        body = {"prompt": f"{seed}abc", "seed": seed, "temperature": 1.0, "max_tokens": TOKENS}
        body |= {"ignore_eos": True, "stream": True}
        headers = {"X-Session-Id": f"somebody {seed}"}
        url = f"{self._served.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as answer:
            events = EventStream()
            for packet in answer.iter_bytes():
                for data in events.feed(packet):
                    if data == "[DONE]":
                        return
                    chunk = json.loads(data)
                    self.texts[seed] += "".join(choice["text"] for choice in chunk.get("choices", ()))
                    self.failures += [chunk["error"]["message"]] if "error" in chunk else []
        self.failures.append("the stream ended before the answer did")

    def end(self) -> list[str]:
        for one in self._threads:
            one.join(120)
        assert self.failures == []
        return self.texts


def test_texts_are_those_of_their_seeds_whichever_replica_is_killed(two: Served, expected: list[str]) -> None:
    listeners = Listeners(two)
    os.kill(engines(two.process.pid)[0], signal.SIGKILL)
    until(lambda: ready(two) == 1)  # and never 0
    assert listeners.end() == expected
    assert two.metric("num_handed_on") >= 1
    assert any("ended with status -9 and is started again; it had" in line for line in two.log)


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
    assert any("all engines were replaced" in line for line in two.log)


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


def test_a_server_that_is_told_to_end_while_a_replica_starts_leaves_nothing(folder: Path) -> None:
    with Served(folder, *FLAGS, "--replicas", "2") as served:
        until(lambda: len(engines(served.process.pid)) == 2)
        pids = engines(served.process.pid)
        assert ready(served) == 1
        served.process.terminate()
        assert served.process.wait(30) == 0
        until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def test_a_server_that_is_told_to_end_while_the_first_engine_starts_leaves_nothing(folder: Path) -> None:
    command = [sys.executable, "-m", "specinfer", "serve", str(folder), "--port", "0", "--replicas", "2"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        until(lambda: len(engines(server.pid)) == 1)
        pids = engines(server.pid)
        time.sleep(0.5)
        server.terminate()
        server.wait(30)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
