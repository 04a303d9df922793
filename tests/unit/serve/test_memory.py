"""Memory of a real server's process under hostile clients."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from tests.served import Served
from tests.unit.serve.backend.listeners import until
from tests.unit.serve.conftest import FLAGS

pytestmark = pytest.mark.slow

MiB = 1 << 20
MAX_MIB = 256 * MiB  # usually 130 to 180; all twenty bodies at once would take more
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


def highest(server: Served) -> int:
    """The most memory that the server's process has had, in bytes."""
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    limits = ("--max-batch-size", "32", "--max-waiting", "400", "--log-level", "warning")
    with Served(folder, *FLAGS, *limits) as one:
        yield one


def connect(server: Served) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def connections(server: Served) -> int:
    """Number of connections that the server has open."""
    own = psutil.Process(server.process.pid).net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED for one in own)


def pour(server: Served, head: bytes, more: bytes, size: int) -> int:
    """How many bytes could be sent on one connection, of `size`."""
    sent = 0
    with contextlib.suppress(OSError), connect(server) as one:
        one.sendall(head)
        while sent < size:
            one.sendall(more)
            sent += len(more)
    return sent


def at_once(*calls: Callable[[], object]) -> None:
    threads = [threading.Thread(target=one) for one in calls]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def endless_heads(server: Served) -> None:
    for head, more in ((POST, b"a:\r\n" * 10_000), (POST + b"a: ", b"a" * 40_000), (b"GET /", b"a" * 40_000)):
        at_once(*[partial(pour, server, head, more, 130 * MiB)] * 10)


def many_connections(server: Served) -> None:
    """Heads of many short headers, half heads and half bodies."""
    for count, sent in (
        (100, POST + b"a:\r\n" * 10_000 + b"Content-Length: 99\r\n\r\n"),
        (700, POST + b"a: " + b"x" * 30_000),
        (700, POST + b"Content-Length: 99\r\n\r\n" + b"x" * 90),
    ):
        with contextlib.ExitStack() as opened:
            for _ in range(count):
                with contextlib.suppress(OSError):
                    opened.enter_context(connect(server)).sendall(sent)
            until(lambda: connections(server) <= (512 if count > 512 else 0))  # noqa: B023


def unfinished_bodies(server: Served) -> None:
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(connect(server)) for _ in range(40)]

        def send(one: socket.socket) -> None:
            with contextlib.suppress(OSError):
                one.sendall(POST + b"Content-Length: %d\r\n\r\n" % (16 * MiB))
                for _ in range(15):
                    one.sendall(b"x" * MiB)

        at_once(*(partial(send, one) for one in clients))
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 2})  # others are served
        assert answer.status_code == 200


def whole_bodies(server: Served) -> None:
    """Bodies of 15 MiB that are JSON, one string and 400,000 small values."""

    def send(body: bytes) -> None:
        with contextlib.suppress(httpx.HTTPError):
            httpx.post(f"{server.url}/v1/completions", content=body, timeout=120)

    text = json.dumps({"prompt": "x" * (15 * MiB)}).encode()
    values = json.dumps({"prompt": [1234567890] * 400_000, "user": "u" * 11 * MiB}).encode()
    at_once(*(partial(send, body) for body in [text, values] * 10))


def unread_streams(server: Served) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 400, "ignore_eos": True, "stream": True}).encode()
    done = server.metric("request_success_total")
    with contextlib.ExitStack() as opened:
        for _ in range(60):
            one = opened.enter_context(connect(server))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        with contextlib.suppress(AssertionError):  # a server that cuts some of them off may do so
            until(lambda: server.metric("request_success_total") >= done + 60)


def test_strangers_take_little_memory(server: Served) -> None:
    for strangers in (endless_heads, many_connections, unfinished_bodies, whole_bodies, unread_streams):
        strangers(server)
        left = psutil.Process(server.process.pid).memory_info().rss
        print(f"{strangers.__name__}: at most {highest(server) / MiB:.0f} MiB, then {left / MiB:.0f} MiB")
        assert highest(server) <= MAX_MIB, strangers.__name__
        # It may still have to see that the strangers have hung up.
        until(lambda: server.get("/health").status_code == 200)
