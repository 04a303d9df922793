"""The schema of all that another schema refuses, where it can be written without `not`.

A keyword speaks of one type and accepts everything of the others, so its negation asks for that type. A
schema is met when all of its keywords are: its negation is met when that of one keyword is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from specinfer.grammar.schemas.document import TYPES, Schema, SchemaDocument

_DEEPEST: Final = 8  # references after one another
_MOST_NUMBERS: Final = 16  # in an enum: each leaves a gap of its own
MOST_CHARACTERS: Final = 400  # of an enum's texts: each is a place where another text may leave them
_OPPOSITE: Final = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_LEAST: Final = {"minLength": "string", "minItems": "array", "minProperties": "object"}
_MOST: Final = {"maxLength": "string", "maxItems": "array", "maxProperties": "object"}


def negated(schema: Schema, document: SchemaDocument, depth: int = 0) -> Schema | None:
    """What a schema refuses, exactly; None where that cannot be written.

    Raises RequestError on a malformed keyword.
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
    """Schemas that together accept what one keyword refuses."""
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
            return [{"type": _LEAST[key], key.replace("min", "max"): value - 1}] if value else []
        case "maxLength" | "maxItems" | "maxProperties":
            return [{"type": _MOST[key], key.replace("max", "min"): value + 1}]
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
            found = document.target(value) if depth < _DEEPEST else None
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
    """Everything but these values."""
    texts = [value for value in values if isinstance(value, str)]
    flags = [value for value in values if isinstance(value, bool)]
    numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if any(isinstance(value, list | Mapping) and value for value in values):
        return None
    if len(numbers) > _MOST_NUMBERS or sum(map(len, texts)) > MOST_CHARACTERS:
        return None
    named = [("string", texts), ("boolean", flags), ("number", numbers)]
    absent = set(TYPES) - {name for name, found in named if found}
    absent -= {"null"} if None in values else set()
    found: list[Schema] = []
    for name, empty, least in (("array", [], "minItems"), ("object", {}, "minProperties")):
        if empty in values:
            absent -= {name}
            found.append({"type": name, least: 1})
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
    """A JavaScript expression for all texts but these: where each leaves them, or stops short of them."""
    known = set(texts)
    heads: dict[str, set[str]] = {"": set()}  # of each beginning, the characters that may follow
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
