"""HTTP errors in the format of OpenAI's or Anthropic's API, and the request that they answer.

The path of the request decides the format, so this module also holds the context of the current request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from specinfer.errors import RequestError, unread

_INVALID: Final = ("invalid_request_error", "invalid_request_error")
# Status -> type of the error in OpenAI's API, and in Anthropic's.
_TYPES: Final = {
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    408: ("invalid_request_error", "timeout_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
}
_ANTHROPIC_PATH: Final = re.compile(r"/v1/messages(/|$)")  # a proxy may add a prefix
_MAX_SHOWN: Final = 100  # characters of a value or a name in a message
_MAX_MESSAGE: Final = 1000  # characters
_KEPT_END: Final = 400  # characters kept from the end of a longer message, which says how to fix the request
_AS_JSON: Final = {  # in place of messages that name Python types
    "list_type": "Input should be a valid array",
    "dict_type": "Input should be an object",
    "model_type": "Input should be an object",
}
MAX_FAULTS: Final = 1000  # in a body; pydantic makes an object of each, so more are only counted


@dataclass(frozen=True, slots=True)
class Caller:
    """Identity and trace headers of the current request."""

    request_id: str = ""  # made by the server; "" outside of HTTP
    path: str = ""
    key: int = 0  # number of the API key, from 1; 0: the server has no keys
    traceparent: str = ""  # the W3C header, unchanged
    tracestate: str = ""
    session: str = ""  # value of the header named by `session_header`


# Each request runs in its own context, so endpoints need not pass this on.
CALLER: Final[ContextVar[Caller]] = ContextVar("caller", default=Caller())  # noqa: B039 - it is frozen


class ApiError(Exception):
    """An error response: {"error": {"message", "type", "param", "code"}}.

    On the paths of Anthropic's API, the response has that API's format instead.
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
        if len(message) > _MAX_MESSAGE:
            message = f"{message[: _MAX_MESSAGE - _KEPT_END]}...{message[-_KEPT_END:]}"
        super().__init__(message)
        self.status = status
        self.headers = headers
        kind, _ = _TYPES.get(status, _INVALID)
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param and cut(param), "code": code}
        }

    @classmethod
    def of(cls, error: RequestError) -> ApiError:
        """Convert an error of the engine."""
        return cls(str(error), param=error.parameter)

    @classmethod
    def of_validation(cls, error: ValidationError) -> ApiError:
        """Report the first fault of a body, with its path."""
        if (count := error.error_count()) > MAX_FAULTS:
            return cls(f"the body has {count} faults; send only fields of this endpoint")
        fault = error.errors(include_url=False)[0]
        message, kind, last = fault["msg"], fault["type"], len(fault["loc"]) - 1
        where = ""
        for number, part in enumerate(fault["loc"]):
            named = kind == "extra_forbidden" and number == last  # by the caller, so it may look like a tag
            if isinstance(part, int):
                where += f"[{part}]"
            elif named or not _is_tag(part):
                name = cut(part)
                where += f".{name}" if where else name
        if kind == "extra_forbidden":
            return cls(
                f"{where or repr(where)} is not a field of this endpoint; drop it, or serve with "
                "--unknown-fields=ignore",
                param=where,
                code="unknown_parameter",
            )
        if kind == "json_invalid":
            return cls(f"the body is not JSON: {message}")
        if kind == "literal_error":
            given, allowed = shown(fault["input"]), fault["ctx"]["expected"]
            no_sense = not_read(fault["input"]) if where.endswith(".type") else ""
            return cls(f"{where} is {given}; allowed: {allowed}{no_sense}", param=where)
        message = _AS_JSON.get(kind, message)
        return cls(f"{where or 'the body'}: {message[:1].lower()}{message[1:]}", param=where or None)

    def response(self) -> Response:
        """Return the error as a response."""
        return Response(
            json.dumps(self._shaped(), ensure_ascii=True),
            self.status,
            headers=dict(self.headers or {}),
            media_type="application/json",
        )

    @property
    def event(self) -> str:
        """The error as an event of a stream that has started."""
        body = self._shaped()
        name = "event: error\n" if body is not self.body else ""  # Anthropic's streams name their events
        return f"{name}data: {json.dumps(body, ensure_ascii=True)}\n\n"

    def _shaped(self) -> dict[str, Any]:
        """Return the body in the format of the request's API."""
        caller = CALLER.get()
        if not _ANTHROPIC_PATH.search(caller.path):
            return self.body
        message, param = self.body["error"]["message"], self.body["error"]["param"]
        if self.body["error"]["code"] == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # clients match this prefix and shorten the prompt
        elif param and param not in message:  # this format has no field for it
            message = f"{param}: {message}"
        _, kind = _TYPES.get(self.status, _INVALID)
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": caller.request_id}


async def answer_http_error(request: Request, error: Exception) -> Response:
    """Exception handler of the framework's errors: unknown path or method."""
    status = getattr(error, "status_code", 500)
    path = request.scope["path"]
    advice = "; drop the trailing slash" if status == 404 and path.endswith("/") and path != "/" else ""
    message = f"{request.method} {cut(path)}: {HTTPStatus(status).phrase.lower()}{advice}"
    return ApiError(message, status=status, headers=getattr(error, "headers", None)).response()


def shown(value: object) -> str:
    """Return a JSON value in words, short enough for a message."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(cut(value)) if isinstance(value, str) else cut(repr(value))


def not_read(kind: object) -> str:
    """Return the end of an error about a part of this type, if it is an image, audio or video."""
    return f"; {found} by this server" if (found := unread(kind)) else ""


def cut(text: str) -> str:
    """Shorten a text for a message."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _is_tag(part: str) -> bool:
    """Return whether a part of a fault's path is pydantic's tag of a union member, not a field."""
    return (
        "[" in part or part in ("str", "int", "float", "bool", "list", "dict", "none") or part[:1].isupper()
    )


class OwnNames:
    """Maps the names of SamplingParams and chat completions to the names of one endpoint.

    A name that starts with a dot is part of a path, like ".function" in "tools[0].function.name".
    `conversation` is the field that holds the messages.
    """

    def __init__(self, names: Mapping[str, str], conversation: str) -> None:
        self._names = names
        self._conversation = conversation
        longest_first = sorted(names, key=len, reverse=True)
        patterns = (
            rf"(?<=\]){re.escape(name)}" if name[0] == "." else rf"\b{re.escape(name)}"
            for name in longest_first
        )
        self._pattern = re.compile(rf"(?:{'|'.join(patterns)})\b")

    def renamed(self, error: ApiError) -> ApiError:
        """Return the error with the endpoint's names."""
        body = error.body["error"]
        param = (
            self._conversation if body["param"] == "messages" else body["param"] and self._own(body["param"])
        )
        # An error about the conversation may quote it, and quoted text must not change.
        about_it = param in (None, self._conversation)
        message = body["message"] if about_it else self._own(body["message"])
        return ApiError(message, param=param, status=error.status, code=body["code"], headers=error.headers)

    def _own(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._names[found[0]], text)
