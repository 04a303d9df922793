"""Request bodies: JSON of bounded size, translated to the fields of an endpoint and validated.

The field policy applies to every body before validation (docs/reference.md):

1. `null` means absent everywhere, and 2.0 is the integer 2.
2. Names of other servers are translated, unless the endpoint has a field of that name.
3. A field that would change the text and is not supported is refused, with an alternative.
4. Other unknown fields are ignored, and logged once for each name, or refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Tag, ValidationError
from pydantic_core import from_json

from specinfer.serve.config import UnknownFields
from specinfer.serve.fields.foreign_fields import Own, translate
from specinfer.serve.http.api_error import ApiError, cut

_Body = TypeVar("_Body", bound=BaseModel)
_Item = TypeVar("_Item")
_LOG = logging.getLogger(__name__)

# Minimum of bytes a JSON token. A parsed token takes up to 200 bytes of memory, so the values of a body take
# a few times the limit of its bytes at most. Ordinary requests have longer tokens.
_BYTES_OF_TOKEN: Final = 32
_ALWAYS_TOKENS: Final = 100_000  # allowed with any limit of bytes
# A string, ended or not, or a punctuation character; numbers and names are not counted themselves.
_TOKEN: Final = re.compile(rb'"[^"]*"?|[\[\]{},:]')
_MAX_LINES: Final = 1000  # logged, once each; a client can send millions of names


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
        kind = value.get("type") if isinstance(value, Mapping) else getattr(value, "type", None)
        return tags.get(kind, other) if kind is None or isinstance(kind, str) else other

    return Discriminator(tag)


def has_more_tokens(text: bytes, max_tokens: int) -> bool:
    """True if a text, valid JSON or not, has more than `max_tokens` strings and punctuation characters."""
    plain = text.replace(b"\\\\", b"__").replace(b'\\"', b"__")  # without escaped quotes
    return next(islice(_TOKEN.finditer(plain), max_tokens, None), None) is not None


class FieldPolicy:
    """Reads bodies under the policy; keeps the lines already logged. Belongs to one event loop."""

    def __init__(self, unknown: UnknownFields = "error", max_bytes: int = 16 << 20) -> None:
        """A body has at most `max_bytes` bytes."""
        self._unknown = unknown
        self._max_tokens = max(_ALWAYS_TOKENS, max_bytes // _BYTES_OF_TOKEN)
        self._logged: set[str] = set()

    def parse(self, kind: type[_Body], body: bytes) -> _Body:
        """Read a request's body.

        Raises ApiError if it is not JSON, if the endpoint does not accept it, or if its values would take
        much more memory than the largest body.
        """
        if len(body) > self._max_tokens and has_more_tokens(body, self._max_tokens):
            raise ApiError(
                f"the body has more than {self._max_tokens} strings, commas, colons and brackets; "
                "send fewer values",
                status=413,
            )
        try:
            given = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise ApiError(f"the body is not JSON: {error}") from None
        if isinstance(given, dict):
            translate(given, own_names(kind))
        try:
            if self._unknown == "error":
                return kind.model_validate(given)
            read = kind.model_validate(given, extra="allow")
            if not (unknown := [*_unknown(read)]):
                return read
            for name in unknown:
                self.log_once(f"the unknown field {cut(name)!r} is ignored")
            return kind.model_validate(given, extra="ignore")
        except ValidationError as error:
            fault = ApiError.of_validation(error)
        raise fault  # outside the except block, so that it does not hold all errors as its context

    def log_once(self, line: str) -> None:
        """Log a line about requests, unless it has been logged before."""
        if line in self._logged or len(self._logged) >= _MAX_LINES:
            return
        self._logged.add(line)
        if len(self._logged) == _MAX_LINES:
            line = f"{_MAX_LINES - 1} lines about unknown fields were logged; more are left out"
        _LOG.warning("%s", line)


@cache
def own_names(kind: type[BaseModel]) -> Own:
    """The names of an endpoint's own fields."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def _unknown(value: Any) -> Iterator[str]:
    """Return the names of unknown fields of an object and the objects inside it."""
    if isinstance(value, BaseModel):
        if type(value).model_config.get("extra") == "ignore":
            return  # a tool that is left out
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name))
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for one in value:
            yield from _unknown(one)
