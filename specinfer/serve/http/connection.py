"""HTTP connections: uvicorn's protocol with limits on everything that a client sends.

Connections counts the connections of a server and the bytes that their requests hold.

uvicorn's parser keeps headers without a limit. Connection feeds it small pieces and checks the size so far
before the next one. It answers requests that are too large or malformed itself; no endpoint sees them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from specinfer.serve.http.access import OVER_LIMIT
from specinfer.serve.http.api_error import ApiError

_LOG = logging.getLogger(__name__)
SPARE: Final = 64  # connections above the limit that get an error, or the answer to a probe
MAX_HEADERS: Final = 100  # of a request, trailers included
MAX_HEAD: Final = 64 << 10  # bytes of its first line and headers, or between two pieces of its body
MAX_URL: Final = 32 << 10  # bytes
PIECE: Final = 4096  # bytes per call of the parser; a head may exceed its limit by one piece
_MAX_QUEUED: Final = 16  # unanswered requests of a connection, after which it reads no more
MAX_UNANSWERED: Final = 64  # requests that may arrive in one read all the same; then the connection closes
_OBJECTS: Final = 2048  # estimated bytes of a request's objects, in addition to its head and body
_FIRST_SECONDS: Final = 10.0  # time limit for the head of a connection's first request
_LINGER_SECONDS: Final = 2.0  # time for a client that is still sending to read why its request was refused
_UPGRADES: Final = (b"upgrade", b"http2-settings", b"connection")  # headers of an upgrade; ignored


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits on heads, bodies and time; `idle` is in seconds.

    It closes connections that send half a request or do not read their answer. When a client disconnects,
    all of its unanswered requests get the disconnect message; uvicorn sends it only to the last one.
    """

    def __init__(self, *args: Any, idle: float, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle = idle
        self._all = connections
        self._is_over_limit = False  # True if it came when --max-connections were open
        self._unanswered: deque[RequestResponseCycle] = deque()  # oldest first
        self._sizes: deque[int] = deque()  # bytes received of each
        self._reading: RequestResponseCycle | None = None  # the request whose body is incomplete
        self._keep_alive = True  # True if the connection stays open after that request
        self._overhead = 0  # bytes since the start of a message, or since the last piece of its body
        self._headers = 0  # count in this message, trailers included
        self._fault: ApiError | None = None  # raised within the parser
        self._ignores_input = False  # True if received bytes are dropped
        self._waiting: asyncio.TimerHandle | None = None  # ends the wait for a request's head
        self._stuck: asyncio.TimerHandle | None = None  # ends the wait for a client that does not read

    @property
    def is_reading(self) -> bool:
        """True if a part of a request's body is still missing."""
        return self._reading is not None

    def close_now(self) -> None:
        """Close the connection at once."""
        self._ignores_input = True
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        """Register the connection (asyncio callback)."""
        super().connection_made(_Lingering(transport, self._linger))  # type: ignore[arg-type]
        self._is_over_limit = self._all.add(self)
        self._wait(min(self._idle, _FIRST_SECONDS))

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection and cancel its requests (asyncio callback)."""
        self._all.remove(self)
        _cancel(self._waiting)
        _cancel(self._stuck)
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes in pieces (asyncio callback)."""
        left = memoryview(data)
        while left and not (self._ignores_input or self.transport.is_closing()):
            piece, left = left[:PIECE], left[PIECE:]
            self._overhead += len(piece)
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade as upgrade:
                left = memoryview(b"".join((self._without_upgrade(), piece[upgrade.args[0] :], left)))
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError as error:
                message = f"not an HTTP request: {error}; send HTTP/1.1 to this port, and TLS to a proxy"
                self.refuse(self._fault or ApiError(message))
            if self._overhead > MAX_HEAD:
                self.refuse(_too_large())

    def on_message_begin(self) -> None:
        """Start a request (parser callback)."""
        if len(self._unanswered) >= MAX_UNANSWERED:
            self._fail(ApiError(f"{MAX_UNANSWERED} requests of this connection wait; send fewer", status=429))
        super().on_message_begin()
        self._overhead = self._headers = 0
        if self._is_over_limit:
            self.scope["state"][OVER_LIMIT] = True
        self._unset_keepalive_if_required()
        if self._waiting is None or self._waiting.cancelled():  # otherwise the first timer still runs
            self._wait(self._idle)

    def on_url(self, url: bytes) -> None:
        """Add a piece of the URL (parser callback)."""
        if len(self.url) + len(url) > MAX_URL:
            self._fail(ApiError(f"the URL has more than {MAX_URL} bytes; send a shorter one", status=414))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header or a trailer (parser callback)."""
        self._headers += 1
        if self._headers > MAX_HEADERS:
            self._fail(_too_large())
        if self._reading is None:  # otherwise it is a trailer, which must not count as a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Run the request, whose head is complete (parser callback)."""
        self._check()
        if self.parser.should_upgrade():
            return  # data_received parses the head again without the upgrade
        _cancel(self._waiting)
        self._unset_keepalive_if_required()
        self._overhead = 0
        self._hold(_OBJECTS + len(self.url) + sum(len(name) + len(value) for name, value in self.headers))
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        # An answer that starts before the end of the body closes the connection: the rest stays unread.
        self._reading, self._keep_alive, self.cycle.keep_alive = self.cycle, self.cycle.keep_alive, False
        if len(self._unanswered) <= _MAX_QUEUED:
            # uvicorn stops reading after a second request, and then does not see a disconnect either.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """Add a piece of the body (parser callback)."""
        self._overhead = 0
        if self._reading is not None and not self.cycle.response_complete:
            self._hold(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request (parser callback)."""
        self._overhead = 0
        if self._reading is None:
            return  # an ignored or refused upgrade
        self._reading = None
        self._all.mark_used(self)
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Release the oldest request, which is answered (uvicorn callback)."""
        self._unanswered.popleft()
        self._all.release(self, self._sizes.popleft())
        super().on_response_complete()

    def refuse(self, error: ApiError) -> None:
        """Answer the incoming request with an error and close, after the answers to earlier requests."""
        if self._ignores_input:
            return
        self._ignores_input = True
        _cancel(self._waiting)
        _LOG.info("%d to %s: %s", error.status, self.client[0] if self.client else "-", error)
        cycle, self._reading = self._reading, None
        if len(self._sizes) > len(self._unanswered) or cycle is not None:
            self._all.release(self, self._sizes.pop())
        if cycle is not None:
            self._unanswered.pop()
            if self.pipeline and self.pipeline[0][0] is cycle:
                self.pipeline.popleft()
            cycle.disconnected = True
            cycle.message_event.set()
        if self._unanswered:
            self._unanswered[-1].keep_alive = False  # an error must not interrupt its answer
            return
        if cycle is None or not cycle.response_started:
            self.transport.write(error.as_http())
        self.transport.close()

    def shutdown(self) -> None:
        """Close after the current answers (uvicorn callback)."""
        self._keep_alive = False
        super().shutdown()

    def pause_writing(self) -> None:
        """Limit the time that the client may stop reading (asyncio callback)."""
        super().pause_writing()
        # Access ends the answer earlier, but a closing transport would still wait for the client to read.
        self._stuck = self.loop.call_later(2 * self._idle, self.transport.abort)

    def resume_writing(self) -> None:
        """Continue after the client has read (asyncio callback)."""
        _cancel(self._stuck)
        super().resume_writing()

    def _check(self) -> None:
        """Raise ApiError, within the parser, for a well-formed head that is not supported."""
        codings = b",".join(value for name, value in self.headers if name == b"transfer-encoding")
        if codings and codings.strip().lower() != b"chunked":
            self._fail(
                ApiError(
                    f"Transfer-Encoding is {codings.decode('latin-1')[:100]!r}; allowed: chunked", status=501
                )
            )
        if self.parser.get_method() == b"CONNECT":
            self._fail(ApiError("CONNECT is not supported: this server is not a proxy", status=501))

    def _hold(self, size: int) -> None:
        """Count bytes of the incoming request; raise, within the parser, if it is refused."""
        if self._reading is None:
            self._sizes.append(0)
        self._sizes[-1] += size
        self._all.hold(self, size)
        if self._ignores_input:
            self._fail(ApiError("the request was refused"))

    def _fail(self, error: ApiError) -> None:
        """Abort the parser; `data_received` then refuses with this error unless it has refused already."""
        self._fault = error
        raise error

    def _without_upgrade(self) -> bytes:
        """Return the current head without its upgrade headers (RFC 9110, 7.8)."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                kept = [one for one in value.split(b",") if one.strip().lower() not in _UPGRADES]
                lines.append(b"connection: " + b",".join(kept))
            elif name not in _UPGRADES:
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def _linger(self) -> bool:
        """Return whether the client may still be sending; drop all further bytes if so."""
        if self._reading is None and not self._ignores_input:
            return False
        self._ignores_input = True
        self._all.mark_ending(self)
        self.flow.resume_reading()
        return True

    def _wait(self, seconds: float) -> None:
        _cancel(self._waiting)
        self._waiting = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if self._unanswered:
            self._wait(self._idle)  # the client waits for the answer to an earlier request
        else:
            self.transport.close()


class Connections:
    """Counts a server's connections and the bytes of its unanswered requests; for one event loop."""

    def __init__(self, max_connections: int, max_bodies: int) -> None:
        self._max_connections = max_connections
        self._max_bodies = max_bodies  # bytes
        self._all: set[Connection] = set()
        self._unused: dict[Connection, None] = {}  # those without a complete request, oldest first
        self._held: dict[Connection, int] = {}  # bytes of unanswered requests
        self._total = 0

    @property
    def size(self) -> int:
        """Number of open connections."""
        return len(self._all)

    @property
    def held(self) -> int:
        """Bytes of all unanswered requests."""
        return self._total

    def add(self, one: Connection) -> bool:
        """Add a new connection; return True if its requests must get an error because the limit is reached.

        At the limit, the oldest connection without a complete request is closed to make room. If there is
        none, up to `SPARE` more are accepted; further ones are closed at once.
        """
        if len(self._all) >= self._max_connections and self._unused:
            oldest = next(iter(self._unused))
            del self._unused[oldest]
            self._all.discard(oldest)
            oldest.close_now()
        if len(self._all) >= self._max_connections + SPARE:
            one.close_now()
            return True
        over_limit = len(self._all) >= self._max_connections
        self._all.add(one)
        self._unused[one] = None
        return over_limit

    def mark_used(self, one: Connection) -> None:
        """Record a complete request: the connection is no longer closed to make room."""
        self._unused.pop(one, None)

    def mark_ending(self, one: Connection) -> None:
        """Record that the connection drops its input: it is closed before others."""
        if one in self._all:
            self._unused[one] = None

    def remove(self, one: Connection) -> None:
        """Remove a closed connection."""
        self._all.discard(one)
        self._unused.pop(one, None)
        self.release(one, self._held.get(one, 0))

    def hold(self, one: Connection, size: int) -> None:
        """Count received bytes of a request.

        If the total exceeds the limit, refuse the largest request whose body is incomplete, or else this one.
        """
        self._held[one] = self._held.get(one, 0) + size
        self._total += size
        if self._total > self._max_bodies:
            largest = max((m for m in self._held if m.is_reading), key=lambda m: self._held[m], default=one)
            largest.refuse(
                ApiError(
                    f"unanswered requests hold more than {self._max_bodies} bytes (--max-bodies-memory), "
                    "and this one is the largest; retry later",
                    status=503,
                    headers={"Retry-After": "5"},
                )
            )

    def release(self, one: Connection, size: int) -> None:
        """Subtract bytes of a request that is answered or dropped."""
        if size:
            self._total -= size
            self._held[one] -= size
            if not self._held[one]:
                del self._held[one]


class _Lingering:
    """A transport that stays open for a moment after the last answer if the client may still be sending.

    If a socket is closed with unread bytes in it, the system discards its last output, and the client would
    not see the error. `close` calls `may_linger` once.
    """

    def __init__(self, transport: asyncio.Transport, may_linger: Callable[[], bool]) -> None:
        self._transport = transport
        self._may_linger = may_linger
        self._is_closing = False

    def __getattr__(self, name: str) -> Any:  # all other methods
        return getattr(self._transport, name)

    def close(self) -> None:
        """Send end of file, and close when the client has closed or after a moment."""
        if self.is_closing():
            return
        self._is_closing = True
        if self._may_linger():
            self._transport.write_eof()
            asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._transport.close)
        else:
            self._transport.close()

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def abort(self) -> None:
        self._is_closing = True
        self._transport.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closing:
            self._transport.write(data)


def _too_large() -> ApiError:
    return ApiError(
        f"the request has more than {MAX_HEADERS} headers or {MAX_HEAD} bytes of them; send fewer",
        status=431,
    )


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
