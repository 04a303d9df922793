"""FieldPolicy: translates and checks the fields of a request for the endpoint.

The policy applies to every body before validation (docs/http.md):

1. `null` means absent everywhere, and 2.0 is the integer 2.
2. Names of other servers are translated (foreign.py).
3. A field that would change the text and is not supported is refused, with an alternative.
4. Other unknown fields are ignored, and logged once for each name, or refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from specinfer.serve.config import UnknownFields
from specinfer.serve.fields.foreign import Own, put, translate
from specinfer.serve.http.api_error import cut

_Body = TypeVar("_Body", bound=BaseModel)
_LOG = logging.getLogger(__name__)
_MAX_LINES: Final = 1000  # logged, once each; a client can send millions of names
_EXACT: Final = 2**53  # maximum integer up to which all integers are exact floats
# Fields with values that are passed on unchanged: schemas, and variables of a template.
_OPAQUE: Final = frozenset(
    [
        "body",  # a line of a batch: the endpoint applies the policy to it
        "metadata",
        *("schema", "parameters", "input_schema", "input_examples", "output_schema"),
        *("guided_json", "structured_outputs", "chat_template_kwargs", "documents"),
    ]
)


class FieldPolicy:
    """Applies the policy; keeps the lines already logged. Belongs to one event loop."""

    def __init__(self, unknown: UnknownFields = "error", sampling: Mapping[str, Any] | None = None) -> None:
        """`sampling` holds the defaults of sampling fields, by name."""
        self._unknown = unknown
        self._sampling = dict(sampling or {})
        self._logged: set[str] = set()

    def apply(self, kind: type[BaseModel], body: Any) -> None:
        """Rewrite a body in place to the fields of `kind`; raises ApiError for an unsupported field."""
        if not isinstance(body, dict):
            return
        _read_prefix(body)
        for name in [*body]:
            body[name] = _tidied(body[name], name, top=True)
            if body[name] is None:
                del body[name]
        own = own_names(kind)
        translate(body, own, self._sampling)
        _settle(body, own)

    def read(self, kind: type[_Body], body: Any) -> _Body:
        """Validate a body after `apply`; raises pydantic's ValidationError."""
        if self._unknown == "error":
            return kind.model_validate(body)
        read = kind.model_validate(body, extra="allow")
        if not (unknown := [*_unknown(read)]):
            return read
        for name in unknown:
            self.log_once(f"the unknown field {cut(name)!r} is ignored")
        return kind.model_validate(body, extra="ignore")

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


def _read_prefix(body: dict[str, Any]) -> None:
    """Set `continue_final_message` if the last message has `prefix` or `partial`."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return
    for name in ("prefix", "partial"):
        if messages[-1].get(name) is True:
            del messages[-1][name]
            put(body, "continue_final_message", True, f"messages[{len(messages) - 1}].{name}")


def _tidied(value: Any, name: str, *, top: bool = False) -> Any:
    """Return the value of a field without nulls in its objects, and with integers for whole numbers.

    Objects and lists are changed in place.
    """
    if type(value) is float:
        return int(value) if value.is_integer() and abs(value) <= _EXACT else value
    # An input that is an object holds the arguments of an earlier call.
    if name in _OPAQUE or (top and name == "json_schema") or (name == "input" and type(value) is dict):
        return value
    if type(value) is dict:
        for key, one in [*value.items()]:
            if one is None:
                del value[key]
            elif name == "messages" and key == "reasoning":
                value.setdefault("reasoning_content", value.pop(key))
            else:
                value[key] = _tidied(one, key)
    elif type(value) is list:
        for index, one in enumerate(value):
            if type(one) in (float, list, dict):
                value[index] = _tidied(one, name)
    return value


def _settle(body: dict[str, Any], own: Own) -> None:
    """Rewrite values of other servers in the endpoint's own fields."""
    for name in ("top_k", "seed", "max_tokens", "max_completion_tokens", "max_output_tokens"):
        # -1 means no limit, or a random seed. If max_tokens has a default or is required, -1 is not the same
        # as an absent field.
        whole = "messages" in own and "output_config" not in own
        if body.get(name) == -1 and (name != "max_tokens" or whole):
            del body[name]
    for name in ("stop", "stop_sequences"):
        if isinstance(stop := body.get(name), list):
            body[name] = [one for one in stop if one not in (None, "")]
    for name in ("stop", "stop_sequences", "grammar", "suffix"):
        if body.get(name) in ("", []):
            del body[name]
    if "messages" not in own and body.get("logprobs") is False:
        del body["logprobs"]
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") in ("json_object", "json_schema"):
        if isinstance(form.get("schema"), dict):  # llama.cpp's shape
            schema = {"name": "answer", "schema": form["schema"]}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif isinstance(form.get("json_schema"), dict):
            form["json_schema"].setdefault("name", "answer")


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
