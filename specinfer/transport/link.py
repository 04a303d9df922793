"""Link: a stream of messages between two specinfer processes, on one host or, with a key, on two.

    the dialer                                the listener
                                         <--  a nonce
    its purpose, its own nonce,
    and the HMAC of both under the key   -->  if wrong: closes the connection
    if wrong: closes the connection      <--  another HMAC of both
    messages                             <->  messages

Both prove that they know the key, which is never sent, before any other data. Messages after that are neither
encrypted nor signed: an attacker who can change network traffic can change them.
"""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from specinfer.errors import ConfigError, KeyRefusedError

_MAGIC: Final = 0x53504331  # marks messages of this version
_HEADER: Final = 8  # bytes: magic number and length
_MAX_MESSAGE: Final = 1 << 28  # bytes of a message
_NONCE: Final = 32  # bytes of a random number that is used once
_PROOF: Final = 32  # bytes of an HMAC
_OTHER_KEY: Final = b"another key"  # the answer to a missing or wrong proof
GREET: Final = 5.0  # seconds for the whole handshake
_MAX_PENDING: Final = 32  # connections that have not yet proved the key
_MIN_KEY, _MAX_KEY = 16, 4096  # bytes
LOST: Final = b'{"lost": true}'  # last message of a rank that has lost another one
_ACKNOWLEDGE: Final = 10  # seconds without a TCP acknowledgement after which a connection is lost
# Closed by the other side. Only Linux reports this without a read.
_CLOSED: Final = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


