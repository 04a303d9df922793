"""A meeting: ranks that have links to rank 0 alone get to know one another by way of it.

    gloo        a rank says where its own gloo listens; rank 0 hands that on to all others
    introduce   two ranks get a link to one another: a pair of sockets on one host, else one of them
                listens on a port that is free, the other dials it, and both show the key

So nothing is met by a fixed name or port, nor by a store that anybody may write to.
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

from specinfer.parallel.link import Greeter, Link, dial, listen

HERE: Final = "127.0.0.1"  # where gloo listens if all ranks are on one host
_NOWHERE: Final = (HERE, HERE)  # the addresses of two processes of one host
_END: Final = b'{"met": true}'
_LOOK: Final = 0.05  # seconds after which it is looked again whether one has shown the key
_Store: Any = getattr(dist, "Store", object)  # builds without it cannot have several ranks without kernels


class _Board(_Store):  # type: ignore[misc]  # of which the library says little
    """Where ranks of one gloo pin up where they listen, and read where others do."""

    def __init__(self, links: Sequence[Link], stage: int = 0) -> None:
        """`links` lead to those who are told what is pinned up here; each pipeline stage has a gloo."""
        super().__init__()
        self.links = links
        self._room = f"stage {stage}: "
        self.pinned: dict[str, bytes] = {}
        self.changed = Condition()
        self.closed = False

    def set(self, key: str, value: bytes | str) -> None:
        """Pin a value up, and tell it."""
        key = self._room + key
        self.pin(key, value.encode() if isinstance(value, str) else bytes(value))
        for link in self.links:
            link.send(_pin(key, self.pinned[key]))

    def pin(self, key: str, value: bytes) -> None:
        """Pin up what somebody has told."""
        with self.changed:
            self.pinned[key] = value
            self.changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def get(self, key: str) -> bytes:
        """What is pinned up; waits for it."""
        self.wait([key])
        return self.pinned[self._room + key]

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        """Wait until all of these are pinned up."""
        with self.changed:
            found = self.changed.wait_for(
                lambda: self.closed or self._has(keys),
                None if limit is None else limit.total_seconds(),
            )
        if self.closed or not found:
            raise RuntimeError("a rank has not said where it listens")

    def _has(self, keys: Sequence[str]) -> bool:
        return all(self._room + key in self.pinned for key in keys)


class _FollowersBoard(_Board):
    """A follower's: it reads what rank 0 hands on."""

    def wait(self, keys: Sequence[str], limit: timedelta | None = None) -> None:
        """Wait until all of these are pinned up."""
        [link] = self.links
        while not self._has(keys):
            said = json.loads(link.receive())
            self.pin(said["pin"], bytes.fromhex(said["as"]))


def gloo_of_rank_0(size: int, links: Sequence[Link], *, limit: float, host: str = HERE) -> Any:
    """Rank 0's gloo, which listens at an address of this host; all followers must call `gloo_of`.

    It is of so many ranks; those of other stages meet in the same way. Raises RuntimeError, OSError, EOFError
    or ValueError where one of them does not come within `limit`.
    """
    board = _Board(links)
    with ThreadPoolExecutor(1) as pool:
        own = pool.submit(_gloo, board, 0, size, limit, host)
        try:
            hand_on(links, limit, board)
        except BaseException:
            board.close()
            raise
        return own.result()


def gloo_of(place: int, size: int, link: Link, *, stage: int = 0, limit: float, host: str = HERE) -> Any:
    """The gloo of a follower at that place in its stage; `link` leads to rank 0. As `gloo_of_rank_0`."""
    found = _gloo(_FollowersBoard([link], stage), place, size, limit, host)
    link.send(_END)
    while link.receive() != _END:  # what is pinned up by ranks that this one has met already
        pass
    return found


def _pin(key: str, value: bytes) -> bytes:
    return json.dumps({"pin": key, "as": value.hex()}).encode()


def _gloo(board: _Board, rank: int, size: int, limit: float, host: str) -> Any:
    library: Any = dist  # which says little of its types
    kind = library.distributed_c10d.ProcessGroupGloo
    options = kind._Options()
    options._timeout = timedelta(seconds=limit)
    options._devices = [kind.create_device(hostname=host)]
    return kind(board, rank, size, options)


