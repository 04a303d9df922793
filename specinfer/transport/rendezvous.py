"""Connects ranks with each other through their links to rank 0.

    gloo        each rank sends the address of its gloo listener; rank 0 forwards it to all others
    connect     two ranks get a link to each other: a socket pair on one host, else one of them
                listens on a free port, the other dials it, and both prove the key

So no fixed name or port is used, and no store that other processes may write to.
"""

from __future__ import annotations

import json
import secrets
import select
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Condition
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from specinfer.transport.link import Greeter, Link, dial, listen

HERE: Final = "127.0.0.1"  # gloo's address if all ranks are on one host
_ONE_HOST: Final = (HERE, HERE)  # the addresses of two processes on one host
_END: Final = b'{"met": true}'
_CHECK_INTERVAL: Final = 0.05  # seconds between checks for a proved key
_Store: Any = getattr(dist, "Store", object)  # builds without it cannot have several ranks without kernels


class _AddressStore(_Store):  # type: ignore[misc]  # the library has no types for it
    """A key-value store in which ranks of one gloo exchange their addresses."""

    def __init__(self, links: Sequence[Link], stage: int = 0) -> None:
        """`links` lead to the ranks that receive each new value; each pipeline stage has its own gloo."""
        super().__init__()
        self.links = links
        self._prefix = f"stage {stage}: "
        self.values: dict[str, bytes] = {}
        self.changed = Condition()
        self.closed = False

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value, and send it to the other ranks."""
        key = self._prefix + key
        self.put(key, value.encode() if isinstance(value, str) else bytes(value))
        for link in self.links:
            link.send(_put_message(key, self.values[key]))

    def put(self, key: str, value: bytes) -> None:
        """Store a value from another rank."""
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def close(self) -> None:
        """Wake all waiting threads."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        self.wait([key])
        return self.values[self._prefix + key]

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        """Wait until all of these keys have values."""
        with self.changed:
            found = self.changed.wait_for(
                lambda: self.closed or self._has(keys),
                None if limit is None else limit.total_seconds(),
            )
        if self.closed or not found:
            raise RuntimeError("a rank has not sent its address")

    def _has(self, keys: Sequence[str]) -> bool:
        return all(self._prefix + key in self.values for key in keys)


class _FollowerStore(_AddressStore):
    """A follower's store: it reads values that rank 0 forwards."""

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        """Wait until all of these keys have values."""
        [link] = self.links
        while not self._has(keys):
            message = json.loads(link.receive())
            self.put(message["pin"], bytes.fromhex(message["as"]))


def gloo_of_rank_0(size: int, links: Sequence[Link], *, limit: float, host: str = HERE) -> Any:
    """Rank 0's gloo of `size` ranks, listening at `host`; all followers must call `gloo_of`.

    Ranks of other stages connect in the same way. Raises RuntimeError, OSError, EOFError or ValueError if a
    rank does not connect within `limit` seconds.
    """
    store = _AddressStore(links)
    with ThreadPoolExecutor(1) as pool:
        own = pool.submit(_gloo, store, 0, size, limit, host)
        try:
            forward_addresses(links, limit, store)
        except BaseException:
            store.close()
            raise
        return own.result()


def gloo_of(place: int, size: int, link: Link, *, stage: int = 0, limit: float, host: str = HERE) -> Any:
    """The gloo of a follower at a place in its stage; `link` leads to rank 0. See `gloo_of_rank_0`."""
    found = _gloo(_FollowerStore([link], stage), place, size, limit, host)
    link.send(_END)
    while link.receive() != _END:  # addresses of ranks that this one has connected to already
        pass
    return found


def _put_message(key: str, value: bytes) -> bytes:
    return json.dumps({"pin": key, "as": value.hex()}).encode()


def _gloo(store: _AddressStore, rank: int, size: int, limit: float, host: str) -> Any:
    library: Any = dist  # the library has no types for it
    kind = library.distributed_c10d.ProcessGroupGloo
    options = kind._Options()
    options._timeout = timedelta(seconds=limit)
    options._devices = [kind.create_device(hostname=host)]
    return kind(store, rank, size, options)


