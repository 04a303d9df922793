"""Access control: middleware that checks the host, API key, origin and size of each request, and logs it."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specinfer.serve.config import ANY_HOST, HOST_NAME, is_loopback
from specinfer.serve.http.api_error import CALLER, ApiError, Caller

_LOG = logging.getLogger("specinfer.serve.http.access")
PROBES: Final = ("/health", "/ready")  # for load balancers, which send neither a key nor our host name
OPEN_PATHS: Final = ("/version", "/")  # need no key
# Characters of a path that the log keeps; others become %XX, or a request could forge lines of the log.
_PLAIN: Final = "/:@!$&'()*+,;=~"
_MAX_PATH: Final = 256  # characters in the log
_MAX_HOST: Final = 256  # characters in an error
_TRACE: Final = (b"traceparent", b"tracestate")  # of the W3C, passed on
_ONCE: Final = (b"host", b"authorization", b"x-api-key")  # headers that may not be repeated
_MAX_HEADERS: Final = 100  # maximum for a request; each takes hundreds of bytes, however short it is
_MIN_BODY_RATE: Final = 16 << 10  # bytes per second, after the first `idle_timeout` seconds
_OPEN_FOLDER: Final = "/page/"  # files of the page at /, which has a field for the key
_HOST: Final = re.compile(rf"({HOST_NAME.pattern}|\[[0-9a-f:.]+\])(:[0-9]*)?", re.IGNORECASE)  # port optional


class Keys:
    """Accepted API keys, compared in constant time."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def number(self, authorization: bytes, x_api_key: bytes = b"") -> int:
        """Return the number, from 1, of the key in `Authorization: Bearer KEY` or X-Api-Key (Anthropic's).

        0 means that neither header has an accepted key. If both have one, Authorization counts.
        """
        scheme, _, given = authorization.partition(b" ")
        bearer = plain = 0
        for number, key in enumerate(self._keys, start=1):
            bearer = max(bearer, number * hmac.compare_digest(key, given.strip()))
            plain = max(plain, number * hmac.compare_digest(key, x_api_key.strip()))
        return (bearer if scheme.lower() == b"bearer" else 0) or plain