def hand_on(links: Sequence[Link], limit: float, board: _Board | None = None) -> None:
    """Tell each of these followers, which call `gloo_of`, what the others pin up, until all have met.

    Rank 0 has a `board` if its own gloo is among them. Raises as `gloo_of_rank_0`.
    """
    poll, until = select.poll(), time.monotonic() + limit
    waiting = {link.number: link for link in links}
    for number in waiting:
        poll.register(number, select.POLLIN)
    while waiting:
        ready = poll.poll(1000 * max(0.0, until - time.monotonic()))
        if not ready:
            raise TimeoutError("a rank has not met the others in time")
        for number, _ in ready:
            said = waiting[number].receive()
            if said == _END:
                poll.unregister(number)
                del waiting[number]
                continue
            if board is not None:
                pinned = json.loads(said)
                board.pin(pinned["pin"], bytes.fromhex(pinned["as"]))
            for other in links:
                if other.number != number:
                    other.send(said)
    for link in links:
        link.send(_END)


class Met(NamedTuple):
    """A link to another rank than rank 0."""

    rank: int
    link: Link


def introduce(
    links: Mapping[int, Link], first: int, second: int, *, key: bytes | None, limit: float
) -> Link | None:
    """Give ranks `first` and `second` a link to one another; called by rank 0, whose links to all these are.

    Each of the two that is a follower calls `introduced` at the same time. Where `first` is 0 the link is
    returned, which is another one than that for messages. `key` is needed where one of the two is on another
    host. Raises OSError, EOFError or ValueError where one of them is lost.
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
    assert key is not None, "a rank on another host has shown that it knows the key"
    purpose = f"ranks {first} and {second}, {secrets.token_hex(16)}"
    told = {"purpose": purpose, "limit": limit}
    # An address may be another one to those outside: each listens at its own, "", and is dialled where it is
    # seen, of the host of rank 0 by the one that dials, "", else by rank 0.
    other, its = links[second], (links[second].hosts or _NOWHERE)[0]
    if first == 0:
        with listen(its, 0) as listening:
            port = listening.getsockname()[1]
            other.send(json.dumps({"peer": first, "dial": ["", port], **told}).encode())
            return _accepted(listening, key, purpose, limit)
    own = links[first]
    at, seen = (its, "") if own.hosts is None else ("", own.hosts[1])
    own.send(json.dumps({"peer": second, "listen": at, **told, **_shown(own, key)}).encode())
    port = json.loads(own.receive())["port"]
    other.send(json.dumps({"peer": first, "dial": [seen, port], **told, **_shown(other, key)}).encode())
    return None


def introduced(link: Link, key: bytes | None) -> Met:
    """The rank to which rank 0 has made a link for this one; called by a follower, `link` leads to rank 0.

    `key` may be missing at a follower of rank 0's own host, which is told. Raises as `introduce`.
    """
    told = json.loads(link.receive())
    if "purpose" not in told:
        return Met(told["peer"], Link(link.receive_socket()))
    key = bytes.fromhex(told["key"]) if "key" in told else key
    assert key is not None, "a rank on another host knows the key"
    purpose, limit = told["purpose"], told["limit"]
    own, rank_0 = link.hosts or _NOWHERE
    if "dial" in told:
        host, port = told["dial"]
        return Met(told["peer"], dial(host or rank_0, port, key, purpose, limit=limit))
    with listen(told["listen"] or own, 0) as listening:
        link.send(json.dumps({"port": listening.getsockname()[1]}).encode())
        return Met(told["peer"], _accepted(listening, key, purpose, limit))


def _shown(link: Link, key: bytes) -> dict[str, str]:
    """The key, for a rank of this host, to which a link is private."""
    return {"key": key.hex()} if link.hosts is None else {}


def _accepted(listening: socket.socket, key: bytes, purpose: str, limit: float) -> Link:
    """The first that comes with the right key, whoever else comes; raises TimeoutError where none does."""
    found: SimpleQueue[Link] = SimpleQueue()
    greeter, until = Greeter(key, purpose), time.monotonic() + limit
    listening.settimeout(_LOOK)
    while time.monotonic() < until:
        with suppress(TimeoutError):
            greeter.greet(listening.accept()[0], found.put, lambda why: None)
        with suppress(Empty):
            return found.get_nowait()
    raise TimeoutError(f"nobody came with the key within {limit:g} s")
