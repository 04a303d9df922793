"""RankListener: rank 0 accepts followers from other hosts; `join_group` is the follower's side.

    a follower on another host              rank 0
    both prove the key (transport/link.py)
    its rank number                    -->
                                       <--  welcome, or a refusal with the reason
    its process starts                 <--  settings, as for followers on this host (parallel/launch.py)

A connection without the key gets no information about the model. The listener stays open as long as the group
exists, and sends late or duplicate followers the reason of the refusal.
"""

import json
import logging
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

from specinfer.errors import ConfigError, PeerLostError
from specinfer.option import name_of_address
from specinfer.transport.link import GREET, Greeter, Link, closed_on_error, dial, listen

_LOG = logging.getLogger(__name__)
_PURPOSE: Final = "a rank of a group"
_WARN_AFTER: Final = 2.0  # seconds of waiting before a warning
_HEARTBEAT: Final = 0.5  # seconds between heartbeats
SILENCE: Final = 10.0  # seconds without a heartbeat after which a remote follower considers rank 0 lost
_HELLO: Final = 4096  # maximum bytes
_WELCOME: Final = b'{"welcome": true}'
_MAX_REFUSALS: Final = 100  # maximum number of refused connections that are logged
# Exit statuses of a follower's process.
CANNOT_LOAD: Final = 2
FAILED: Final = 70  # a bug or an invalid message
PEER_LOST: Final = 75  # another rank is lost: a temporary failure


class RemoteRank(NamedTuple):
    """A follower on another host."""

    link: Link
    host: str  # identifies the host; ranks with the same value share memory


class RankListener:
    """Accepts the followers of these ranks."""

    def __init__(self, address: tuple[str, int], key: bytes, ranks: range) -> None:
        """Raises ConfigError if the address cannot be bound or is in use."""
        self._name = name_of_address(address)
        self.ranks = ranks
        self._joined: dict[int, RemoteRank] = {}
        self._changed = threading.Condition()
        self._refusals: set[tuple[str, str]] = set()  # hosts and reasons of logged refusals
        self._greeter = Greeter(key, _PURPOSE)
        self._closed = threading.Event()
        try:
            self._listening = listen(*address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {self._name} ({error.strerror or error}); master is an address of this "
                "host and a free port: choose another, for the followers too"
            ) from None
        self._listening.settimeout(_HEARTBEAT)
        threading.Thread(target=self._serve, name="listener", daemon=True).start()

    def wait(self, limit: float) -> dict[int, RemoteRank]:
        """Wait for all ranks, and return them.

        Raises PeerLostError, naming the missing ranks, after `limit` seconds.
        """
        began, warned = time.monotonic(), False
        with self._changed:
            while missing := self._missing():
                names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                waited = time.monotonic() - began
                if not warned and waited > _WARN_AFTER:
                    _LOG.warning(
                        "waiting at %s for %s: specinfer follow MODEL --rank %s --master %s --key-file FILE",
                        *(self._name, names, missing[0], self._name),
                    )
                    warned = True
                if waited > limit:
                    raise PeerLostError(
                        f"{names} did not connect to {self._name} within {limit:g} s; start "
                        f"specinfer follow there with --master {self._name} and the same key",
                        missing[0],
                    )
                self._changed.wait(_HEARTBEAT)
            return dict(self._joined)

    def close(self) -> None:
        """Accept no more followers, and close the links of those that have joined, which ends them."""
        with self._changed:
            self._closed.set()
            for remote in self._joined.values():
                remote.link.close()
        with suppress(OSError):
            # wakes the thread in accept, which would keep the port
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self._joined or self._joined[rank].link.ended()]

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listening.accept()
            except TimeoutError:
                pass
            except OSError:  # closed, or out of file descriptors
                self._closed.wait(_HEARTBEAT)
            else:
                host = address[0]
                self._greeter.greet(
                    connection, partial(self._read_rank, host), partial(self._log_refusal, host)
                )
            for remote in list(self._joined.values()):
                remote.link.beat()

    def _read_rank(self, host: str, link: Link) -> None:
        """Read the rank number of a connection that has proved the key, and admit or refuse it."""
        try:
            link.within(GREET)
            message: Any = json.loads(link.receive(_HELLO))
            refusal = self._admit(RemoteRank(link, str(message["host"])), message["rank"])
            if refusal:
                link.send(json.dumps(refusal).encode())
                link.close()
                self._log_refusal(host, str(refusal["refused"]))
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            link.close()
            self._log_refusal(host, str(error) or repr(error))

    def _log_refusal(self, host: str, why: str) -> None:
        """Log a refusal once."""
        if (host, why) not in self._refusals and len(self._refusals) < _MAX_REFUSALS:
            self._refusals.add((host, why))
            _LOG.warning("a connection from %s was refused at %s: %s", host, self._name, why)

    def _admit(self, remote: RemoteRank, rank: int) -> dict[str, object]:
        """Admit a rank; return an empty dict, or the refusal to send."""
        if rank not in self.ranks:
            ranks = ", ".join(map(str, self.ranks))
            return {"refused": f"rank {rank} is not a follower on another host: {ranks}", "ends": True}
        with self._changed:
            if self._closed.is_set():
                return {"refused": "the engine has ended", "ends": False}
            taken = self._joined.get(rank)
            if taken is None or taken.link.ended():
                remote.link.send(_WELCOME)  # must be the first message on the link
                remote.link.within(None)
                remote.link.expect_acknowledgements()
                self._joined[rank] = remote
                self._changed.notify_all()
                return {}
        where = "" if taken.link.hosts is None else f" from {taken.link.hosts[1]}"
        return {"refused": f"rank {rank} is connected already{where}", "ends": False}


def join_group(address: tuple[str, int], key: bytes, rank: int, host: str) -> Link:
    """Connect this rank to rank 0, which must have the same key; settings follow on the returned link.

    Ranks that share memory have the same `host`.

    Raises OSError and ValueError if rank 0 does not admit it now, KeyRefusedError for another key,
    ConfigError if the group has no such rank.
    """
    link = dial(*address, key, _PURPOSE)
    with closed_on_error(link, "rank 0 closed the connection"):
        link.within(GREET)
        link.send(json.dumps({"rank": rank, "host": host}).encode())
        answer = link.receive(_HELLO)
        if answer != _WELCOME:
            message: Any = json.loads(answer)
            raise (ConfigError if message["ends"] else ConnectionRefusedError)(message["refused"])
    link.within(None)
    return link
