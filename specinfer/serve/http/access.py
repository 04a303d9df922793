"""What every request passes before an endpoint sees it: names, keys, its size, its id, its log line."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from urllib.parse import quote

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specinfer.serve.http.api_error import CALLER, ApiError, Caller
from specinfer.serve.http.hosts import Hosts, is_origin_of

_LOG = logging.getLogger("specinfer.serve.http.access")
PROBES: Final = ("/health", "/ready")  # asked for by load balancers, which have no key, nor any name for us
OPEN_PATHS: Final = ("/version", "/")  # nobody's secret
# Of a path, in the log: others are told as %XX, or a request could write lines of its own there.
_PLAIN: Final = "/:@!$&'()*+,;=~"
_LONGEST_PATH: Final = 256  # characters, in the log
_LONGEST_HOST: Final = 256  # characters, in an answer
_ONCE: Final = (b"host", b"authorization", b"x-api-key")  # headers of which a second one would be a trick
OVER_LIMIT: Final = "specinfer.over_limit"  # in a scope's state: it comes over one connection too many
_LEAST_RATE: Final = 16 << 10  # bytes a second of a body, beyond the first `idle_timeout` seconds
_OPEN_FOLDER: Final = "/page/"  # what the page at / is made of; it asks for the key itself


class Keys:
    """The keys that are let in; whether one is among them takes as long for any."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def number(self, authorization: bytes, x_api_key: bytes = b"") -> int:
        """Which key a header like `Bearer KEY`, or the value of X-Api-Key (Anthropic's), holds.

        They are counted from 1; 0 is none of them. Where both headers hold one, it is that of the first.
        """
        scheme, _, given = authorization.partition(b" ")
        bearer = plain = 0
        for number, key in enumerate(self._keys, start=1):
            bearer = max(bearer, number * hmac.compare_digest(key, given.strip()))
            plain = max(plain, number * hmac.compare_digest(key, x_api_key.strip()))
        return (bearer if scheme.lower() == b"bearer" else 0) or plain


class Access:
    """Lets requests in, each with an id of its own, and writes a line of each; never of what it says."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        max_body: int,
        idle_timeout: float,
        origins: Sequence[str] = (),
        hosts: Hosts | None = None,
        session_header: str = "x-session-id",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._keys = keys
        self._max_body = max_body
        self._idle_timeout = idle_timeout
        self._origins = origins  # whose pages may call; "*": any
        self._hosts = hosts  # by whose names it is asked; None: by any
        self._session_header = session_header.lower().encode()
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name, begun, status = f"req-{uuid.uuid4().hex}", self._clock(), 0
        given = _caller(name, scope, self._keys, self._session_header)
        caller = CALLER.set(given)

        async def tell(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name.encode())]
            # A reader that takes nothing for so long is as good as gone; its connection is closed.
            async with asyncio.timeout(self._idle_timeout):
                await send(message)

        try:
            error = self._refusal(scope, given)
            if error is not None:
                await error.response()(scope, receive, tell)
            else:
                # To HEAD the server sends what it sends to GET, and no body.
                method = "GET" if scope["method"] == "HEAD" else scope["method"]
                await self._app({**scope, "method": method}, self._bounded(receive), tell)
        except TimeoutError:
            _LOG.info("%s reads nothing; its connection is closed", name)
        except ClientDisconnect:
            pass  # in the middle of its body: there is nobody to answer
        except ApiError as error:
            await error.response()(scope, receive, tell)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # as libraries in Rust raise
            _LOG.exception("%s failed", name)
            if not status:  # else it is too late for another answer, and the connection breaks off
                bug = ApiError("internal error; please report it", status=500)
                await bug.response()(scope, receive, tell)
        finally:
            CALLER.reset(caller)
            client = scope["client"][0] if scope.get("client") else "-"
            took = self._clock() - begun
            told = {
                "request_id": name,
                "client": client,
                "method": scope["method"],
                "path": quote(scope["path"], safe=_PLAIN)[:_LONGEST_PATH],
                "status": status,
                "seconds": round(took, 3),
            }
            _LOG.info(
                "%(method)s %(path)s %(status)d %(seconds).3fs %(client)s %(request_id)s", told, extra=told
            )

    def _refusal(self, scope: Scope, caller: Caller) -> ApiError | None:
        headers = dict(scope["headers"])
        names = [name for name, _ in scope["headers"]]
        for once in _ONCE:
            if names.count(once) > 1:
                return ApiError(f"the header {once.decode()} comes twice; send it once")
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in PROBES:
            return None
        host = headers.get(b"host", b"")
        if self._hosts is not None and not self._hosts.admit(host):
            name = host.decode("latin-1")[:_LONGEST_HOST]
            return ApiError(
                f"the header Host is {name!r}; this server answers to its own names alone, like localhost; "
                "--allowed-host adds one",
                status=421,
                code="host_not_allowed",
            )
        if OVER_LIMIT in scope.get("state", ()):
            return ApiError(
                "more connections are open than --max-connections; come again",
                status=503,
                headers={"Retry-After": "1", "Connection": "close"},
            )
        is_open = path in OPEN_PATHS or path.startswith(_OPEN_FOLDER)
        if self._keys and not caller.key and not is_open and scope["method"] != "OPTIONS":
            return ApiError(
                "no API key that is known; send Authorization: Bearer KEY, or X-Api-Key: KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self._is_foreign(scope, headers):
            return ApiError(
                "pages of other origins may not call this server; --cors-origin lets one", status=403
            )
        length = headers.get(b"content-length", b"0")
        return self._too_large() if length.isdigit() and int(length) > self._max_body else None

    def _is_foreign(self, scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a page of another origin makes this server work.

        A browser keeps the answer from such a page, but lets it send a body of plain text without asking. It
        says where the page is from in Sec-Fetch-Site, but only to this machine itself and over TLS; in Origin
        it says so to all.
        """
        origin = headers.get(b"origin", b"").decode("latin-1")
        site = headers.get(b"sec-fetch-site")
        if site is None:
            asks = bool(origin) and not is_origin_of(origin, headers.get(b"host", b"").decode("latin-1"))
        else:
            asks = site not in (b"none", b"same-origin")
        if not asks or scope["method"] in ("GET", "HEAD", "OPTIONS") or "*" in self._origins:
            return False
        return origin not in self._origins

    def _bounded(self, receive: Receive) -> Receive:
        """`receive`, which raises ApiError where the body is too long, or too long in coming."""
        left, whole = self._max_body, False
        begun = self._clock()

        async def bounded() -> Message:
            nonlocal left, whole
            if whole:
                return await receive()
            # A client that sends a byte now and then would keep its connection for days.
            expected = begun + self._idle_timeout + (self._max_body - left) / _LEAST_RATE
            try:
                message = await asyncio.wait_for(
                    receive(), min(self._idle_timeout, max(expected - self._clock(), 0.0))
                )
            except TimeoutError:
                raise ApiError("the body did not come in time", status=408) from None
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._too_large()
            whole = not message.get("more_body", False)
            return message

        return bounded

    def _too_large(self) -> ApiError:
        return ApiError(f"the body has more than {self._max_body} bytes; shorten it", status=413)


def _caller(name: str, scope: Scope, keys: Keys, session_header: bytes) -> Caller:
    headers = dict(scope["headers"])
    key = keys.number(headers.get(b"authorization", b""), headers.get(b"x-api-key", b""))
    kept = (b"traceparent", b"tracestate", session_header)
    return Caller(name, scope["path"], key, *(headers.get(one, b"").decode("latin-1") for one in kept))
