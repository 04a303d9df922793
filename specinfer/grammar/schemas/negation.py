"""Negation of schemas without `not`, where possible, and a test whether schemas are disjoint.

A keyword constrains one type and accepts all values of others, so its negation requires that type. A schema
is satisfied if all its keywords are; its negation is satisfied if the negation of one keyword is.

Two schemas are disjoint if no value satisfies both, as far as their types and values show.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from specinfer.grammar.schemas.document import TYPES, Schema, SchemaDocument, type_of

_MAX_PAIR_DEPTH: Final = 8  # nesting depth of the comparison
# lower bound, whether it is included, upper bound, whether it is included
_Bounds = tuple[float, bool, float, bool]
_MAX_DEPTH: Final = 8  # length of a chain of references
_MAX_NUMBERS: Final = 16  # in an enum: each adds a gap
MAX_CHARACTERS: Final = 400  # in an enum's texts: another text may diverge at each
_OPPOSITE: Final = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_MIN_KEYWORDS: Final = {"minLength": "string", "minItems": "array", "minProperties": "object"}
_MAX_KEYWORDS: Final = {"maxLength": "string", "maxItems": "array", "maxProperties": "object"}


def are_disjoint(one: Schema, other: Schema, document: SchemaDocument, depth: int = 0) -> bool:
    """True if certainly no value satisfies both; raises RequestError for a malformed keyword."""
    if one is False or other is False:
        return True
    if one is True or other is True or depth > _MAX_PAIR_DEPTH:
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
    """The types that a value may have, with `integer` as number; all if unconstrained."""
    values = values_of(node)
    given = node.get("type", list(TYPES))
    named = _with_numbers([given] if isinstance(given, str) else given)
    return named if values is None else named & _with_numbers(map(type_of, values))


def _with_numbers(names: Iterable[str]) -> frozenset[str]:
    return frozenset("number" if name == "integer" else name for name in names)


def values_of(node: Mapping[str, Any]) -> list[Any] | None:
    """The values of `const` or `enum`; None if there is neither."""
    return [node["const"]] if "const" in node else node.get("enum")


def _differ(
    name: str, left: Mapping[str, Any], right: Mapping[str, Any], document: SchemaDocument, depth: int
) -> bool:
    """True if no value of one type satisfies both."""
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
    """JSON equality: 1 equals 1.0, and not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return one == other


def negated(schema: Schema, document: SchemaDocument, depth: int = 0) -> Schema | None:
    """The exact negation of a schema; None if it cannot be expressed.

    Raises RequestError for a malformed keyword.
    """
    if isinstance(schema, bool):
        return not schema
    options: list[Schema] = []
    for key, value in document.node(schema, "").items():
        found = _negated_keyword(key, value, document, depth)
        if found is None:
            return None
        options += [option for option in found if option is not False]
    if True in options:
        return True
    return {"anyOf": options} if len(options) > 1 else options[0] if options else False


def _negated_keyword(key: str, value: Any, document: SchemaDocument, depth: int) -> Iterable[Schema] | None:
    """Schemas that together accept the values that one keyword rejects."""
    match key:
        case "type":
            names = {value} if isinstance(value, str) else set(value)
            return None if "integer" in names and "number" not in names else [_of_types(set(TYPES) - names)]
        case "const":
            return _none_of([value])
        case "enum":
            return _none_of(value)
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            return [{"type": "number", _OPPOSITE[key]: value}]
        case "minLength" | "minItems" | "minProperties":
            return [{"type": _MIN_KEYWORDS[key], key.replace("min", "max"): value - 1}] if value else []
        case "maxLength" | "maxItems" | "maxProperties":
            return [{"type": _MAX_KEYWORDS[key], key.replace("max", "min"): value + 1}]
        case "required":
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties":
            return _all_of(_with_property(name, one, document, depth) for name, one in value.items())
        case "anyOf":
            parts = [negated(one, document, depth) for one in value]
            return None if None in parts else [{"allOf": parts}]
        case "allOf":
            return _all_of(negated(one, document, depth) for one in value)
        case "not":
            return [value]
        case "$ref":
            found = document.target(value) if depth < _MAX_DEPTH else None
            return None if found is None else _all_of([negated(found[0], document, depth + 1)])
        case "uniqueItems" if not value:
            return []
        case "additionalProperties" | "items" | "unevaluatedProperties" if value is True:
            return []
    return None


def _all_of(parts: Iterable[Schema | None]) -> list[Schema] | None:
    found: list[Schema] = []
    for part in parts:
        if part is None:
            return None
        found.append(part)
    return found


def _with_property(name: str, schema: Schema, document: SchemaDocument, depth: int) -> Schema | None:
    refused = negated(schema, document, depth)
    if refused is None or refused is False:
        return refused
    return {"type": "object", "properties": {name: refused}, "required": [name]}


def _of_types(names: Iterable[str]) -> Schema:
    kept = [name for name in TYPES if name in names]
    return {"type": kept} if kept else False


def _none_of(values: list[Any]) -> list[Schema] | None:
    """All values except these."""
    texts = [value for value in values if isinstance(value, str)]
    flags = [value for value in values if isinstance(value, bool)]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if any(isinstance(value, list | Mapping) and value for value in values):
        return None
    if len(numbers) > _MAX_NUMBERS or sum(map(len, texts)) > MAX_CHARACTERS:
        return None
    named = [("string", texts), ("boolean", flags), ("number", numbers)]
    absent = set(TYPES) - {name for name, found in named if found}
    absent -= {"null"} if None in values else set()
    found: list[Schema] = []
    for name, empty, min_keyword in (("array", [], "minItems"), ("object", {}, "minProperties")):
        if empty in values:
            absent -= {name}
            found.append({"type": name, min_keyword: 1})
    found.append(_of_types(absent))
    if texts:
        found.append({"type": "string", "pattern": other_texts(texts)})
    if flags and len(set(flags)) == 1:
        found.append({"const": not flags[0]})
    edges = sorted(set(numbers))
    for low, high in zip([None, *edges], [*edges, None], strict=True) if edges else ():
        gap: dict[str, Any] = {"type": "number"}
        gap |= {} if low is None else {"exclusiveMinimum": low}
        found.append(gap | ({} if high is None else {"exclusiveMaximum": high}))
    return found


def other_texts(texts: Iterable[str]) -> str:
    """A JavaScript expression for all texts but these: each option diverges from them, or stops short."""
    known = set(texts)
    heads: dict[str, set[str]] = {"": set()}  # for each prefix, the characters that may follow
    for text in known:
        for length, character in enumerate(text):
            heads.setdefault(text[:length], set()).add(character)
        heads.setdefault(text, set())
    options = []
    for beginning, following in sorted(heads.items()):
        written = "".join(map(_character, beginning))
        options.append(f"{written}[^{''.join(map(_character, sorted(following)))}][^]*")
        if beginning not in known:
            options.append(written)
    return f"^(?:{'|'.join(options)})$"


def _character(character: str) -> str:
    return f"\\u{{{ord(character):X}}}"
