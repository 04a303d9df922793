"""FieldPolicy: what of a request's JSON reaches an endpoint's own fields, whoever it was written for.

The policy, applied to every body before anything else looks at it (docs/http.md has it as a table):

1. `null` is absent, everywhere, and a whole number is an integer, however it is written.
2. A field that asks for what happens anyway is taken, whoever invented it.
3. What other servers call by another name is translated (foreign.py).
4. A field that would change the answer and cannot be honoured is refused, with what to use instead.
5. A field that nobody knows is refused, or ignored with one line in the log for each name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from specinfer.serve.config import UnknownFields
from specinfer.serve.fields.foreign import CHECKED, INSIDE, NOTES, RENAMED, TRANSLATED, USUAL, Own, put
from specinfer.serve.http.api_error import ApiError, cut, shown

_Body = TypeVar("_Body", bound=BaseModel)
_LOG = logging.getLogger(__name__)
_MOST_NAMES: Final = 1000  # of unknown fields that are told of, once each: anybody can send millions
_EXACT: Final = 2**53  # up to which each whole number is a float of its own
# Values that are the caller's own, and are handed on as they are: schemas, and variables of a template.
_OPAQUE: Final = frozenset(
    [
        "body",  # of a line of a batch, to which its endpoint applies the policy
        *("schema", "parameters", "input_schema", "input_examples", "output_schema"),
        *("guided_json", "structured_outputs", "chat_template_kwargs"),
    ]
)
_SPECULATIVE: Final = "speculative."  # how llama.cpp's options of speculation begin


class FieldPolicy:
    """Applies the policy; remembers which unknown fields the log has told of. Belongs to one event loop."""

    def __init__(self, unknown: UnknownFields = "error", sampling: Mapping[str, Any] | None = None) -> None:
        """`sampling` is what holds where a request does not say how to sample, by name."""
        self._unknown = unknown
        self._sampling = dict(sampling or {})
        self._told: set[str] = set()

    def apply(self, kind: type[BaseModel], body: Any) -> None:
        """Rewrite a body, in place, to what `kind` takes; raises ApiError for what cannot be honoured."""
        if not isinstance(body, dict):
            return
        _go_on(body)
        _tidy(body, "", "")
        own, seen = own_names(kind), set[str]()
        while foreign := [name for name in body if name not in own and name not in seen]:
            seen.update(foreign)  # one may be translated to another
            for name in foreign:
                if name in body:
                    _foreign(name, body, own)
        _settle(body, own)
        for name in [name for name in body if name in CHECKED and name not in own]:
            CHECKED[name](name, body.pop(name), {**self._sampling, **body})

    def read(self, kind: type[_Body], body: Any) -> _Body:
        """The body as `kind` has it, once the policy was applied; raises pydantic's ValidationError."""
        if self._unknown == "error":
            return kind.model_validate(body)
        read = kind.model_validate(body, extra="allow")
        if not (unknown := [*_unknown(read)]):
            return read
        for name in unknown:
            self._tell(name)
        return kind.model_validate(body, extra="ignore")

    def _tell(self, name: str) -> None:
        name = cut(name)
        if name in self._told or len(self._told) >= _MOST_NAMES:
            return
        self._told.add(name)
        if len(self._told) == _MOST_NAMES:
            _LOG.warning("more than %d unknown fields were sent; the rest is ignored unsaid", _MOST_NAMES - 1)
        else:
            _LOG.warning("the unknown field %r is ignored", name)


@cache
def own_names(kind: type[BaseModel]) -> Own:
    """The names of an endpoint's own fields."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


def _go_on(body: dict[str, Any]) -> None:
    """Say of a last message that it is to be gone on with as vLLM does, where the message says so itself."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return
    for name in ("prefix", "partial"):
        if messages[-1].get(name) is True:
            del messages[-1][name]
            put(body, "continue_final_message", True, f"messages[{len(messages) - 1}].{name}")


