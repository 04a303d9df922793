"""Arguments as texts between tags: what a schema says of such a text, and the JSON that it stands for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from specinfer.grammar.schemas.document import type_of
from specinfer.serve.tools.tool import Tool

TYPES: Final = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_DEFINITIONS: Final = ("$defs", "definitions")
_TYPES_ALONE: Final = {"type", "anyOf", "title", "description", "default", "examples", *_DEFINITIONS}
_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}  # as templates write them in examples


def schemas_of(tool: Tool) -> dict[str, Mapping[str, Any]]:
    """The schemas of a tool's parameters by name, each with the definitions it may refer to."""
    whole = tool.parameters
    shared = {name: whole[name] for name in _DEFINITIONS if name in whole}
    properties = whole.get("properties") or {}
    return {name: {**_resolved(one, whole), **shared} for name, one in properties.items()}


def says_types_alone(schema: Mapping[str, Any]) -> bool:
    """Whether every value of its types is allowed."""
    parts: Sequence[Mapping[str, Any]] = schema.get("anyOf", ())
    return set(schema) <= _TYPES_ALONE and all(map(says_types_alone, parts))


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a value may have; all of them where the schema does not say."""
    if "type" in schema:
        kind = schema["type"]
        return frozenset([kind] if isinstance(kind, str) else kind)
    for key in ("enum", "const"):
        if key in schema:
            return frozenset(map(type_of, schema[key] if key == "enum" else [schema[key]]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            parts = [types_of(_resolved(part, schema)) for part in schema[key]]
            return frozenset().union(*parts)
    return TYPES


def json_of(text: str, types: frozenset[str]) -> str:
    """The JSON of a value written as `text`: itself where it is JSON of such a type, else a string."""
    written = _PYTHON.get(text.strip(), text.strip())
    try:
        found = type_of(json.loads(written, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = found in types or (found == "integer" and "number" in types) or "string" not in types
    return written if fits else json.dumps(text, ensure_ascii=False)


def _resolved(schema: object, whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema that is no reference to a definition of `whole`; what is none stays as it is."""
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
    raise ValueError(f"{name} is no JSON")
