"""Clients that stream texts of fixed seeds from a server with several replicas, and its processes."""

import json
import threading
import time
from collections.abc import Callable

import httpx
import psutil

from tests.served import Served

TOKENS = 1500
SEEDS = range(6)


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fails after a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def engines(server: int) -> list[int]:
    """Return the process ids of a server's engines."""
    found = []
    for child in psutil.Process(server).children():
        try:
            found += [child.pid] * ("specinfer.serve.backend.engine_process" in child.cmdline())
        except psutil.Error:
            continue
    return found


def ready(served: Served) -> int:
    """Return the number of replicas that serve."""
    answer = served.get("/ready").json()
    return int(answer["serving"]) if answer.get("status") == "ready" else 0


class Listeners:
    """One client per seed, each streaming its text in a separate session."""

    def __init__(self, served: Served) -> None:
        self.texts = ["" for _ in SEEDS]
        self.failures: list[str] = []
        self._served = served
        self._grew_from = [0 for _ in SEEDS]
        self._threads = [threading.Thread(target=self._listen, args=(seed,)) for seed in SEEDS]
        for one in self._threads:
            one.start()
        until(lambda: all(self.texts))

    def _listen(self, seed: int) -> None:
        body = {"prompt": f"{seed}abc", "seed": seed, "temperature": 1.0, "top_p": 1.0}
        body |= {"max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        headers = {"X-Session-Id": f"client {seed}"}
        url = f"{self._served.url}/v1/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as answer:
            rest = b""  # lines are split at \n alone: str.splitlines would split texts
            for packet in answer.iter_bytes():
                *lines, rest = (rest + packet).split(b"\n")
                for data in (line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")):
                    if data == b"[DONE]":
                        return
                    chunk = json.loads(data)
                    self.texts[seed] += "".join(choice["text"] for choice in chunk.get("choices", ()))
                    self.failures += [chunk["error"]["message"]] if "error" in chunk else []
        self.failures.append("the stream ended before the answer")

    def listen(self) -> bool:
        """Whether a text goes on."""
        return any(one.is_alive() for one in self._threads)

    def grew(self) -> bool:
        """Whether each text that goes on is longer by 24 characters than when this was last True."""
        lengths = [len(text) for text in self.texts]
        both = zip(self._threads, lengths, self._grew_from, strict=True)
        waits = any(one.is_alive() and new < old + 24 for one, new, old in both)
        if not waits:
            self._grew_from = lengths
        return not waits

    def end(self) -> list[str]:
        for one in self._threads:
            one.join(120)
        assert not self.failures, self.failures
        return self.texts
