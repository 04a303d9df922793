"""Link: a stream of messages between two processes of ours, on one host or, with a key, on two.

    the one that dials                        the one that listens
                                         <--  a number of its own (a nonce)
    who it wants to be, a number of its own,
    and the HMAC of both under the key   -->  wrong: it closes the connection
    wrong: it closes the connection      <--  another HMAC of both
    messages                             <->  messages

So each has shown that it knows the key, which never travels, before anything else is said. Messages that
follow are neither secret nor signed: whoever can change what the network carries can change them.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from specinfer.errors import ConfigError, KeyRefusedError

_MAGIC: Final = 0x53504331  # of messages of this version
_HEADER: Final = 8  # bytes: this number, and how many bytes follow
_MOST: Final = 1 << 28  # bytes of a message
_NONCE: Final = 32  # bytes of a number that is used once
_PROOF: Final = 32  # bytes of an HMAC
_OTHER_KEY: Final = b"another key"  # the answer to whoever shows none, or another one
GREET: Final = 5.0  # seconds that such a one has for all of it
_MOST_UNKNOWN: Final = 32  # connections whose key is not known yet
_LEAST_KEY, _MOST_KEY = 16, 4096  # bytes
LOST: Final = b'{"lost": true}'  # the last word of a rank that has lost another one
_GONE: Final = 10  # seconds without an answer of the other host's system, after which a connection is lost
# Closed from the other side; elsewhere than on Linux its end shows only when it is read.
_CLOSED: Final = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class Link:
    """A stream of messages between two processes of ours, each as long as its header says.

    Nobody hears of an empty message: it is a sign of life. One thread may receive, several may send.
    """

    hosts: tuple[str, str] | None  # addresses of this host and of the other; None: both ends are on this one
    lost_another: bool  # whether the other end has said that it has lost another rank

    def __init__(self, ours: socket.socket) -> None:
        """Raises OSError for a connection that has ended."""
        self.hosts, self.lost_another = None, False
        if ours.family in (socket.AF_INET, socket.AF_INET6):  # which cannot be asked once it is reset
            self.hosts = ours.getsockname()[0], ours.getpeername()[0]
        self._socket = ours
        self._limit = ours.gettimeout()  # seconds that a message may take to come
        self._sending = threading.Lock()

    @classmethod
    def of(cls, number: int) -> Link:
        """That over an open socket that was inherited."""
        return cls(socket.socket(fileno=number))

    @property
    def number(self) -> int:
        """The number of the open socket."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Send a message; raises OSError where the other end is gone, or does not take it in time."""
        with self._sending:
            self._socket.sendall(_MAGIC.to_bytes(4, "little") + len(message).to_bytes(4, "little") + message)

    def send_last(self, message: bytes, seconds: float) -> None:
        """Send a message, and let the other end close the link, within so many seconds; raises as `send`.

        A connection that is closed with signs of life unread is reset, and the message might be lost.
        """
        self.send(message)
        if self.hosts is not None:
            self.wait_for_end(seconds)

    def beat(self) -> None:
        """Give a sign of life, if that is possible at once; never raises."""
        if not self._sending.acquire(blocking=False):
            return  # something is being sent, which is one
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            if poll.poll(0):
                self._socket.sendall(_MAGIC.to_bytes(4, "little") + bytes(4))
        except (OSError, ValueError):  # the link is closed
            pass
        finally:
            self._sending.release()

    def receive(self, most: int = _MOST) -> bytes:
        """Wait for the next message, of `most` bytes at most.

        Raises EOFError where the other end has closed the link or has lost another rank, TimeoutError where
        it says nothing in time, ValueError for what is no message of ours.
        """
        while True:
            header = self._exactly(_HEADER, begun=False)
            magic, length = (int.from_bytes(header[at : at + 4], "little") for at in (0, 4))
            if magic != _MAGIC:
                raise ValueError(f"a message begins with {magic:#x}, not with {_MAGIC:#x}: another version's")
            if length > most:
                raise ValueError(f"a message has {length} bytes; allowed: {most}")
            if length:
                message = self._exactly(length, begun=True)
                if message == LOST:
                    self.lost_another = True
                    raise EOFError
                return message

    def send_socket(self, other: socket.socket) -> None:
        """Hand a socket over to another process of this host; raises as `send`."""
        with self._sending:
            socket.send_fds(self._socket, [b"s"], [other.fileno()])

    def receive_socket(self) -> socket.socket:
        """The socket that is handed over next; raises as `receive`."""
        said, numbers, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not said:
            raise EOFError
        if not numbers:
            raise ValueError("a message is where a socket should be")
        return socket.socket(fileno=numbers[0])

    def within(self, seconds: float | None, *, sending: bool = True) -> None:
        """Give up what takes longer from now on, `sending` or only receiving; None: never."""
        self._limit = seconds
        self._socket.settimeout(seconds if sending else None)

    def expect_acknowledgements(self) -> None:
        """Have the link end where the other host acknowledges nothing for 10 s, signs of life say.

        A peer that does not read for so long behind a full buffer is taken for gone, too.
        """
        if sys.platform == "linux" and self.hosts is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _GONE)

    def ended(self) -> bool:
        """Whether the other end is known to be closed, or its host to be gone."""
        return self.wait_for_end(0)

    def wait_for_end(self, seconds: float | None = None) -> bool:
        """Wait until it has ended, for so long at most; whether it has."""
        poll = select.poll()
        try:
            poll.register(self._socket, _CLOSED)
            return bool(poll.poll(None if seconds is None else 1000 * seconds))
        except (OSError, ValueError):  # this end is closed
            return True

    def close(self) -> None:
        """Close this end; the other one notices."""
        self._socket.close()

    def _exactly(self, count: int, *, begun: bool) -> bytes:
        parts, limit = bytearray(), self._limit
        until = None if limit is None else time.monotonic() + limit
        while len(parts) < count:
            if until is not None:  # for all of it: a byte now and then is not enough
                poll = select.poll()
                poll.register(self._socket, select.POLLIN)
                if not poll.poll(1000 * max(0.0, until - time.monotonic())):
                    raise TimeoutError(f"nothing whole was said for {limit:g} s")
            part = self._socket.recv(min(count - len(parts), 1 << 20))
            if not part:
                if begun or parts:
                    raise ValueError("a message ends in its middle")
                raise EOFError
            parts += part
        return bytes(parts)