class Link:
    """A stream of length-prefixed messages between two processes.

    An empty message is a heartbeat and is not delivered. One thread may receive, several may send.
    """

    hosts: tuple[str, str] | None  # addresses of this host and of the other; None: both ends are on this host
    lost_another: bool  # the other end has reported that it lost another rank

    def __init__(self, connected: socket.socket) -> None:
        """Raises OSError for a connection that has ended."""
        self.hosts, self.lost_another = None, False
        if connected.family in (socket.AF_INET, socket.AF_INET6):  # must be read before a reset
            self.hosts = connected.getsockname()[0], connected.getpeername()[0]
        self._socket = connected
        self._limit = connected.gettimeout()  # timeout of a message, in seconds
        self._sending = threading.Lock()

    @classmethod
    def of(cls, number: int) -> Self:
        """Wrap an inherited open socket."""
        return cls(socket.socket(fileno=number))

    @property
    def number(self) -> int:
        """The file descriptor of the socket."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Send a message; raises OSError if the other end is gone, or does not accept it in time."""
        with self._sending:
            self._socket.sendall(_MAGIC.to_bytes(4, "little") + len(message).to_bytes(4, "little") + message)

    def send_last(self, message: bytes, seconds: float) -> None:
        """Send a message, then wait up to `seconds` for the other end to close the link; raises as `send`.

        Closing a connection with unread heartbeats resets it, and the message could be lost.
        """
        self.send(message)
        if self.hosts is not None:
            self.wait_for_end(seconds)

    def beat(self) -> None:
        """Send a heartbeat if that does not block; never raises."""
        if not self._sending.acquire(blocking=False):
            return  # another message is being sent, which serves as one
        try:
            if self._polled(select.POLLOUT, 0):
                self._socket.sendall(_MAGIC.to_bytes(4, "little") + bytes(4))
        except (OSError, ValueError):  # the link is closed
            pass
        finally:
            self._sending.release()

    def receive(self, limit: int = _MAX_MESSAGE) -> bytes:
        """Wait for the next message, of at most `limit` bytes.

        Raises EOFError if the other end has closed the link or has lost another rank, TimeoutError if no
        message arrives in time, ValueError for an invalid message.
        """
        while True:
            header = self._exactly(_HEADER, partial=False)
            magic, length = (int.from_bytes(header[at : at + 4], "little") for at in (0, 4))
            if magic != _MAGIC:
                raise ValueError(f"a message begins with {magic:#x}, expected {_MAGIC:#x}: another version")
            if length > limit:
                raise ValueError(f"a message has {length} bytes; allowed: {limit}")
            if length:
                message = self._exactly(length, partial=True)
                if message == LOST:
                    self.lost_another = True
                    raise EOFError
                return message

    def send_socket(self, other: socket.socket) -> None:
        """Pass a socket to another process on this host; raises as `send`."""
        with self._sending:
            socket.send_fds(self._socket, [b"s"], [other.fileno()])

    def receive_socket(self) -> socket.socket:
        """Receive a passed socket; raises as `receive`."""
        message, numbers, _, _ = socket.recv_fds(self._socket, 1, 1)
        if not message:
            raise EOFError
        if not numbers:
            raise ValueError("expected a socket, got a message")
        return socket.socket(fileno=numbers[0])

    def within(self, seconds: float | None, *, sending: bool = True) -> None:
        """Set the timeout of receiving, and of sending if `sending`; None: no limit."""
        self._limit = seconds
        self._socket.settimeout(seconds if sending else None)

    def expect_acknowledgements(self) -> None:
        """End the link if the other host acknowledges nothing, heartbeats included, for 10 s.

        A peer that does not read for 10 s behind a full buffer is considered lost, too.
        """
        if sys.platform == "linux" and self.hosts is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _ACKNOWLEDGE)

    def ended(self) -> bool:
        """True if the other end is known to be closed, or its host to be unreachable."""
        return self.wait_for_end(0)

    def wait_for_end(self, seconds: float | None = None) -> bool:
        """Wait up to `seconds` for the link to end; return True if it has."""
        try:
            return self._polled(_CLOSED, seconds)
        except (OSError, ValueError):  # this end is closed
            return True

    def close(self) -> None:
        """Close this end; the other end detects it."""
        self._socket.close()

    def _polled(self, event: int, seconds: float | None) -> bool:
        """Wait up to `seconds` for an event of the socket; return True if it has come."""
        poll = select.poll()
        poll.register(self._socket, event)
        return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def _exactly(self, count: int, *, partial: bool) -> bytes:
        parts, limit = bytearray(), self._limit
        until = None if limit is None else time.monotonic() + limit
        while len(parts) < count:
            # One limit for all of it, so that single bytes do not extend it.
            if until is not None and not self._polled(select.POLLIN, max(0.0, until - time.monotonic())):
                raise TimeoutError(f"no complete message arrived within {limit:g} s")
            part = self._socket.recv(min(count - len(parts), 1 << 20))
            if not part:
                if partial or parts:
                    raise ValueError("a message is incomplete")
                raise EOFError
            parts += part
        return bytes(parts)


def read_key(path: str | os.PathLike[str]) -> bytes:
    """Read a key from a file, without surrounding white space.

    Raises ConfigError if the file cannot be read, if users other than its owner may read it, or if the key is
    too short.
    """
    how = "make one with: (umask 077; openssl rand -hex 32 > FILE), and copy it to all hosts"
    try:
        with Path(path).expanduser().open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            key = file.read(_MAX_KEY + 1).strip()
    except OSError as error:
        raise ConfigError(f"cannot read the key in {path}: {error.strerror}; {how}") from None
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"others may read the key in {path} (its mode is {stat.S_IMODE(mode):o}): chmod 600 {path}"
        )
    if not _MIN_KEY <= len(key) <= _MAX_KEY:
        raise ConfigError(f"the key in {path} has {len(key)} bytes; allowed: {_MIN_KEY} to {_MAX_KEY}: {how}")
    return key


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 selects a free port. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listening = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # otherwise a port with closing connections counts as in use
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(64)
    except OSError:
        listening.close()
        raise
    return listening


@contextmanager
def closed_on_error(connection: socket.socket | Link, ended: str) -> Iterator[None]:
    """Close `connection` if the block raises; its EOFError becomes a ConnectionResetError with `ended`."""
    try:
        yield
    except EOFError:
        connection.close()
        raise ConnectionResetError(ended) from None
    except BaseException:
        connection.close()
        raise