class Hosts:
    """Accepted host names and addresses of a server, in addition to loopback names: against DNS rebinding.

    A page of another site may point its own host name at this machine after it has loaded. Browsers then
    treat this server as the page's origin and let the page read every answer. But Host still has the page's
    name.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(map(_plain, names))

    @classmethod
    def of(cls, bound: str, allowed: Sequence[str], *, keyed: bool, address: str) -> Hosts | None:
        """Return the names of a server bound to `bound`, whose address is `address`; None: any Host.

        A page of another site has no API key, so servers with keys check Host only if `allowed` names some.
        The same holds for servers on other than loopback addresses, whose names are unknown here.
        """
        if ANY_HOST in allowed or not (allowed or (not keyed and is_loopback(address))):
            return None
        return cls((bound, *allowed))

    def admit(self, header: bytes) -> bool:
        """Return whether a Host header has an accepted or loopback name, with any port."""
        found = _HOST.fullmatch(header.decode("latin-1"))
        if found is None:
            return False
        name = _plain(found[1])
        return name in self._names or is_loopback(name)


@dataclass(eq=False, slots=True)
class _Body:
    """The body of an unanswered request."""

    started: float  # seconds of the loop's clock
    size: int = 0  # bytes received
    is_whole: bool = False
    wait: asyncio.Timeout | None = None  # time limit of the next piece, while it is awaited
    is_refused: bool = False  # because the bodies of all requests take too much memory


class Access:
    """ASGI middleware that accepts or refuses requests, gives each an id and logs it without its content."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        max_body: int,
        max_bodies: int,
        idle_timeout: float,
        origins: Sequence[str] = (),
        hosts: Hosts | None = None,
        session_header: str = "x-session-id",
    ) -> None:
        self._app = app
        self._keys = keys
        self._max_body = max_body  # bytes
        self._max_bodies = max_bodies  # bytes of all unanswered requests
        self._bodies: set[_Body] = set()
        self._idle_timeout = idle_timeout
        self._origins = origins  # origins whose pages may call; "*": any
        self._hosts = hosts  # accepted Host headers; None: any
        self._session_header = session_header.lower().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        name, started, status = f"req-{uuid.uuid4().hex}", clock(), 0
        headers = dict(scope["headers"])
        key = self._keys.number(headers.get(b"authorization", b""), headers.get(b"x-api-key", b""))
        kept = (headers.get(one, b"").decode("latin-1") for one in (*_TRACE, self._session_header))
        caller, body = CALLER.set(Caller(name, scope["path"], key, *kept)), _Body(started)
        self._bodies.add(body)

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            # A client that reads nothing for `idle_timeout` seconds counts as gone: its connection is closed.
            async with asyncio.timeout(self._idle_timeout):
                await send(message)

        try:
            self._check(scope, headers, key)
            # The server answers HEAD like GET and leaves the body out.
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            bounded = partial(self._receive, receive, body)
            await self._app({**scope, "method": method}, bounded, send_with_id)
        except TimeoutError:
            _LOG.info("%s: the client does not read; its connection is closed", name)
        except ClientDisconnect:
            pass  # in the middle of its body
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # panics of Rust libraries are no Exception
            if not isinstance(error, ApiError):
                _LOG.exception("%s failed", name)
                error = ApiError("internal error; please report it", status=500)
            if not status:  # otherwise the answer has started, and the connection is closed
                with contextlib.suppress(TimeoutError):  # the client does not read
                    await error.response()(scope, receive, send_with_id)
        finally:
            CALLER.reset(caller)
            self._bodies.discard(body)
            line = {
                "request_id": name,
                "client": scope["client"][0] if scope.get("client") else "-",
                "method": scope["method"],
                "path": quote(scope["path"], safe=_PLAIN)[:_MAX_PATH],
                "status": status,
                "seconds": round(clock() - started, 3),
            }
            _LOG.info(
                "%(method)s %(path)s %(status)d %(seconds).3fs %(client)s %(request_id)s", line, extra=line
            )

    def _check(self, scope: Scope, headers: Mapping[bytes, bytes], key: int) -> None:
        """Raise ApiError for a request that is refused; `key` is the number of its API key."""
        names = [name for name, _ in scope["headers"]]
        if len(names) > _MAX_HEADERS:
            raise ApiError(
                f"the request has more than {_MAX_HEADERS} headers; send fewer",
                status=431,
                headers={"Connection": "close"},  # which frees them
            )
        for once in _ONCE:
            if names.count(once) > 1:
                raise ApiError(f"the header {once.decode()} appears more than once; send it once")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in PROBES:
            return
        host = headers.get(b"host", b"")
        if self._hosts is not None and not self._hosts.admit(host):
            name = host.decode("latin-1")[:_MAX_HOST]
            raise ApiError(
                f"the header Host is {name!r}; allowed: this server's own names, such as localhost; "
                "add a name with --allowed-host",
                status=421,
                code="host_not_allowed",
            )
        is_open = path in OPEN_PATHS or path.startswith(_OPEN_FOLDER)
        if not key and not is_open and self._keys and scope["method"] != "OPTIONS":
            raise ApiError(
                "missing or invalid API key; send Authorization: Bearer KEY, or X-Api-Key: KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self._is_foreign(scope, headers):
            raise ApiError(
                "pages of other origins may not call this server; allow one with --cors-origin", status=403
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()

    def _is_foreign(self, scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a page of another, disallowed origin sent a request with side effects.

        A browser hides the answer from such a page, but sends a plain-text body without a preflight. The
        header Sec-Fetch-Site names the relation of the origins, but only on loopback and over TLS; browsers
        send Origin to every server.
        """
        origin = headers.get(b"origin", b"").decode("latin-1")
        site = headers.get(b"sec-fetch-site")
        if site is None:
            foreign = bool(origin) and not _is_origin_of(origin, headers.get(b"host", b"").decode("latin-1"))
        else:
            foreign = site not in (b"none", b"same-origin")
        if not foreign or scope["method"] in ("GET", "HEAD", "OPTIONS") or "*" in self._origins:
            return False
        return origin not in self._origins

    async def _receive(self, receive: Receive, body: _Body) -> Message:
        """Receive a message; raises ApiError if the body is too large or too slow, or memory is short."""
        if body.is_whole:
            return await receive()
        # Without a minimum rate, a client that sends single bytes could hold its connection for days.
        expected = body.started + self._idle_timeout + body.size / _MIN_BODY_RATE
        seconds = min(self._idle_timeout, max(expected - asyncio.get_running_loop().time(), 0.0))
        try:
            async with asyncio.timeout(seconds) as body.wait:
                message = await receive()
        except TimeoutError:
            if not body.is_refused:
                raise ApiError("the body did not arrive in time", status=408) from None
        body.wait = None
        if not body.is_refused:
            body.size += len(message.get("body", b""))
            body.is_whole = not message.get("more_body", False)
            self._make_room(body)
        if body.is_refused:
            raise ApiError(
                f"unanswered requests hold more than {self._max_bodies} bytes (twice --max-body), "
                "and this one is the largest; retry later",
                status=503,
                headers={"Retry-After": "5"},
            )
        if body.size > self._max_body:
            raise self._too_large()
        return message

    def _make_room(self, body: _Body) -> None:
        """Refuse the largest bodies that are incomplete, or else this one, until the others fit."""
        while sum(one.size for one in self._bodies) > self._max_bodies:
            incomplete = [one for one in self._bodies if one.wait or (one is body and not body.is_whole)]
            largest = max(incomplete, key=lambda one: one.size, default=body)
            largest.is_refused = True
            self._bodies.discard(largest)
            if largest.wait is not None:
                largest.wait.reschedule(0.0)  # its request ends at once

    def _too_large(self) -> ApiError:
        return ApiError(f"the body has more than {self._max_body} bytes; send a shorter one", status=413)


def _is_origin_of(origin: str, header: str) -> bool:
    """Return whether an Origin header names the same server as the Host header `header`.

    A TLS proxy may omit the port in Host if Origin has none either.
    """
    scheme, found, rest = origin.partition("://")
    own, host = _HOST.fullmatch(rest), _HOST.fullmatch(header)
    if not found or own is None or host is None or _plain(own[1]) != _plain(host[1]):
        return False
    ports = [one[2].removeprefix(":") if one[2] else "" for one in (own, host)]
    usual = {"http": "80", "https": "443"}.get(scheme.lower(), "")
    return len({port or usual for port in ports}) == 1


def _plain(name: str) -> str:
    """Normalize a name: lower case, without brackets and trailing dot."""
    return name.lower().removeprefix("[").removesuffix("]").removesuffix(".")
