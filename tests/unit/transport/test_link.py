"""Links over TCP: a peer without the key gets no data and has no effect."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from specinfer.errors import ConfigError, KeyRefusedError
from specinfer.transport import link as link_module
from specinfer.transport import rendezvous
from specinfer.transport.link import Link, dial, greet, listen, read_key
from specinfer.transport.rendezvous import accept_rank, connect_ranks
from tests.ranks import soon

pytestmark = pytest.mark.thorough

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def accepted(
    pool: ThreadPoolExecutor, dials: Callable[[int], object], limit: float = 30.0
) -> tuple[Future[Link], Future[object]]:
    """Return the results of a connection on the listening side, which has KEY, and on the other."""
    listening = listen("127.0.0.1", 0)

    def greets() -> Link:
        with listening:
            return greet(listening.accept()[0], KEY, "tests", limit=limit)

    return pool.submit(greets), pool.submit(dials, listening.getsockname()[1])


def tcp(pool: ThreadPoolExecutor) -> tuple[Link, Link]:
    ours, its = accepted(pool, lambda port: dial("127.0.0.1", port, KEY, "tests"))
    found = its.result(30)
    assert isinstance(found, Link)
    return ours.result(30), found


def test_those_who_know_the_key_have_a_link(pool: ThreadPoolExecutor) -> None:
    ours, its = tcp(pool)
    assert ours.hosts == its.hosts == ("127.0.0.1", "127.0.0.1")
    its.send(b"x" * 100_000)
    assert ours.receive() == b"x" * 100_000
    assert not ours.ended()
    its.close()
    assert ours.ended()
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()
    assert ours.ended()


@pytest.mark.parametrize(("key", "purpose"), [(OTHER, "tests"), (KEY, "another purpose")])
def test_another_key_is_refused_on_both_sides(pool: ThreadPoolExecutor, key: bytes, purpose: str) -> None:
    ours, its = accepted(pool, lambda port: dial("127.0.0.1", port, key, purpose))
    with pytest.raises(KeyRefusedError, match="it has not proved the key"):
        ours.result(30)
    with pytest.raises(KeyRefusedError, match=r"127.0.0.1:\d+ has another key"):
        its.result(30)


def message(said: bytes) -> bytes:
    return struct.pack("<II", 0x53504331, len(said)) + said


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        message(b""),
        message(b"x"),
        message(b"\0" * 64),
        message(b"\0" * 65),
        struct.pack("<II", 0x53504331, 1 << 28),
        struct.pack("<II", 0x53504330, 64) + b"\0" * 64,
        message(b"\0" * 64)[:-1],
    ],
)
def test_whoever_shows_no_key_hears_nothing_but_a_number(pool: ThreadPoolExecutor, said: bytes) -> None:
    def stranger(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(said)
            heard = b""
            try:
                while part := connection.recv(100):
                    heard += part
            except ConnectionResetError:
                pass
            return heard

    ours, heard = accepted(pool, stranger, limit=0.3)
    with pytest.raises((KeyRefusedError, OSError, ValueError)):
        ours.result(30)
    found = heard.result(30)
    assert len(found[:40]) in (0, 40)  # a reset may take it away
    assert found[40:] in (b"", message(b"another key"))


def test_a_stranger_who_repeats_what_it_hears_is_found_out(pool: ThreadPoolExecutor) -> None:
    """An attacker without the key forwards each side's challenge to the other."""

    def mirror(listening: socket.socket) -> None:
        with listening, listening.accept()[0] as connection:
            connection.sendall(message(b"n" * 32))
            said = connection.recv(200)
            connection.sendall(message(said[-32:]))

    listening = listen("127.0.0.1", 0)
    repeats = pool.submit(mirror, listening)
    with pytest.raises(KeyRefusedError, match="has not proved the key"):
        dial("127.0.0.1", listening.getsockname()[1], KEY, "tests")
    repeats.result(30)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", message(b"short")])
def test_what_listens_and_is_none_of_ours_is_left(pool: ThreadPoolExecutor, answer: bytes) -> None:
    def other(listening: socket.socket) -> None:
        with listening, listening.accept()[0] as connection:
            connection.sendall(answer)

    listening = listen("127.0.0.1", 0)
    pool.submit(other, listening)
    with pytest.raises((OSError, ValueError)):
        dial("127.0.0.1", listening.getsockname()[1], KEY, "tests")


