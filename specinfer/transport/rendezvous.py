"""Connects ranks with each other through their links to rank 0.

    gloo        rank 0 opens a TCPStore on a free port and sends its address; there ranks read the
                addresses of the others; the store is closed once all are connected
    connect     two ranks get a link to each other: a socket pair on one host, else one of them
                listens on a free port, the other dials it, and both prove the key

So no fixed name or port is used.
"""

import json
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from specinfer.transport.link import Greeter, Link, dial, listen

HERE: Final = "127.0.0.1"  # gloo's address if all ranks are on one host
_ONE_HOST: Final = (HERE, HERE)  # the addresses of two processes on one host
_CHECK_INTERVAL: Final = 0.05  # seconds between checks for a proved key
_LIBRARY: Any = dist  # it has no types


def open_store(host: str, links: Sequence[Link], limit: float) -> Any:
    """Open a store at this host's address `host`, and send its address over `links`; called by rank 0.

    It is open as long as the returned object exists. Raises OSError or RuntimeError.
    """
    with listen(host, 0) as listening:
        address = host, listening.getsockname()[1]
        store = _LIBRARY.TCPStore(
            *address,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit),
            master_listen_fd=listening.detach(),
        )
    for link in links:
        link.send(json.dumps({"store": address}).encode())
    return store


def gloo_of(
    place: int, size: int, address: tuple[str, int], *, stage: int = 0, limit: float, host: str = HERE
) -> Any:
    """The gloo of `size` ranks of a stage for the one at a place, which listens at `host`.

    `address` is that of rank 0's store. Raises RuntimeError if a rank does not connect in `limit` seconds.
    """
    kind, wait = _LIBRARY.distributed_c10d.ProcessGroupGloo, timedelta(seconds=limit)
    options = kind._Options()
    options._timeout = wait
    options._devices = [kind.create_device(hostname=host)]
    store = _LIBRARY.TCPStore(*address, is_master=False, timeout=wait)
    return kind(_LIBRARY.PrefixStore(f"stage {stage}", store), place, size, options)


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