def read_key(path: str | os.PathLike[str]) -> bytes:
    """The key that a file holds, without white space around it.

    Raises ConfigError where it cannot be read, where others than its owner may read it, and for a short one.
    """
    how = "make one with: (umask 077; openssl rand -hex 32 > FILE), and copy it to all hosts"
    try:
        with Path(path).expanduser().open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(_MOST_KEY + 1).strip()
    except OSError as error:
        raise ConfigError(f"cannot read the key in {path}: {error.strerror}; {how}") from None
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"others may read the key in {path} (its mode is {stat.S_IMODE(mode):o}): chmod 600 {path}"
        )
    if not _LEAST_KEY <= len(key) <= _MOST_KEY:
        raise ConfigError(
            f"the key in {path} has {len(key)} bytes; allowed: {_LEAST_KEY} to {_MOST_KEY}: {how}"
        )
    return key


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there, where port 0 is any that is free; raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # or a port of which old connections are closing would be taken
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(64)
    except OSError:
        listening.close()
        raise
    return listening


def dial(host: str, port: int, key: bytes, purpose: str, *, limit: float = GREET) -> Link:
    """A link to whoever listens there and has the same key, for the same purpose.

    Raises OSError where nobody listens, or is silent for `limit` seconds, KeyRefusedError where the key is
    another one, and ValueError where what answers is none of ours.
    """
    connection = socket.create_connection((host, port), limit)
    if connection.getsockname() == connection.getpeername():  # as happens where nobody listens on this host
        connection.close()
        raise ConnectionRefusedError("nobody listens there")
    try:
        link = _over(connection)
        theirs, own = link.receive(_NONCE), secrets.token_bytes(_NONCE)
        if len(theirs) != _NONCE:
            raise ValueError("what listens there is none of ours")
        link.send(own + _proof(key, "dials", purpose, theirs, own))
        answer = link.receive(_PROOF)
        if answer == _OTHER_KEY:
            raise KeyRefusedError(f"{host}:{port} has another key")
        if not hmac.compare_digest(answer, _proof(key, "listens", purpose, theirs, own)):
            raise KeyRefusedError(f"{host}:{port} does not know the key")
    except EOFError:
        connection.close()
        raise ConnectionResetError("it hung up") from None
    except BaseException:
        connection.close()
        raise
    link.within(None)
    return link


def greet(connection: socket.socket, key: bytes, purpose: str, *, limit: float = GREET) -> Link:
    """The link that a connection becomes once its other end has shown that it knows the key.

    `connection` is closed otherwise. Raises KeyRefusedError, OSError and ValueError as `dial`.
    """
    connection.settimeout(limit)
    try:
        link = _over(connection)
        own = secrets.token_bytes(_NONCE)
        link.send(own)
        said = link.receive(_NONCE + _PROOF)
        theirs, proof = said[:_NONCE], said[_NONCE:]
        if not hmac.compare_digest(proof, _proof(key, "dials", purpose, own, theirs)):
            link.send(_OTHER_KEY)
            raise KeyRefusedError("it does not know the key")
        link.send(_proof(key, "listens", purpose, own, theirs))
    except EOFError:
        connection.close()
        raise ConnectionResetError("it hung up before it had shown a key") from None
    except BaseException:
        connection.close()
        raise
    link.within(None)
    return link


class Greeter:
    """Greets those who connect, each in a thread; where too many have shown no key, the oldest is let go."""

    def __init__(self, key: bytes, purpose: str) -> None:
        self._key = key
        self._purpose = purpose
        self._unknown: list[socket.socket] = []
        self._changing = threading.Lock()

    def greet(
        self, connection: socket.socket, met: Callable[[Link], object], refused: Callable[[str], object]
    ) -> None:
        """Have `met` hear of the link, in that thread, or `refused` why there is none."""
        with self._changing:
            self._unknown.append(connection)
            if len(self._unknown) > _MOST_UNKNOWN:
                with suppress(OSError):  # its thread has closed it
                    self._unknown.pop(0).shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._greet, args=(connection, met, refused), daemon=True).start()

    def _greet(
        self, connection: socket.socket, met: Callable[[Link], object], refused: Callable[[str], object]
    ) -> None:
        try:
            link = greet(connection, self._key, self._purpose)
        except (KeyRefusedError, OSError, ValueError) as error:
            refused(str(error) or repr(error))
            return
        finally:
            with self._changing:
                if connection in self._unknown:
                    self._unknown.remove(connection)
        met(link)


def _proof(key: bytes, who: str, purpose: str, listener: bytes, dialer: bytes) -> bytes:
    """What only somebody with the key can say of these two numbers, in this part and for this purpose."""
    said = f"specinfer {who} {purpose}\n".encode()
    return hmac.digest(key, said + listener + dialer, hashlib.sha256)


def _over(connection: socket.socket) -> Link:
    """A link over a connection that sends small messages at once, and ends when the other host is gone.

    That shows where nothing is under way (see Link.expect_acknowledgements).
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _GONE // 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _GONE // 2)
    return Link(connection)
