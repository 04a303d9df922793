"""Whether no value meets two schemas, as far as that can be seen; the types and values of a schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from specinfer.grammar.schemas.document import TYPES, Schema, SchemaDocument, type_of

_DEEPEST: Final = 8


def are_disjoint(one: Schema, other: Schema, document: SchemaDocument, depth: int = 0) -> bool:
    """Whether it is certain that no value meets both; raises RequestError on a malformed keyword."""
    if one is False or other is False:
        return True
    if one is True or other is True or depth > _DEEPEST:
        return False
    left, right = document.node(one, ""), document.node(other, "")
    for node, across in ((left, other), (right, one)):
        found = document.target(node["$ref"]) if "$ref" in node else None
        if found is not None and are_disjoint(found[0], across, document, depth + 1):
            return True
        if any(are_disjoint(part, across, document, depth + 1) for part in node.get("allOf", ())):
            return True
        for key in ("anyOf", "oneOf"):
            parts = node.get(key, ())
            if parts and all(are_disjoint(part, across, document, depth + 1) for part in parts):
                return True
    values, others = values_of(left), values_of(right)
    if values is not None and others is not None:
        return not any(_equal(value, another) for value in values for another in others)
    return all(_differ(name, left, right, document, depth) for name in types_of(left) & types_of(right))


def types_of(node: Mapping[str, Any]) -> frozenset[str]:
    """The types that a value may have, `integer` being a number; all where the keywords do not say."""
    values = values_of(node)
    given = node.get("type", list(TYPES))
    named = _with_numbers([given] if isinstance(given, str) else given)
    return named if values is None else named & _with_numbers(map(type_of, values))


def _with_numbers(names: Iterable[str]) -> frozenset[str]:
    return frozenset("number" if name == "integer" else name for name in names)


def values_of(node: Mapping[str, Any]) -> list[Any] | None:
    """The values that a `const` or an `enum` names; None where there is neither."""
    return [node["const"]] if "const" in node else node.get("enum")


def _differ(
    name: str, left: Mapping[str, Any], right: Mapping[str, Any], document: SchemaDocument, depth: int
) -> bool:
    """Whether no value of one type meets both."""
    match name:
        case "object":
            required = dict.fromkeys([*left.get("required", ()), *right.get("required", ())])
            return any(
                are_disjoint(_property(left, key), _property(right, key), document, depth + 1)
                for key in required
            )
        case "number":
            return _apart(_bounds(left), _bounds(right))
        case "array":
            return _apart(_lengths(left, "Items"), _lengths(right, "Items"))
        case "string":
            return _apart(_lengths(left, "Length"), _lengths(right, "Length"))
    return False


def _property(node: Mapping[str, Any], key: str) -> Schema:
    properties = node.get("properties", {})
    if key in properties:
        found: Schema = properties[key]
        return found
    if node.get("patternProperties"):
        return True
    others: Schema = node.get("additionalProperties", True)
    return others


_Bounds = tuple[float, bool, float, bool]  # the least, whether it is one itself, and so the largest


def _bounds(node: Mapping[str, Any]) -> _Bounds:
    low, low_out = node.get("minimum", -float("inf")), node.get("exclusiveMinimum", -float("inf"))
    high, high_out = node.get("maximum", float("inf")), node.get("exclusiveMaximum", float("inf"))
    return max(low, low_out), low > low_out, min(high, high_out), high < high_out


def _lengths(node: Mapping[str, Any], what: str) -> _Bounds:
    return node.get(f"min{what}", 0), True, node.get(f"max{what}", float("inf")), True


def _apart(one: _Bounds, other: _Bounds) -> bool:
    for low, high in ((one, other), (other, one)):
        if high[2] < low[0] or (high[2] == low[0] and not (high[3] and low[1])):
            return True
    return False


def _equal(one: object, other: object) -> bool:
    """Whether two JSON values are the same: 1 is 1.0, and not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return one == other