def test_a_message_a_byte_at_a_time_is_not_waited_for_for_ever(pool: ThreadPoolExecutor) -> None:
    ours, its = tcp(pool)
    ended = threading.Event()

    def drip() -> None:
        for byte in struct.pack("<II", 0x53504331, 100):
            os.write(its.number, bytes([byte]))
        while not ended.wait(0.05):
            os.write(its.number, b"x")

    dripping = pool.submit(drip)
    ours.within(0.3)
    with pytest.raises(TimeoutError, match=r"no complete message arrived within 0\.3 s"):
        ours.receive()
    ended.set()
    dripping.result(30)
    ours.close()
    its.close()


def test_who_does_not_read_may_be_gone(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "_ACKNOWLEDGE", 2)
    (ours, its), (other, patient) = tcp(pool), tcp(pool)
    its.expect_acknowledgements()
    sending = [pool.submit(link.send, b"x" * (64 << 20)) for link in (its, patient)]
    for link in (its, patient):
        link.within(0.3, sending=False)
        with pytest.raises(TimeoutError):
            link.receive()
    assert soon(its.ended)  # behind a full buffer
    assert not patient.ended()
    with pytest.raises(OSError, match="timed out"):
        sending[0].result(30)
    assert len(other.receive()) == 64 << 20
    sending[1].result(30)
    for link in (ours, its, other, patient):
        link.close()


def test_a_rank_is_dialled_where_it_is_seen_and_listens_at_its_own_address(pool: ThreadPoolExecutor) -> None:
    (first, its), (second, others) = tcp(pool), private()
    first.hosts = ("127.0.0.1", "203.0.113.1")  # another one than its own
    its.hosts = ("127.0.0.1", "203.0.113.2")
    first.within(10.0)
    listens = pool.submit(accept_rank, its, KEY)
    assert connect_ranks({1: first, 2: second}, 1, 2, key=KEY, limit=1.0) is None
    invitation = json.loads(others.receive())
    assert invitation["dial"][0] == "203.0.113.1"
    dialled = dial("127.0.0.1", invitation["dial"][1], KEY, invitation["purpose"])
    assert listens.result(30).link.hosts == dialled.hosts


def test_strangers_do_not_keep_the_right_one_out(pool: ThreadPoolExecutor) -> None:
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
        found = pool.submit(rendezvous._accepted, listening, KEY, "tests", 4.0)
        own = dial("127.0.0.1", port, KEY, "tests")
        own.send(b"the right one")
        assert found.result(30).receive() == b"the right one"
    strangers[0].settimeout(3.0)  # less than each has to show a key
    while strangers[0].recv(100):  # until the oldest one is let go
        pass
    for one in strangers:
        one.close()


def test_keys_are_read_from_files_that_others_cannot_read(tmp_path: Path) -> None:
    file = tmp_path / "key"
    for written, mode, line in [
        (KEY, 0o644, r"others may read the key in .*key \(its mode is 644\): chmod 600 "),
        (KEY, 0o640, "others may read"),
        (b"short\n", 0o600, "has 5 bytes; allowed: 16 to 4096: make one with"),
        (b"x" * 5000, 0o600, "allowed"),
    ]:
        file.write_bytes(written)
        file.chmod(mode)
        with pytest.raises(ConfigError, match=line):
            read_key(file)
    with pytest.raises(ConfigError, match=r"cannot read the key in .*none: No such file"):
        read_key(tmp_path / "none")
    file.write_bytes(KEY + b"\n")
    assert read_key(file) == KEY


def private() -> tuple[Link, Link]:
    ours, its = socket.socketpair()
    return Link(ours), Link(its)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("far", [(), (1,), (2,), (1, 2)])
def test_two_ranks_get_one_link(pool: ThreadPoolExecutor, first: int, far: tuple[int, ...]) -> None:
    pairs = {rank: tcp(pool) if rank in far else private() for rank in (1, 2)}
    links = {rank: ours for rank, (ours, _) in pairs.items()}
    followers = {
        rank: pool.submit(accept_rank, pairs[rank][1], KEY if rank in far else None)
        for rank in (first, 2)
        if rank
    }
    own = connect_ranks(links, first, 2, key=KEY, limit=30.0)
    second = followers[2].result(30)
    if first:
        assert own is None
        assert followers[1].result(30).rank == 2
        own = followers[1].result(30).link
    assert second.rank == first
    assert (own.hosts is not None) == bool(set(far) & {first, 2})
    own.send(b"there")
    assert second.link.receive() == b"there"
    second.link.send(b"and back")
    assert own.receive() == b"and back"
    for link in (own, second.link, *(link for pair in pairs.values() for link in pair)):
        link.close()