def dial(host: str, port: int, key: bytes, purpose: str, *, limit: float = GREET) -> Link:
    """Connect to a listener with the same key and purpose.

    Raises OSError if there is no listener or it is silent for `limit` seconds, KeyRefusedError if the key
    differs, and ValueError if the answer is not from specinfer.
    """
    connection = socket.create_connection((host, port), limit)
    # a self-connection, possible if there is no listener on this host
    if connection.getsockname() == connection.getpeername():
        connection.close()
        raise ConnectionRefusedError("no process listens there")
    with closed_on_error(connection, "the listener closed the connection"):
        link = _link_over(connection)
        their_nonce, own = link.receive(_NONCE), secrets.token_bytes(_NONCE)
        if len(their_nonce) != _NONCE:
            raise ValueError("the listener is not specinfer")
        link.send(own + _proof(key, "dials", purpose, their_nonce, own))
        answer = link.receive(_PROOF)
        if answer == _OTHER_KEY:
            raise KeyRefusedError(f"{host}:{port} has another key")
        if not hmac.compare_digest(answer, _proof(key, "listens", purpose, their_nonce, own)):
            raise KeyRefusedError(f"{host}:{port} has not proved the key")
    link.within(None)
    return link


def greet(connection: socket.socket, key: bytes, purpose: str, *, limit: float = GREET) -> Link:
    """Turn a connection into a link after its other end has proved the key.

    Otherwise `connection` is closed. Raises KeyRefusedError, OSError and ValueError as `dial`.
    """
    connection.settimeout(limit)
    with closed_on_error(connection, "it closed the connection before proving the key"):
        link = _link_over(connection)
        own = secrets.token_bytes(_NONCE)
        link.send(own)
        message = link.receive(_NONCE + _PROOF)
        their_nonce, proof = message[:_NONCE], message[_NONCE:]
        if not hmac.compare_digest(proof, _proof(key, "dials", purpose, own, their_nonce)):
            link.send(_OTHER_KEY)
            raise KeyRefusedError("it has not proved the key")
        link.send(_proof(key, "listens", purpose, own, their_nonce))
    link.within(None)
    return link


class Greeter:
    """Runs handshakes in threads; if too many are pending, the oldest is dropped."""

    def __init__(self, key: bytes, purpose: str) -> None:
        self._key = key
        self._purpose = purpose
        self._pending: list[socket.socket] = []
        self._changing = threading.Lock()

    def greet(
        self, connection: socket.socket, accepted: Callable[[Link], object], refused: Callable[[str], object]
    ) -> None:
        """Call `accepted` with the link, in that thread, or `refused` with the reason."""
        with self._changing:
            self._pending.append(connection)
            if len(self._pending) > _MAX_PENDING:
                with suppress(OSError):  # its thread has closed it
                    self._pending.pop(0).shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._greet, args=(connection, accepted, refused), daemon=True).start()

    def _greet(
        self, connection: socket.socket, accepted: Callable[[Link], object], refused: Callable[[str], object]
    ) -> None:
        try:
            link = greet(connection, self._key, self._purpose)
        except (KeyRefusedError, OSError, ValueError) as error:
            refused(str(error) or repr(error))
            return
        finally:
            with self._changing:
                if connection in self._pending:
                    self._pending.remove(connection)
        accepted(link)


def _proof(key: bytes, role: str, purpose: str, listener: bytes, dialer: bytes) -> bytes:
    """HMAC of the two nonces for this role and purpose."""
    message = f"specinfer {role} {purpose}\n".encode()
    return hmac.digest(key, message + listener + dialer, hashlib.sha256)


def _link_over(connection: socket.socket) -> Link:
    """A link that sends small messages without delay, and ends when the other host is unreachable.

    This detects a lost host while idle (see Link.expect_acknowledgements).
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ACKNOWLEDGE // 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ACKNOWLEDGE // 2)
    return Link(connection)
