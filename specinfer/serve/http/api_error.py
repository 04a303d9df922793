"""ApiError: what a client is told that asked for something it cannot have, as OpenAI or Anthropic tell it.

An error is told in the shape of the API that was asked, so the request that is answered stands here, too.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request
from starlette.responses import Response

from specinfer.errors import RequestError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_ANTHROPIC_PATH: Final = re.compile(r"/v1/messages(/|$)")  # behind a proxy's path, perhaps
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_LONGEST: Final = 100  # characters of what is told of a value or a name
_LONGEST_MESSAGE: Final = 1000  # whatever a message repeats of a request
_LAST: Final = 400  # characters of a longer message that are its end: what is allowed, and what to do
_AS_JSON: Final = {  # where the library speaks of Python
    "list_type": "Input should be a valid array",
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
}
MOST_FAULTS: Final = 1000  # of a body that are told one from another: each becomes an object of its own


@dataclass(frozen=True, slots=True)
class Caller:
    """The request that an answer belongs to."""

    request_id: str = ""  # of the server's making; "" where nobody asks over HTTP
    path: str = ""
    key: int = 0  # which of the API keys it was asked with, from 1; 0: none was asked for
    traceparent: str = ""  # the W3C header, as it came
    tracestate: str = ""
    session: str = ""  # the header of `session_header`, as it came


# Each request is answered in a context of its own, so endpoints need not hand this on.
CALLER: Final[ContextVar[Caller]] = ContextVar("caller", default=Caller())  # noqa: B039 - it is frozen
# Set when the engine has admitted the request; a stream waits for it before it sends its headers.
ADMITTED: Final[ContextVar[asyncio.Event | None]] = ContextVar("admitted", default=None)


class ApiError(Exception):
    """An answer that is an error: {"error": {"message", "type", "param", "code"}}.

    Where a path of Anthropic's API was asked, it is told in that API's shape instead.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if len(message) > _LONGEST_MESSAGE:
            message = f"{message[: _LONGEST_MESSAGE - _LAST]}...{message[-_LAST:]}"
        super().__init__(message)
        self.status = status
        self.headers = headers
        kind = _TYPES.get(status, "invalid_request_error")
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param and cut(param), "code": code}
        }

    @classmethod
    def of(cls, error: RequestError) -> ApiError:
        """The engine's own complaint, for the client."""
        return cls(str(error), param=error.parameter)

    @classmethod
    def of_validation(cls, error: ValidationError) -> ApiError:
        """The first thing that is wrong with a body, and where it is."""
        if (count := error.error_count()) > MOST_FAULTS:
            return cls(f"the body has {count} faults; send what the endpoint takes")
        return cls.of_fault(error.errors(include_url=False)[0])

    @classmethod
    def of_fault(cls, fault: ErrorDetails) -> ApiError:
        """One thing that is wrong with a body, and where it is."""
        message, kind, last = fault["msg"], fault["type"], len(fault["loc"]) - 1
        where = ""
        for number, part in enumerate(fault["loc"]):
            named = kind == "extra_forbidden" and number == last  # by the caller, like a tag perhaps
            if isinstance(part, int):
                where += f"[{part}]"
            elif named or not _is_tag(part):
                name = cut(part)
                where += f".{name}" if where else name
        if kind == "extra_forbidden":
            return cls(
                f"{where or repr(where)} is no field of this endpoint; drop it, or serve with "
                "--unknown-fields=ignore",
                param=where,
                code="unknown_parameter",
            )
        if kind == "json_invalid":
            return cls(f"the body is not JSON: {message}")
        if kind == "literal_error":
            given, allowed = shown(fault["input"]), fault["ctx"]["expected"]
            return cls(f"{where} is {given}; allowed: {allowed}", param=where)
        message = _AS_JSON.get(kind, message)
        return cls(f"{where or 'the body'}: {message[:1].lower()}{message[1:]}", param=where or None)

    def response(self) -> Response:
        """The error as an answer."""
        return Response(
            json.dumps(self._told(), ensure_ascii=True),
            self.status,
            headers=dict(self.headers or {}),
            media_type="application/json",
        )

    def as_http(self) -> bytes:
        """The error as a whole HTTP answer, the last on its connection."""
        body = json.dumps(self.body).encode()
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *(f"{name}: {value}" for name, value in (self.headers or {}).items()),
            "connection: close",
        ]
        return "\r\n".join([*lines, "", ""]).encode() + body

    @property
    def event(self) -> str:
        """The error as an event of a stream that has begun."""
        told = self._told()
        name = "event: error\n" if told is not self.body else ""  # Anthropic's streams name their events
        return f"{name}data: {json.dumps(told, ensure_ascii=True)}\n\n"

    def _told(self) -> dict[str, Any]:
        """The body in the shape of the API that was asked."""
        caller = CALLER.get()
        if not _ANTHROPIC_PATH.search(caller.path):
            return self.body
        message, param = self.body["error"]["message"], self.body["error"]["param"]
        if self.body["error"]["code"] == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # by which clients know it, and shorten it
        elif param and param not in message:  # this shape has no other place for it
            message = f"{param}: {message}"
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": caller.request_id}


async def tell_api_error(request: Request, error: Exception) -> Response:
    """The handler of ApiError."""
    assert isinstance(error, ApiError)
    return error.response()


async def tell_http_error(request: Request, error: Exception) -> Response:
    """The handler of the framework's own errors: no such path, no such method."""
    status = getattr(error, "status_code", 500)
    allowed = getattr(error, "headers", None)
    phrase = HTTPStatus(status).phrase.lower()
    path = request.scope["path"]
    advice = "; drop the slash at its end" if status == 404 and path.endswith("/") and path != "/" else ""
    return ApiError(
        f"{request.method} {cut(path)}: {phrase}{advice}", status=status, headers=allowed
    ).response()


def shown(value: object) -> str:
    """A JSON value, short enough to be told."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(cut(value)) if isinstance(value, str) else cut(repr(value))


def cut(text: str) -> str:
    """A text, short enough to be told."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _is_tag(part: str) -> bool:
    """Whether a part of a place names a kind of value, where several are allowed, and no field."""
    return (
        "[" in part or part in ("str", "int", "float", "bool", "list", "dict", "none") or part[:1].isupper()
    )


class OwnNames:
    """Maps the names of SamplingParams and chat completions to the names of one endpoint.

    A name that begins with a dot is part of a path, like ".function" in "tools[0].function.name".
    `conversation` is the field that holds the messages.
    """

    def __init__(self, names: Mapping[str, str], conversation: str) -> None:
        self._names = names
        self._conversation = conversation
        longest_first = sorted(names, key=len, reverse=True)
        places = (
            rf"(?<=\]){re.escape(name)}" if name[0] == "." else rf"\b{re.escape(name)}"
            for name in longest_first
        )
        self._pattern = re.compile(rf"(?:{'|'.join(places)})\b")

    @contextmanager
    def told(self) -> Iterator[None]:
        """ApiErrors that are raised meanwhile get the endpoint's names."""
        try:
            yield
        except ApiError as error:
            raise self._of(error) from None

    def _of(self, error: ApiError) -> ApiError:
        told = error.body["error"]
        param = (
            self._conversation if told["param"] == "messages" else told["param"] and self._own(told["param"])
        )
        # An error about the conversation may quote it, and quoted text must not change.
        about_it = param in (None, self._conversation)
        message = told["message"] if about_it else self._own(told["message"])
        return ApiError(message, param=param, status=error.status, code=told["code"], headers=error.headers)

    def _own(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._names[found[0]], text)
