"""All connections of a server: their number, and the bytes that their requests hold."""

from __future__ import annotations

import asyncio

from specinfer.serve.http import connection
from specinfer.serve.http.connection import MAX_UNANSWERED, SPARE, Connections
from tests.unit.serve.http.pipes import HEAD, Server, run, settle

MiB = 1 << 20


def test_bodies_together_have_a_bound_and_the_largest_that_is_not_whole_goes_first() -> None:
    most = 10 * MiB

    async def test() -> None:
        server = Server(Connections(1000, most))
        small, answered = server.connect()
        small.data_received(HEAD + b"Content-Length: 2000\r\n\r\n" + b"x" * 1000)
        large = [server.connect() for _ in range(40)]
        for one, _ in large:
            one.data_received(HEAD + b"Content-Length: 15000000\r\n\r\n")
        await settle()
        highest = 0
        for _ in range(50):
            for one, _ in large:
                one.data_received(b"x" * 250_000)
                highest = max(highest, server.connections.held)
            await asyncio.sleep(0)
        assert highest <= most
        refused = [pipe for _, pipe in large if pipe.statuses == [503]]
        assert len(refused) >= 39
        assert all(b"retry-after: 5" in pipe.received.lower() for pipe in refused)
        await settle()
        assert server.events == ["gone"] * len(refused)
        small.data_received(b"x" * 1000)
        await settle()
        assert answered.statuses == [200]
        for one, _ in large:
            one.connection_lost(None)
        assert server.connections.held == 0

    run(test)


def test_requests_that_come_all_at_once_are_answered_up_to_a_number() -> None:
    async def test() -> None:
        server = Server()
        one, pipe = server.connect()
        one.data_received(b"GET / HTTP/1.1\r\n\r\n" * 10_000)
        assert server.connections.held < MAX_UNANSWERED * 3000
        async with asyncio.timeout(60):
            while not pipe.is_ended:
                await asyncio.sleep(0)
        assert pipe.statuses == [200] * MAX_UNANSWERED
        assert server.connections.held == 0
        few = Server(Connections(1000, 10_000))
        one, pipe = few.connect()
        one.data_received((b"GET /hold HTTP/1.1\r\n" + b"a: " + b"x" * 1000 + b"\r\n\r\n") * 20)
        assert few.connections.held <= 10_000
        few.hold.set()
        await settle()
        assert pipe.statuses == [200] * 3
        assert pipe.is_ended
        assert few.connections.held == 0

    run(test)


def test_at_the_limit_silent_connections_go_first_and_those_that_are_in_stay() -> None:
    async def test() -> None:
        server = Server(Connections(5, MiB))
        ask = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
        used, of_used = server.connect()
        used.data_received(ask)
        silent = [server.connect() for _ in range(25)]
        for one, _ in silent:  # half a request is none
            one.data_received(HEAD + b"Content-Length: 100\r\n\r\nhalf")
        await settle()
        assert [pipe.is_ended for _, pipe in silent] == [True] * 21 + [False] * 4
        used.data_received(ask)
        for one, _ in silent[-4:]:
            one.data_received(b"x" * 96)
        await settle()
        assert of_used.statuses == [200, 200]
        assert all(pipe.statuses == [200] for _, pipe in silent[-4:])
        # All of them have sent a request, so a further connection gets an error.
        late, _ = server.connect()
        late.data_received(ask)
        used.data_received(ask)
        await settle()
        assert [connection.OVER_LIMIT in scope["state"] for scope in server.scopes[-2:]] == [True, False]
        more = [server.connect() for _ in range(2 * SPARE)]
        assert server.connections.size <= 5 + SPARE
        left = [(one, pipe) for one, pipe in more if not pipe.is_ended]
        assert 0 < len(left) <= SPARE
        for one, _ in left:
            one.data_received(ask)
        await settle()
        assert all(connection.OVER_LIMIT in scope["state"] for scope in server.scopes[-len(left) :])
        used.data_received(ask)
        await settle()
        assert of_used.statuses == [200] * 4

    run(test)
