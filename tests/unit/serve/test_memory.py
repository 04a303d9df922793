"""Memory of a real server's process under hostile clients."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.served import Served
from tests.unit.serve.conftest import FLAGS

pytestmark = pytest.mark.slow

MiB = 1 << 20
MAX_MIB = 256 * MiB  # usually 130 to 180; all twenty bodies at once would take more
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


class Highest:
    """The most memory a process has while a block runs, looked at a hundred times a second."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.rss = 0

    def __enter__(self) -> Highest:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            self.rss = max(self.rss, self._process.memory_info().rss)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    with Served(
        folder, *FLAGS, "--max-batch-size", "32", "--max-waiting", "400", "--log-level", "warning"
    ) as one:
        yield one


def connect(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def pour(server: Served, head: bytes, more: bytes, size: int) -> int:
    """How many bytes could be sent on one connection, of `size`."""
    sent = 0
    with contextlib.suppress(OSError), connect(server) as one:
        one.sendall(head)
        while sent < size:
            one.sendall(more)
            sent += len(more)
    return sent


def short_headers(server: Served) -> None:
    pour(server, POST, b"a:\r\n" * 10_000, 4 * 33_000_000)


def endless_header(server: Served) -> None:
    pour(server, POST + b"a: ", b"a" * 100_000, 140 * MiB)


def endless_url(server: Served) -> None:
    pour(server, b"GET /", b"a" * 100_000, 140 * MiB)


def many_at_once(server: Served) -> None:
    for what in (short_headers, endless_header, endless_url):
        threads = [threading.Thread(target=what, args=(server,)) for _ in range(10)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()


def unfinished_bodies(server: Served) -> None:
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(connect(server)) for _ in range(40)]

        def send(one: socket.socket) -> None:
            with contextlib.suppress(OSError):
                one.sendall(POST + b"Content-Length: %d\r\n\r\n" % (16 * MiB))
                for _ in range(15):
                    one.sendall(b"x" * MiB)

        threads = [threading.Thread(target=send, args=(one,)) for one in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})  # others are served
        assert answer.status_code == 200


def whole_bodies(server: Served) -> None:
    """Bodies of 15 MiB that are JSON, one string and 400,000 small values."""

    def send(body: bytes) -> None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{server.url}/v1/completions", content=body, timeout=120)

    text = json.dumps({"prompt": "x" * (15 * MiB)}).encode()
    values = json.dumps({"prompt": [1234567890] * 400_000, "user": "u" * 11 * MiB}).encode()
    threads = [threading.Thread(target=send, args=(body,)) for body in [text, values] * 10]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def unread_streams(server: Served) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    done = server.metric("request_success_total")
    with contextlib.ExitStack() as opened:
        for _ in range(60):
            one = opened.enter_context(connect(server))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until = time.monotonic() + 100
        while server.metric("request_success_total") < done + 60 and time.monotonic() < until:
            time.sleep(0.2)


@pytest.mark.parametrize(
    "strangers",
    [
        *(short_headers, endless_header, endless_url, many_at_once),
        *(unfinished_bodies, whole_bodies, unread_streams),
    ],
)
def test_strangers_take_little_memory(strangers: Callable[[Served], None], server: Served) -> None:
    with Highest(server.process.pid) as highest:
        strangers(server)
    left = psutil.Process(server.process.pid).memory_info().rss
    print(f"{strangers.__name__}: at most {highest.rss / MiB:.0f} MiB, then {left / MiB:.0f} MiB")
    assert highest.rss <= MAX_MIB
    assert server.get("/health").status_code == 200
