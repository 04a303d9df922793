"""A JSON schema that needs itself without end has no finite document; the library does not see that.

    {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}

As in rules.py, references that have a finite document are collected until none is added. Keywords that do
not lead to other schemas play no part: whether they contradict each other, the library finds out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from specinfer.processors.rules import found_finite

_PLAIN = {"string", "number", "integer", "boolean", "null"}


def endless_reference(schema: Mapping[str, Any]) -> str | None:
    """The first `$ref` that no finite document meets; None when all can be met."""
    targets = {reference: _target(schema, reference) for reference in _references(schema)}
    finite = found_finite(targets, _references, _ends)
    return next((ref for ref in targets if ref not in finite), None)


def _references(schema: object) -> Iterator[str]:
    todo = deque([schema])
    while todo:
        match todo.popleft():
            case {"$ref": str(reference), **rest}:
                yield reference
                todo.extend(rest.values())
            case dict() as mapping:
                todo.extend(mapping.values())
            case list() as values:
                todo.extend(values)


def _target(root: Any, reference: str) -> Any:
    """The schema a reference points to; True (anything) for what is not a JSON pointer into the document."""
    pointer, found = unquote(reference), root
    if not pointer.startswith("#"):
        return True
    for part in pointer[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            return True
    return found


def _ends(schema: Any, finite: set[str]) -> bool:
    """Whether a finite document meets the schema, if references outside `finite` have none."""
    if not isinstance(schema, dict) or "const" in schema or "enum" in schema:
        return True
    parts = [
        schema.get("$ref", "") in finite or "$ref" not in schema,
        all(_ends(part, finite) for part in schema.get("allOf", ())),
        any(_ends(part, finite) for part in schema["anyOf"]) if schema.get("anyOf") else True,
        any(_ends(part, finite) for part in schema["oneOf"]) if schema.get("oneOf") else True,
    ]
    kinds = schema.get("type", "null")
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    shapes = [True] if kinds & _PLAIN else []
    if "object" in kinds:
        shapes.append(_object_ends(schema, finite))
    if "array" in kinds:
        shapes.append(_array_ends(schema, finite))
    return all(parts) and (any(shapes) or not shapes)


def _object_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", True)
    return all(_ends(properties.get(name, others), finite) for name in schema.get("required", ()))


def _array_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    first, low = schema.get("prefixItems", []), int(schema.get("minItems", 0))
    return all(_ends(item, finite) for item in first[:low]) and (
        low <= len(first) or _ends(schema.get("items", True), finite)
    )
