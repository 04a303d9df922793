"""Access control: middleware that checks the host, API key, origin and size of each request, and logs it."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specinfer.serve.http.api_error import CALLER, ApiError, Caller
from specinfer.serve.http.hosts import Hosts, is_origin_of

_LOG = logging.getLogger("specinfer.serve.http.access")
PROBES: Final = ("/health", "/ready")  # for load balancers, which send neither a key nor our host name
OPEN_PATHS: Final = ("/version", "/")  # need no key
# Characters of a path that the log keeps; others become %XX, or a request could forge lines of the log.
_PLAIN: Final = "/:@!$&'()*+,;=~"
_MAX_PATH: Final = 256  # characters in the log
_MAX_HOST: Final = 256  # characters in an error
_ONCE: Final = (b"host", b"authorization", b"x-api-key")  # headers that may not be repeated
_MAX_HEADERS: Final = 100  # maximum for a request; each takes hundreds of bytes, however short it is
_MIN_BODY_RATE: Final = 16 << 10  # bytes per second, after the first `idle_timeout` seconds
_OPEN_FOLDER: Final = "/page/"  # files of the page at /, which has a field for the key


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


@dataclass(eq=False, slots=True)
class _Body:
    """The body of an unanswered request."""

    size: int = 0  # bytes received
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
        clock: Callable[[], float] = time.monotonic,
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
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI scope."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name, started, status = f"req-{uuid.uuid4().hex}", self._clock(), 0
        given = _caller(name, scope, self._keys, self._session_header)
        caller, body = CALLER.set(given), _Body()
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
            error = self._refusal(scope, given)
            if error is not None:
                await error.response()(scope, receive, send_with_id)
            else:
                # The server answers HEAD like GET and leaves the body out.
                method = "GET" if scope["method"] == "HEAD" else scope["method"]
                await self._app({**scope, "method": method}, self._bounded(receive, body), send_with_id)
        except TimeoutError:
            _LOG.info("%s: the client does not read; its connection is closed", name)
        except ClientDisconnect:
            pass  # in the middle of its body
        except ApiError as error:
            await error.response()(scope, receive, send_with_id)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # panics of Rust libraries are no Exception
            _LOG.exception("%s failed", name)
            if not status:  # otherwise the answer has started, and the connection is closed
                bug = ApiError("internal error; please report it", status=500)
                await bug.response()(scope, receive, send_with_id)
        finally:
            CALLER.reset(caller)
            self._bodies.discard(body)
            client = scope["client"][0] if scope.get("client") else "-"
            took = self._clock() - started
            line = {
                "request_id": name,
                "client": client,
                "method": scope["method"],
                "path": quote(scope["path"], safe=_PLAIN)[:_MAX_PATH],
                "status": status,
                "seconds": round(took, 3),
            }
            _LOG.info(
                "%(method)s %(path)s %(status)d %(seconds).3fs %(client)s %(request_id)s", line, extra=line
            )

    def _refusal(self, scope: Scope, caller: Caller) -> ApiError | None:
        headers = dict(scope["headers"])
        names = [name for name, _ in scope["headers"]]
        if len(names) > _MAX_HEADERS:
            return ApiError(
                f"the request has more than {_MAX_HEADERS} headers; send fewer",
                status=431,
                headers={"Connection": "close"},  # which frees them
            )
        for once in _ONCE:
            if names.count(once) > 1:
                return ApiError(f"the header {once.decode()} appears more than once; send it once")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in PROBES:
            return None
        host = headers.get(b"host", b"")
        if self._hosts is not None and not self._hosts.admit(host):
            name = host.decode("latin-1")[:_MAX_HOST]
            return ApiError(
                f"the header Host is {name!r}; allowed: this server's own names, such as localhost; "
                "add a name with --allowed-host",
                status=421,
                code="host_not_allowed",
            )
        is_open = path in OPEN_PATHS or path.startswith(_OPEN_FOLDER)
        if self._keys and not caller.key and not is_open and scope["method"] != "OPTIONS":
            return ApiError(
                "missing or invalid API key; send Authorization: Bearer KEY, or X-Api-Key: KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self._is_foreign(scope, headers):
            return ApiError(
                "pages of other origins may not call this server; allow one with --cors-origin", status=403
            )
        length = headers.get(b"content-length", b"0")
        return self._too_large() if length.isdigit() and int(length) > self._max_body else None

    def _is_foreign(self, scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a page of another, disallowed origin sent a request with side effects.

        A browser hides the answer from such a page, but sends a plain-text body without a preflight. The
        header Sec-Fetch-Site names the relation of the origins, but only on loopback and over TLS; browsers
        send Origin to every server.
        """
        origin = headers.get(b"origin", b"").decode("latin-1")
        site = headers.get(b"sec-fetch-site")
        if site is None:
            foreign = bool(origin) and not is_origin_of(origin, headers.get(b"host", b"").decode("latin-1"))
        else:
            foreign = site not in (b"none", b"same-origin")
        if not foreign or scope["method"] in ("GET", "HEAD", "OPTIONS") or "*" in self._origins:
            return False
        return origin not in self._origins

    def _bounded(self, receive: Receive, body: _Body) -> Receive:
        """Wrap `receive`: it raises ApiError if the body is too large or too slow, or if memory is short."""
        whole, started = False, self._clock()

        async def bounded() -> Message:
            nonlocal whole
            if whole:
                return await receive()
            # Without a minimum rate, a client that sends single bytes could hold its connection for days.
            expected = started + self._idle_timeout + body.size / _MIN_BODY_RATE
            seconds = min(self._idle_timeout, max(expected - self._clock(), 0.0))
            try:
                async with asyncio.timeout(seconds) as body.wait:
                    message = await receive()
            except TimeoutError:
                if not body.is_refused:
                    raise ApiError("the body did not arrive in time", status=408) from None
            body.wait = None
            if not body.is_refused:
                body.size += len(message.get("body", b""))
                whole = not message.get("more_body", False)
                self._make_room(body, whole)
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

        return bounded

    def _make_room(self, body: _Body, whole: bool) -> None:
        """Refuse the largest bodies that are incomplete, or else this one, until the others fit."""
        while sum(one.size for one in self._bodies) > self._max_bodies:
            incomplete = [one for one in self._bodies if one.wait is not None or (one is body and not whole)]
            largest = max(incomplete, key=lambda one: one.size, default=body)
            largest.is_refused = True
            self._bodies.discard(largest)
            if largest.wait is not None:
                largest.wait.reschedule(0.0)  # its request ends at once

    def _too_large(self) -> ApiError:
        return ApiError(f"the body has more than {self._max_body} bytes; send a shorter one", status=413)


def _caller(name: str, scope: Scope, keys: Keys, session_header: bytes) -> Caller:
    headers = dict(scope["headers"])
    key = keys.number(headers.get(b"authorization", b""), headers.get(b"x-api-key", b""))
    kept = (b"traceparent", b"tracestate", session_header)
    return Caller(name, scope["path"], key, *(headers.get(one, b"").decode("latin-1") for one in kept))
