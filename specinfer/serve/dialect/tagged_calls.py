"""Schemas and reader of arguments between tags, as Qwen3-Coder and GLM write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from specinfer.serve.dialect.call_form import PYTHON, CallForm, Tags
from specinfer.serve.dialect.call_format import Tool
from specinfer.serve.dialect.call_parser import ArgumentsReader, certain

TYPES: Final = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_DEFINITIONS: Final = ("$defs", "definitions")
_TYPE_KEYWORDS: Final = {"type", "anyOf", "title", "description", "default", "examples", *_DEFINITIONS}
_JSON_TYPES: Final[Mapping[type, str]] = {
    **{str: "string", float: "number", int: "integer", bool: "boolean", type(None): "null"},
    **{list: "array", dict: "object"},
}
_TEXT: Final = frozenset({"string"})  # a value of these types is written without quotes
_PYTHON: Final = {theirs: ours for ours, theirs in PYTHON.words.items()}  # as templates write examples


def schemas_of(tool: Tool) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of a tool's parameters by name, each with the definitions it may refer to."""
    whole = tool.parameters
    shared = {name: whole[name] for name in _DEFINITIONS if name in whole}
    properties = whole.get("properties") or {}
    return {name: {**resolved(one, whole), **shared} for name, one in properties.items()}


def has_types_only(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema allows every value of its types."""
    parts: Sequence[Mapping[str, Any]] = schema.get("anyOf", ())
    return set(schema) <= _TYPE_KEYWORDS and all(map(has_types_only, parts))


def given_values(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the values that a schema lists; None if it lists none."""
    given: Sequence[Any] | None = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return given


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; all of them if it does not restrict them."""
    if "type" in schema:
        kind = schema["type"]
        return frozenset([kind] if isinstance(kind, str) else kind)
    if (given := given_values(schema)) is not None:
        return frozenset(_JSON_TYPES[type(one)] for one in given)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            parts = [types_of(resolved(part, schema)) for part in schema[key]]
            return frozenset().union(*parts)
    return TYPES


def json_of(text: str, types: frozenset[str]) -> str:
    """Return `text` unchanged if it is JSON of one of the types, else as a JSON string."""
    written = _PYTHON.get(text.strip(), text.strip())
    try:
        found = _JSON_TYPES[type(json.loads(written, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = found in types or (found == "integer" and "number" in types) or "string" not in types
    return written if fits else json.dumps(text, ensure_ascii=False)


def resolved(schema: object, whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow references to definitions of `whole`; other schemas are returned unchanged."""
    for _ in range(10):  # references to references
        if not isinstance(schema, Mapping):
            return {}
        where = str(schema.get("$ref")).split("/")
        kept = whole.get(where[1]) if len(where) == 3 and where[1] in _DEFINITIONS else None
        if not isinstance(kept, Mapping) or where[2] not in kept:
            return schema
        schema = kept[where[2]]
    return {}


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class TaggedArguments(ArgumentsReader):
    """Reads arguments between tags, strings piece by piece.

    The schemas decide which values are strings. A value that should be JSON but is not becomes a string.
    """

    def __init__(self, tool: Tool, tags: Tags, form: CallForm) -> None:
        super().__init__()
        self._types = {name: types_of(schema) for name, schema in schemas_of(tool).items()}
        last = form.tail.partition("\n")[0].strip()
        self._tag = re.compile(rf"\s*(?:{tags.begin}|{re.escape(last)})")  # begins a value, or ends them
        self._end = tags.end.rstrip()
        self._between = "{"
        self._open: frozenset[str] | None = None  # types of the value that has started

    def _read(self) -> str:
        written = ""
        while True:
            if self._open is not None:
                written += self._value(self._open)
            tag = self._tag.match(self.held) if self._open is None else None
            if tag is None:
                return written
            self._take(tag.end())
            if tag[1] is None:
                self.done = True
                return written + ("{}" if self._between == "{" else "}")
            self._open = self._types.get(tag[1], TYPES)
            written += f"{self._between}{json.dumps(tag[1], ensure_ascii=False)}: "
            written += '"' if self._open == _TEXT else ""
            self._between = ", "

    def _value(self, types: frozenset[str]) -> str:
        """Take a value, or what is there of a string; at its end `_open` becomes None."""
        end = self.held.find(self._end)
        if end < 0:
            begun = self._take(certain(self.held, self._end, "")) if types == _TEXT else ""
            return json.dumps(begun, ensure_ascii=False)[1:-1]
        self._open = None
        value = self._take(end)
        self._take(len(self._end))
        return json.dumps(value, ensure_ascii=False)[1:] if types == _TEXT else json_of(value, types)