def forward_addresses(links: Sequence[Link], limit: float, store: _AddressStore | None = None) -> None:
    """Forward addresses between followers, which call `gloo_of`, until all are connected.

    Rank 0 has a `store` if its own gloo is among them. Raises as `gloo_of_rank_0`.
    """
    poll, until = select.poll(), time.monotonic() + limit
    waiting = {link.number: link for link in links}
    for number in waiting:
        poll.register(number, select.POLLIN)
    while waiting:
        ready = poll.poll(1000 * max(0.0, until - time.monotonic()))
        if not ready:
            raise TimeoutError("a rank has not connected to the others in time")
        for number, _ in ready:
            message = waiting[number].receive()
            if message == _END:
                poll.unregister(number)
                del waiting[number]
                continue
            if store is not None:
                values = json.loads(message)
                store.put(values["pin"], bytes.fromhex(values["as"]))
            for other in links:
                if other.number != number:
                    other.send(message)
    for link in links:
        link.send(_END)


class RankLink(NamedTuple):
    """A link to a rank other than rank 0."""

    rank: int
    link: Link


def connect_ranks(
    links: Mapping[int, Link], first: int, second: int, *, key: bytes | None, limit: float
) -> Link | None:
    """Connect ranks `first` and `second`; called by rank 0, which has links to both.

    Each of the two that is a follower calls `accept_rank` at the same time. If `first` is 0, returns its new
    link, which is separate from the one for messages. `key` is needed if one of the two is on another host.
    Raises OSError, EOFError or ValueError if one of them is lost.
    """
    assert 0 <= first < second
    ends = [links.get(first), links[second]]
    far = [link is not None and link.hosts is not None for link in ends]
    if not any(far):
        pair = socket.socketpair()
        for link, end, peer in zip(ends, pair, (second, first), strict=True):
            if link is not None:
                with end:
                    link.send(json.dumps({"peer": peer}).encode())
                    link.send_socket(end)
        return Link(pair[0]) if first == 0 else None
    assert key is not None, "a rank on another host needs a key"
    purpose = f"ranks {first} and {second}, {secrets.token_hex(16)}"
    fields = {"purpose": purpose, "limit": limit}
    # A host's address may differ between networks. Each rank listens at its own address (""), and is dialled
    # at the address at which rank 0 sees it; the dialer uses its address of rank 0 if that is "".
    other, its = links[second], (links[second].hosts or _ONE_HOST)[0]
    if first == 0:
        with listen(its, 0) as listening:
            port = listening.getsockname()[1]
            other.send(json.dumps({"peer": first, "dial": ["", port], **fields}).encode())
            return _accepted(listening, key, purpose, limit)
    own = links[first]
    at, seen = (its, "") if own.hosts is None else ("", own.hosts[1])
    own.send(json.dumps({"peer": second, "listen": at, **fields, **_key_fields(own, key)}).encode())
    port = json.loads(own.receive())["port"]
    other.send(
        json.dumps({"peer": first, "dial": [seen, port], **fields, **_key_fields(other, key)}).encode()
    )
    return None


def accept_rank(link: Link, key: bytes | None) -> RankLink:
    """Accept the rank that rank 0 connects to this one; called by a follower, `link` leads to rank 0.

    A follower on rank 0's host needs no `key`, since rank 0 sends it. Raises as `connect_ranks`.
    """
    fields = json.loads(link.receive())
    if "purpose" not in fields:
        return RankLink(fields["peer"], Link(link.receive_socket()))
    key = bytes.fromhex(fields["key"]) if "key" in fields else key
    assert key is not None, "a rank on another host needs a key"
    purpose, limit = fields["purpose"], fields["limit"]
    own, rank_0 = link.hosts or _ONE_HOST
    if "dial" in fields:
        host, port = fields["dial"]
        return RankLink(fields["peer"], dial(host or rank_0, port, key, purpose, limit=limit))
    with listen(fields["listen"] or own, 0) as listening:
        link.send(json.dumps({"port": listening.getsockname()[1]}).encode())
        return RankLink(fields["peer"], _accepted(listening, key, purpose, limit))


def _key_fields(link: Link, key: bytes) -> dict[str, str]:
    """The key as message fields for a rank on this host, whose link is private."""
    return {"key": key.hex()} if link.hosts is None else {}


def _accepted(listening: socket.socket, key: bytes, purpose: str, limit: float) -> Link:
    """The first connection with the right key; raises TimeoutError if there is none."""
    found: SimpleQueue[Link] = SimpleQueue()
    greeter, until = Greeter(key, purpose), time.monotonic() + limit
    listening.settimeout(_CHECK_INTERVAL)
    while time.monotonic() < until:
        with suppress(TimeoutError):
            greeter.greet(listening.accept()[0], found.put, lambda why: None)
        with suppress(Empty):
            return found.get_nowait()
    raise TimeoutError(f"no connection with the key arrived within {limit:g} s")
