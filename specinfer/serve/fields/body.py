"""Request bodies: JSON of bounded size, validated against the fields of an endpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Tag, ValidationError
from pydantic_core import from_json

from specinfer.serve.fields.policy import FieldPolicy
from specinfer.serve.http.api_error import MAX_FAULTS, ApiError

# Minimum of bytes a JSON token. A parsed token takes up to 200 bytes of memory, so the values of a body take
# a few times the limit of its bytes at most. Ordinary requests have longer tokens.
_BYTES_OF_TOKEN: Final = 32
_ALWAYS_TOKENS: Final = 100_000  # allowed with any limit of bytes
_EARLY_TOKENS: Final = 4000  # searched for the first fault if a body has too many tokens or faults
# A string, ended or not, or a punctuation character; numbers and names are not counted themselves.
_TOKEN: Final = re.compile(rb'"[^"]*"?|[\[\]{},:]')
_ENDS: Final = {b"[": b"]", b"{": b"}"}

_Body = TypeVar("_Body", bound=BaseModel)
_Item = TypeVar("_Item")


class _FirstFault(FailFast):
    """Stops validating a list at its first bad item; millions of errors would take too much memory."""

    def __hash__(self) -> int:  # unions need it, and FailFast has none
        return hash(_FirstFault)


def _is_text(value: object) -> str:
    return "str" if isinstance(value, str) else "list"


Items = Annotated[list[_Item], _FirstFault()]
Ids = Items[int]
# The type of the value selects one of the two, so an error concerns that one only.
TextOrItems = Annotated[
    Annotated[str, Tag("str")] | Annotated[Items[_Item], Tag("list")], Discriminator(_is_text)
]


class Fields(BaseModel):
    """A JSON object of a request; other fields and other types are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class OtherKind(Fields):
    """An object of an unsupported type; the error names the type, and other fields are not checked."""

    model_config = ConfigDict(extra="ignore")

    type: str


def by_type(tags: Mapping[str | None, str], other: str) -> Discriminator:
    """Select the model of an object by its `type`; `other` if the type is not in `tags`."""

    def tag(value: object) -> str:
        kind = value.get("type") if isinstance(value, Mapping) else None
        return tags.get(kind, other) if kind is None or isinstance(kind, str) else other

    return Discriminator(tag)


def parse(
    kind: type[_Body], body: bytes, max_bytes: int = 16 << 20, policy: FieldPolicy | None = None
) -> _Body:
    """Read a request's body of at most `max_bytes` bytes under the field policy.

    Raises ApiError if it is not JSON, if the endpoint does not accept it, or if its values would take much
    more memory than `max_bytes`.
    """
    policy = policy or FieldPolicy()
    max_tokens = max(_ALWAYS_TOKENS, max_bytes // _BYTES_OF_TOKEN)
    if has_more_tokens(body, max_tokens):
        raise _early_fault(kind, body, policy) or ApiError(
            f"the body has more than {max_tokens} strings, commas, colons and brackets; send fewer values",
            status=413,
        )
    given = _json(body)
    policy.apply(kind, given)
    try:
        return policy.read(kind, given)
    except ValidationError as error:
        early = _early_fault(kind, body, policy) if error.error_count() > MAX_FAULTS else None
        fault = early or ApiError.of_validation(error)
    raise fault  # outside the except block, so that it does not hold all errors as its context


def _json(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None


def _early_fault(kind: type[_Body], body: bytes, policy: FieldPolicy) -> ApiError | None:
    """Return the first error in the beginning of a body; None if there is none."""
    part = beginning(body, _EARLY_TOKENS)
    if not part:
        return None
    try:
        given = _json(part)
        policy.apply(kind, given)
        policy.read(kind, given)
    except ApiError as error:
        return error
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            if fault["type"] != "missing":  # the field may follow in the rest
                return ApiError.of_fault(fault)
    return None


def has_more_tokens(text: bytes, max_tokens: int) -> bool:
    """True if a text, valid JSON or not, has more than `max_tokens` strings and punctuation characters."""
    if len(text) <= max_tokens:
        return False
    return next(islice(_TOKEN.finditer(_without_escapes(text)), max_tokens, None), None) is not None


def beginning(text: bytes, max_tokens: int) -> bytes:
    """Cut a JSON text at the last comma of its first `max_tokens` tokens, and close what is open.

    The result is valid JSON if the text is, and b"" if there is no such comma.
    """
    ends: list[bytes] = []  # closing brackets of the open lists and objects, the innermost last
    cut, missing = 0, b""
    for token in islice(_TOKEN.finditer(_without_escapes(text)), max_tokens):
        mark = token[0]
        if mark in _ENDS:
            ends.append(_ENDS[mark])
        elif mark in (b"]", b"}"):
            if not ends:
                break
            ends.pop()
        elif mark == b",":
            cut, missing = token.start(), b"".join(reversed(ends))
    return text[:cut] + missing


def _without_escapes(text: bytes) -> bytes:
    """Replace escaped quotes and backslashes by as many other bytes."""
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
