"""The door of a group: at rank 0 where followers of other hosts come in, and how they knock.

    a follower of another host              rank 0
    both show the key (parallel/link.py)
    which rank it is                   -->
                                       <--  welcome, or why not
    its process begins                 <--  settings, as those of this host's followers (parallel/launch.py)

Whoever does not know the key hears nothing of the model. The door stays open as long as the group is there,
and tells those who come too late, or twice, why they are refused.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from specinfer.errors import ConfigError, PeerLostError
from specinfer.option import name_of_address
from specinfer.parallel.link import GREET, Greeter, Link, dial, listen

_LOG = logging.getLogger(__name__)
_PURPOSE: Final = "a rank of a group"
_PATIENCE: Final = 2.0  # seconds after which it is told who is waited for
_BEAT: Final = 0.5  # seconds between two signs of life
SILENCE: Final = 10.0  # seconds without any, after which a follower on another host takes rank 0 for lost
_HELLO: Final = 4096  # bytes at most
_WELCOME: Final = b'{"welcome": true}'
_MOST_STRANGERS: Final = 100  # whom it is told of
# Exit statuses of a follower's process.
CANNOT_LOAD: Final = 2
FAILED: Final = 70  # a bug, or a message that is none
PEER_LOST: Final = 75  # it has lost another rank: a temporary failure


class Guest(NamedTuple):
    """A follower of another host."""

    link: Link
    host: str  # a text that those have in common which share memory


class Door:
    """Where these ranks come in. Closing it closes no link."""

    def __init__(self, address: tuple[str, int], key: bytes, ranks: range) -> None:
        """Raises ConfigError where nobody may listen at this address, or somebody does."""
        self._name = name_of_address(address)
        self.ranks = ranks
        self._seats: dict[int, Guest] = {}
        self._changed = threading.Condition()
        self._strangers: set[tuple[str, str]] = set()  # hosts, and why nobody was let in from there
        self._greeter = Greeter(key, _PURPOSE)
        self._closed = threading.Event()
        try:
            self._listening = listen(*address)
        except OSError as error:
            raise ConfigError(
                f"cannot listen at {self._name} ({error.strerror or error}); master is an address of this "
                "host and a port that is free: name another one, for the followers too"
            ) from None
        self._listening.settimeout(_BEAT)
        threading.Thread(target=self._keep, name="door", daemon=True).start()

    def wait(self, limit: float) -> dict[int, Guest]:
        """All ranks, once all of them are here.

        Raises PeerLostError with those that are missing after `limit` seconds.
        """
        began, told = time.monotonic(), False
        with self._changed:
            while missing := self._missing():
                names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
                waited = time.monotonic() - began
                if not told and waited > _PATIENCE:
                    _LOG.warning(
                        "waits at %s for %s: specinfer follow MODEL --rank %s --master %s --key-file FILE",
                        *(self._name, names, missing[0], self._name),
                    )
                    told = True
                if waited > limit:
                    raise PeerLostError(
                        f"{names} did not come to {self._name} within {limit:g} s; start "
                        f"specinfer follow there with --master {self._name} and the same key",
                        missing[0],
                    )
                self._changed.wait(_BEAT)
            return dict(self._seats)

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # the thread that waits there would keep the port
        self._listening.close()

    def _missing(self) -> list[int]:
        return [rank for rank in self.ranks if rank not in self._seats or self._seats[rank].link.ended()]

    def _keep(self) -> None:
        while not self._closed.is_set():
            try:
                connection, address = self._listening.accept()
            except TimeoutError:
                pass
            except OSError:  # it is closed, or no file is left to be opened
                self._closed.wait(_BEAT)
            else:
                host = address[0]
                self._greeter.greet(connection, partial(self._hear, host), partial(self._tell, host))
            for guest in list(self._seats.values()):
                guest.link.beat()

    def _hear(self, host: str, link: Link) -> None:
        """Hear which rank it is that has shown the key."""
        try:
            link.within(GREET)
            said: Any = json.loads(link.receive(_HELLO))
            refusal = self._seat(Guest(link, str(said["host"])), said["rank"])
            if refusal:
                link.send(json.dumps(refusal).encode())
                link.close()
                self._tell(host, str(refusal["refused"]))
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            link.close()
            self._tell(host, str(error) or repr(error))

    def _tell(self, host: str, why: str) -> None:
        """Say once that somebody was not let in."""
        if (host, why) not in self._strangers and len(self._strangers) < _MOST_STRANGERS:
            self._strangers.add((host, why))
            _LOG.warning("a connection from %s was refused at %s: %s", host, self._name, why)

    def _seat(self, guest: Guest, rank: int) -> dict[str, object]:
        """Bid a rank welcome and give it its seat; what is to be said to one that gets none."""
        if rank not in self.ranks:
            ranks = ", ".join(map(str, self.ranks))
            return {"refused": f"rank {rank} is none of its followers on other hosts: {ranks}", "ends": True}
        with self._changed:
            taken = self._seats.get(rank)
            if taken is None or taken.link.ended():
                guest.link.send(_WELCOME)  # before anybody can say anything else
                guest.link.within(None)
                guest.link.expect_acknowledgements()
                self._seats[rank] = guest
                self._changed.notify_all()
                return {}
        where = "" if taken.link.hosts is None else f" from {taken.link.hosts[1]}"
        return {"refused": f"rank {rank} is there already{where}", "ends": False}


def knock(address: tuple[str, int], key: bytes, rank: int, host: str) -> Link:
    """The link of this rank to its rank 0, which must have the same key; it says next what is to be loaded.

    Ranks that share memory have the same `host`.

    Raises OSError and ValueError where nobody is there who says welcome now, KeyRefusedError for another key,
    ConfigError where the group has no such rank.
    """
    link = dial(*address, key, _PURPOSE)
    try:
        link.within(GREET)
        link.send(json.dumps({"rank": rank, "host": host}).encode())
        answer = link.receive(_HELLO)
        if answer != _WELCOME:
            said: Any = json.loads(answer)
            raise (ConfigError if said["ends"] else ConnectionRefusedError)(said["refused"])
    except EOFError:
        link.close()
        raise ConnectionResetError("it hung up") from None
    except BaseException:
        link.close()
        raise
    link.within(None)
    return link


def spawn(
    link: int, model: Path, memory: Mapping[int, int], key_file: str | None = None
) -> subprocess.Popen[bytes]:
    """Start the process of a follower on this host, over files that are open here; raises OSError.

    It inherits the socket `link`, which leads to rank 0, and files of memory that the ranks of a stage share,
    by the first rank of each stage.
    """
    told = {"link": link, "model": str(model), "memory": memory, "key_file": key_file, "parent": os.getpid()}
    return subprocess.Popen(
        [sys.executable, "-m", "specinfer.parallel.follower", json.dumps(told)],
        pass_fds=[link, *memory.values()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for its parent
    )
