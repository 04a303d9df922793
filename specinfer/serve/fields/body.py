"""Request bodies: JSON of bounded size, read into models of exactly the fields that an endpoint takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Tag, ValidationError
from pydantic_core import from_json

from specinfer.serve.fields.policy import FieldPolicy
from specinfer.serve.http.api_error import MOST_FAULTS, ApiError

# A token of JSON is up to 200 bytes when it is read, and the worst of faults: so a body's values take a few
# times its bytes at most. Requests that mean something have longer ones.
_BYTES_OF_TOKEN: Final = 32
_ALWAYS_TOKENS: Final = 100_000  # whatever the limit of a body's bytes
_EARLY_TOKENS: Final = 4000  # in which the first fault is looked for where there are too many to tell apart
# A string, ended or not, or a mark between values; numbers and names have none beside the marks around them.
_TOKEN: Final = re.compile(rb'"[^"]*"?|[\[\]{},:]')
_ENDS: Final = {b"[": b"]", b"{": b"}"}

_Body = TypeVar("_Body", bound=BaseModel)
_Item = TypeVar("_Item")


class _FirstFault(FailFast):
    """A list is given up at its first bad item: of millions, each would have a complaint in memory."""

    def __hash__(self) -> int:  # which unions ask for, and FailFast has none
        return hash(_FirstFault)


def _is_text(value: object) -> str:
    return "str" if isinstance(value, str) else "list"


Items = Annotated[list[_Item], _FirstFault()]
Ids = Items[int]
# Which of the two is meant is plain, so a fault is told of that one alone.
TextOrItems = Annotated[
    Annotated[str, Tag("str")] | Annotated[Items[_Item], Tag("list")], Discriminator(_is_text)
]


class Fields(BaseModel):
    """A JSON object of a request: exactly these fields, each of its own type."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class OtherKind(Fields):
    """An object of a type that is not supported; it is refused for what it is, whatever else it has."""

    model_config = ConfigDict(extra="ignore")

    type: str


def by_type(tags: Mapping[str | None, str], other: str) -> Discriminator:
    """The tag of the model that an object is of, by its `type`; `other` where that is not among `tags`."""

    def tag(value: object) -> str:
        kind = value.get("type") if isinstance(value, Mapping) else None
        return tags.get(kind, other) if kind is None or isinstance(kind, str) else other

    return Discriminator(tag)


def parse(
    kind: type[_Body], body: bytes, most_bytes: int = 16 << 20, policy: FieldPolicy | None = None
) -> _Body:
    """A request's body, of which there may be `most_bytes`, under the policy of fields; raises ApiError.

    That is where it is not JSON, or not what the endpoint takes, or has so many values that much more memory
    than `most_bytes` would be needed for them.
    """
    policy = policy or FieldPolicy()
    most = max(_ALWAYS_TOKENS, most_bytes // _BYTES_OF_TOKEN)
    if has_more_tokens(body, most):
        raise _early_fault(kind, body, policy) or ApiError(
            f"the body has more than {most} strings, commas, colons and brackets; send fewer values",
            status=413,
        )
    given = _json(body)
    policy.apply(kind, given)
    try:
        return policy.read(kind, given)
    except ValidationError as error:
        early = _early_fault(kind, body, policy) if error.error_count() > MOST_FAULTS else None
        fault = early or ApiError.of_validation(error)
    raise fault  # here, where it does not keep all of the faults as its context


def _json(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not JSON: {error}") from None


def _early_fault(kind: type[_Body], body: bytes, policy: FieldPolicy) -> ApiError | None:
    """What is wrong at a body's beginning, found without the rest; None where nothing is."""
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
            if fault["type"] != "missing":  # in the beginning alone, perhaps
                return ApiError.of_fault(fault)
    return None


def has_more_tokens(text: bytes, most: int) -> bool:
    """Whether a JSON text has more strings and marks than `most`; it may be no JSON at all."""
    if len(text) <= most:
        return False
    return next(islice(_TOKEN.finditer(_without_escapes(text)), most, None), None) is not None


def beginning(text: bytes, most: int) -> bytes:
    """A JSON text up to the last comma of its first `most` tokens, and an end for all that is open there.

    It is JSON where the text is, and b"" where there is no such comma.
    """
    ends: list[bytes] = []  # of what is open, the innermost last
    cut, missing = 0, b""
    for token in islice(_TOKEN.finditer(_without_escapes(text)), most):
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
    """The text with each quote that ends no string, and each backslash, replaced by as many other bytes."""
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")
