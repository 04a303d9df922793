"""Schemas and parser of calls whose arguments are between tags (Qwen3-Coder)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from specinfer.serve.dialect.call_format import (
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    CallFormat,
    Tool,
)
from specinfer.serve.dialect.call_parser import CallParser, NoCallError
from specinfer.serve.dialect.reader import Rule

TYPES: Final = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_DEFINITIONS: Final = ("$defs", "definitions")
_TYPE_KEYWORDS: Final = {"type", "anyOf", "title", "description", "default", "examples", *_DEFINITIONS}
_JSON_TYPES: Final[Mapping[type, str]] = {
    **{str: "string", float: "number", int: "integer", bool: "boolean", type(None): "null"},
    **{list: "array", dict: "object"},
}
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}  # as templates write them in examples


def schemas_of(tool: Tool) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of a tool's parameters by name, each with the definitions it may refer to."""
    whole = tool.parameters
    shared = {name: whole[name] for name in _DEFINITIONS if name in whole}
    properties = whole.get("properties") or {}
    return {name: {**_resolved(one, whole), **shared} for name, one in properties.items()}


def has_types_only(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema allows every value of its types."""
    parts: Sequence[Mapping[str, Any]] = schema.get("anyOf", ())
    return set(schema) <= _TYPE_KEYWORDS and all(map(has_types_only, parts))


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that a schema allows; all of them if it does not restrict them."""
    if "type" in schema:
        kind = schema["type"]
        return frozenset([kind] if isinstance(kind, str) else kind)
    for key in ("enum", "const"):
        if key in schema:
            return frozenset(
                _JSON_TYPES[type(one)] for one in (schema[key] if key == "enum" else [schema[key]])
            )
    for key in ("anyOf", "oneOf"):
        if key in schema:
            parts = [types_of(_resolved(part, schema)) for part in schema[key]]
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


def _resolved(schema: object, whole: Mapping[str, Any]) -> Mapping[str, Any]:
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


def call_parser(
    call_format: CallFormat, tools: Sequence[Tool], new_id: Callable[[], str] | None = None
) -> CallParser:
    """Return a parser for calls of these tools in a format."""
    if call_format.name == "qwen3_coder":
        return TaggedCallParser(call_format, tools, new_id)
    return CallParser(call_format, [tool.name for tool in tools], new_id)


class TaggedCallParser(CallParser):
    """Finds calls with tags, and returns their arguments as JSON, strings piece by piece.

    The schemas decide which values are strings. A value that should be JSON but is not becomes a string.
    """

    def __init__(
        self, call_format: CallFormat, tools: Sequence[Tool], new_id: Callable[[], str] | None = None
    ) -> None:
        super().__init__(call_format, [tool.name for tool in tools], new_id)
        self._types = {
            tool.name: {name: types_of(schema) for name, schema in schemas_of(tool).items()} for tool in tools
        }

    def _call(self) -> Rule[None]:
        yield from self._expect(FUNCTION)
        name = self._known((yield from self._name()))
        self._start(name)
        try:
            yield from self._parameters(self._types[name])
        except NoCallError:
            self._stop(complete=False)
            raise
        self._stop(complete=True)

    def _parameters(self, types: dict[str, frozenset[str]]) -> Rule[None]:
        between = "{"
        while True:
            yield from self._spaces()
            yield from self._expect("<")
            if self.char == FUNCTION_END[1]:
                break
            yield from self._expect(PARAMETER[1:])
            key = yield from self._name()
            if self.char == "\n":
                yield from self._hold()
            self._drop()
            self._emit(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value(types.get(key, TYPES))
            between = ", "
        yield from self._expect(FUNCTION_END[1:])
        self._drop()
        self._emit("{}" if between == "{" else "}")

    def _value(self, types: frozenset[str]) -> Rule[None]:
        """A value and its closing tag, with the line break before the tag."""
        is_text = types == {"string"}
        kept: list[str] = []
        if is_text:
            self._emit('"')
        while True:
            if self.char == "\n":
                yield from self._hold()
            if self.char == PARAMETER_END[0] and (yield from self._literal(PARAMETER_END)):
                self._drop()
                self._emit('"' if is_text else json_of("".join(kept), types))
                return
            if not self.char:
                raise NoCallError
            is_plain = self.char not in ("\n", PARAMETER_END[0])
            more = self._release() + (self.char if is_plain else "")
            if is_text:
                self._emit(json.dumps(more, ensure_ascii=False)[1:-1])
            else:
                kept.append(more)
            if is_plain:
                yield

    def _name(self) -> Rule[str]:
        """The name in a tag, up to its end."""
        name: list[str] = []
        while self.char != ">":
            if self.char in ("", "\n"):
                raise NoCallError
            name.append(self.char)
            yield from self._hold()
        yield from self._hold()
        return "".join(name)
