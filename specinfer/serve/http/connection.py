"""Connection: HTTP on one client's connection, as uvicorn speaks it, with bounds on all that a client sends.

Connections counts all of a server's, and how much of their requests is kept.

uvicorn's parser keeps headers without a limit. Here it gets small pieces, and what it keeps is counted before
it gets the next one. A request that is too large, or no HTTP, is answered here, and no endpoint sees it.
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
SPARE: Final = 64  # connections beyond the limit that are told so, and probes among them are answered
MOST_HEADERS: Final = 100  # of a request, trailers included
MOST_HEAD: Final = 64 << 10  # bytes of its first line and headers, and between two pieces of its body
MOST_URL: Final = 32 << 10
PIECE: Final = 4096  # bytes that the parser gets at once: a head may be so much longer
_MOST_QUEUED: Final = 16  # requests of one connection; of others nothing is read before one is answered
MOST_UNANSWERED: Final = 64  # that may come together all the same; the connection ends behind them
_OBJECTS: Final = 2048  # bytes, about, of what a request is beside its head and its body
_FIRST_SECONDS: Final = 10.0  # within which a connection sends the head of its first request
_LINGER_SECONDS: Final = 2.0  # in which a client that is still sending can read why we listen no longer
_UPGRADES: Final = (b"upgrade", b"http2-settings", b"connection")  # headers of an upgrade that we ignore


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with bounds on heads, bodies and time. `idle` is in seconds.

    It waits neither for half a request nor for a client that does not read its answer. It tells the request
    that is being answered when the client goes away: where a client sends several at once, uvicorn tells
    only the last one.
    """

    def __init__(self, *args: Any, idle: float, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle = idle
        self._all = connections
        self._is_over_limit = False  # whether it is one connection too many
        self._unanswered: deque[RequestResponseCycle] = deque()  # in the order in which they came
        self._sizes: deque[int] = deque()  # bytes of them that have come
        self._reading: RequestResponseCycle | None = None  # whose body has not come to its end
        self._keep_alive = True  # whether the connection stays open after that one
        self._overhead = 0  # bytes since a message began, or since the last piece of its body
        self._headers = 0  # of this message, trailers included
        self._fault: ApiError | None = None  # raised within the parser
        self._ignores_input = False  # whatever comes is dropped
        self._waiting: asyncio.TimerHandle | None = None  # for the rest of a request's headers
        self._stuck: asyncio.TimerHandle | None = None  # since the client takes nothing

    @property
    def is_reading(self) -> bool:
        """Whether a part of a body has come, and its end has not."""
        return self._reading is not None

    def close_now(self) -> None:
        """Close it at once."""
        self._ignores_input = True
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        """As asyncio says."""
        super().connection_made(_Lingering(transport, self._linger))  # type: ignore[arg-type]
        self._is_over_limit = self._all.add(self)
        self._wait(min(self._idle, _FIRST_SECONDS))

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio says."""
        self._all.remove(self)
        _cancel(self._waiting)
        _cancel(self._stuck)
        for cycle in self._unanswered:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """As asyncio says."""
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
                message = f"this is no HTTP request: {error}; send HTTP/1.1 to this port; TLS is a proxy's"
                self.refuse(self._fault or ApiError(message))
            if self._overhead > MOST_HEAD:
                self.refuse(_too_large())

    def on_message_begin(self) -> None:
        """As the parser says: a request begins."""
        if len(self._unanswered) >= MOST_UNANSWERED:
            self._fail(ApiError(f"{MOST_UNANSWERED} requests of this connection wait", status=429))
        super().on_message_begin()
        self._overhead = self._headers = 0
        if self._is_over_limit:
            self.scope["state"][OVER_LIMIT] = True
        self._unset_keepalive_if_required()
        if self._waiting is None or self._waiting.cancelled():  # the first request's runs already
            self._wait(self._idle)

    def on_url(self, url: bytes) -> None:
        """As the parser says: a piece of a URL."""
        if len(self.url) + len(url) > MOST_URL:
            self._fail(ApiError(f"the URL has more than {MOST_URL} bytes; shorten it", status=414))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """As the parser says: a whole header, or a trailer."""
        self._headers += 1
        if self._headers > MOST_HEADERS:
            self._fail(_too_large())
        if self._reading is None:  # else it is a trailer, which must not pass for a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """As the parser says: a request's head has come."""
        self._check()
        if self.parser.should_upgrade():
            return  # it is read once more, without
        _cancel(self._waiting)
        self._unset_keepalive_if_required()
        self._overhead = 0
        self._hold(_OBJECTS + len(self.url) + sum(len(name) + len(value) for name, value in self.headers))
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        # An answer that begins before the body has ended closes the connection: nobody reads the rest.
        self._reading, self._keep_alive, self.cycle.keep_alive = self.cycle, self.cycle.keep_alive, False
        if len(self._unanswered) <= _MOST_QUEUED:
            # uvicorn stops reading behind a second one, and then hears of no end either.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """As the parser says: a piece of a body."""
        self._overhead = 0
        if self._reading is not None and not self.cycle.response_complete:
            self._hold(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """As the parser says: a whole request has come."""
        self._overhead = 0
        if self._reading is None:
            return  # an upgrade that is ignored, or refused
        self._reading = None
        self._all.mark_used(self)
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """As uvicorn says: the oldest request is answered."""
        self._unanswered.popleft()
        self._all.release(self, self._sizes.popleft())
        super().on_response_complete()

    def refuse(self, error: ApiError) -> None:
        """Answer what is being read with an error, and close; what came before it is answered first."""
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
            self._unanswered[-1].keep_alive = False  # within its answer there is no place for another one
            return
        if cycle is None or not cycle.response_started:
            self.transport.write(error.as_http())
        self.transport.close()

    def shutdown(self) -> None:
        """As uvicorn says: what is being answered is the last."""
        self._keep_alive = False
        super().shutdown()

    def pause_writing(self) -> None:
        """As asyncio says."""
        super().pause_writing()
        # Access lets go of it before; a transport that is closed would still wait for it to read.
        self._stuck = self.loop.call_later(2 * self._idle, self.transport.abort)

    def resume_writing(self) -> None:
        """As asyncio says."""
        _cancel(self._stuck)
        super().resume_writing()

    def _check(self) -> None:
        """Raise, within the parser, for a head that is well formed and still not to be served."""
        codings = b",".join(value for name, value in self.headers if name == b"transfer-encoding")
        if codings and codings.strip().lower() != b"chunked":
            self._fail(
                ApiError(
                    f"Transfer-Encoding is {codings.decode('latin-1')[:100]!r}; allowed: chunked", status=501
                )
            )
        if self.parser.get_method() == b"CONNECT":
            self._fail(ApiError("this server is no proxy, and opens no tunnels", status=501))

    def _hold(self, size: int) -> None:
        """Count bytes of the request that is being read; raises, within the parser, where it is refused."""
        if self._reading is None:
            self._sizes.append(0)
        self._sizes[-1] += size
        self._all.hold(self, size)
        if self._ignores_input:
            self._fail(ApiError("the request was refused"))

    def _fail(self, error: ApiError) -> None:
        """End the parser; `data_received` refuses with this error, unless it has refused already."""
        self._fault = error
        raise error

    def _without_upgrade(self) -> bytes:
        """The head that was read, as it would be without the wish for another protocol (RFC 9110, 7.8)."""
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
        """Whether the client may still be sending; then all of it is dropped from now on."""
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
            self._wait(self._idle)  # it is we who keep it waiting: an earlier request is being answered
        else:
            self.transport.close()


class Connections:
    """Counts connections and the bytes of requests that are not answered yet. Belongs to one event loop."""

    def __init__(self, most: int, most_bodies: int) -> None:
        self._most = most
        self._most_bodies = most_bodies
        self._all: set[Connection] = set()
        self._unused: dict[Connection, None] = {}  # no whole request has come from them; the oldest first
        self._held: dict[Connection, int] = {}  # bytes of requests that are not answered
        self._total = 0

    @property
    def size(self) -> int:
        """How many connections there are."""
        return len(self._all)

    @property
    def held(self) -> int:
        """Bytes of all requests that are not answered."""
        return self._total

    def add(self, one: Connection) -> bool:
        """Take a new connection in; return whether it is one too many, which is told so when it asks.

        At the limit the oldest connection that has not sent a whole request leaves for it. Where all have,
        there is room for `SPARE` more; beyond these the new one leaves at once.
        """
        if len(self._all) >= self._most and self._unused:
            oldest = next(iter(self._unused))
            del self._unused[oldest]
            self._all.discard(oldest)
            oldest.close_now()
        if len(self._all) >= self._most + SPARE:
            one.close_now()
            return True
        over_limit = len(self._all) >= self._most
        self._all.add(one)
        self._unused[one] = None
        return over_limit

    def mark_used(self, one: Connection) -> None:
        """A whole request has come from this connection: it stays."""
        self._unused.pop(one, None)

    def mark_ending(self, one: Connection) -> None:
        """Nothing is read from this connection any more: it leaves before others do."""
        if one in self._all:
            self._unused[one] = None

    def remove(self, one: Connection) -> None:
        """This connection is lost."""
        self._all.discard(one)
        self._unused.pop(one, None)
        self.release(one, self._held.get(one, 0))

    def hold(self, one: Connection, size: int) -> None:
        """Count bytes of a request that have come.

        Where all are more than there may be, of the connections that are sending a body the one that takes
        most is refused, or this one where there is none.
        """
        self._held[one] = self._held.get(one, 0) + size
        self._total += size
        if self._total > self._most_bodies:
            largest = max((m for m in self._held if m.is_reading), key=lambda m: self._held[m], default=one)
            largest.refuse(
                ApiError(
                    f"requests that are not answered yet have more than {self._most_bodies} bytes, "
                    "--max-bodies-memory, and this one most of them; come again",
                    status=503,
                    headers={"Retry-After": "5"},
                )
            )

    def release(self, one: Connection, size: int) -> None:
        """Bytes of a request are not kept any more."""
        if size:
            self._total -= size
            self._held[one] -= size
            if not self._held[one]:
                del self._held[one]


class _Lingering:
    """A transport that is closed some time after our last words, while the client may still be sending.

    A socket that is closed with unread bytes in it takes back what was sent last: the client would not hear
    why. `may_linger` is asked once, when it is closed.
    """

    def __init__(self, transport: asyncio.Transport, may_linger: Callable[[], bool]) -> None:
        self._transport = transport
        self._may_linger = may_linger
        self._is_closing = False

    def __getattr__(self, name: str) -> Any:  # whatever is not here
        return getattr(self._transport, name)

    def close(self) -> None:
        """Say that nothing follows, and close when the client has, or after a moment."""
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
        f"the request has more than {MOST_HEADERS} headers or {MOST_HEAD} bytes of them; send fewer",
        status=431,
    )


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