def _tidy(given: dict[str, Any], where: str, within: str) -> None:
    """Take nulls out of an object that lies in the field `within`, and all that changes nothing there."""
    rules = INSIDE.get(within)
    for name, value in list(given.items()):
        if value is None:
            del given[name]
            continue
        place = f"{where}.{name}" if where else name
        if rules is not None and name in rules.notes:
            del given[name]
        elif rules is not None and name in rules.usual:
            _check_usual(place, value, *rules.usual[name])
            del given[name]
        elif rules is not None and name in rules.renamed:
            del given[name]
            given.setdefault(rules.renamed[name], value)
        else:
            given[name] = _tidied(value, place, name)


def _tidied(value: Any, where: str, name: str) -> Any:
    """A value of the field `name` with all that is inside of it tidied."""
    if type(value) is float:
        return int(value) if value.is_integer() and abs(value) <= _EXACT else value
    if name in _OPAQUE or where == "json_schema" or (name == "input" and type(value) is dict):
        return value  # the input that is an object is that of an earlier call
    if type(value) is dict:
        _tidy(value, where, name)
    elif type(value) is list:
        for place, one in enumerate(value):
            if type(one) is dict:
                _tidy(one, f"{where}[{place}]", name)
            elif type(one) is float or type(one) is list:
                value[place] = _tidied(one, f"{where}[{place}]", name)
    return value


def _foreign(name: str, body: dict[str, Any], own: Own) -> None:
    """Take a field out of the body that is not one of the endpoint's own, or leave one that nobody knows."""
    value = body[name]
    if name in NOTES or name.startswith(_SPECULATIVE):
        del body[name]
    elif name in USUAL:
        _check_usual(name, value, *USUAL[name])
        del body[name]
    elif name in TRANSLATED:
        del body[name]
        TRANSLATED[name](name, value, body, own)
    elif (renamed := next((one for one in RENAMED.get(name, ()) if one in own), None)) is not None:
        del body[name]
        put(body, renamed, value, name)


def _settle(body: dict[str, Any], own: Own) -> None:
    """Rewrite values of the endpoint's own fields that other servers take; raises ApiError."""
    for name in ("top_k", "seed", "max_tokens", "max_completion_tokens", "max_output_tokens"):
        # -1 is no limit, or chance. Where some length is usual, or must be given, it says more than nothing.
        whole = "messages" in own and "output_config" not in own
        if name in own and body.get(name) == -1 and (name != "max_tokens" or whole):
            del body[name]
    for name in ("grammar", "suffix"):
        if body.get(name) == "":
            del body[name]
    if "messages" not in own and body.get("logprobs") is False:
        del body["logprobs"]
    for name in ("stop", "stop_sequences"):
        if name in body:
            stop = body[name]
            left = [one for one in stop if one not in (None, "")] if isinstance(stop, list) else stop
            body[name] = left
            if left in ("", []):
                del body[name]
    if isinstance(body.get("logit_bias"), list):
        body["logit_bias"] = _biases(body["logit_bias"])
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") in ("json_object", "json_schema"):
        if isinstance(form.get("schema"), dict):  # llama.cpp's shape of it
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": form["schema"]},
            }
        elif isinstance(form.get("json_schema"), dict):
            form["json_schema"].setdefault("name", "answer")


def _biases(given: Sequence[Any]) -> dict[str, Any]:
    """llama.cpp's list of pairs as a mapping; false forbids a token."""
    biases: dict[str, Any] = {}
    for place, pair in enumerate(given):
        match pair:
            case [int(token), int() | float() as bias] if not isinstance(token, bool):
                biases[str(token)] = -100 if bias is False else bias
            case _:
                raise ApiError(
                    f"logit_bias[{place}] is {shown(pair)}; allowed: a token id with a number, or false",
                    param="logit_bias",
                )
    return biases


def _check_usual(name: str, value: Any, usual: Sequence[Any], advice: str) -> None:
    """Raise ApiError for a value that asks for more than what happens anyway."""
    if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in usual):
        return
    allowed = f"; allowed: {' or '.join(map(_written, usual))}" if usual else ""
    raise ApiError(f"{cut(name)} is {shown(value)}{allowed}; {advice}", param=name)


def _written(value: Any) -> str:
    """A value as JSON writes it."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else repr(value)


def _unknown(value: Any) -> Iterator[str]:
    """The names of fields that nobody knows, of an object and of those inside of it."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or ()
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name))
    elif isinstance(value, list) and value and isinstance(value[0], BaseModel):
        for one in value:
            yield from _unknown(one)
