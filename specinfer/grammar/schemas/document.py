"""SchemaDocument: reads a JSON schema of any draft in the form of draft 2020-12, with references resolved.

Older drafts have other keywords for the same things: `exclusiveMinimum: true` with `minimum`, a list as
`items`, `dependencies`, `$recursiveRef`. A document returns schemas in one validated form.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import unquote, urldefrag, urljoin

from specinfer.errors import RequestError, shown

Schema = Mapping[str, Any] | bool
TYPES: Final = ("object", "array", "string", "number", "boolean", "null")

_ONE: Final = frozenset(
    (
        *("not", "if", "then", "else", "items", "additionalItems", "contains", "propertyNames"),
        *("additionalProperties", "unevaluatedItems", "unevaluatedProperties"),
    )
)
_SEVERAL: Final = frozenset(("allOf", "anyOf", "oneOf", "prefixItems"))
_BY_NAME: Final = frozenset(("properties", "patternProperties", "dependentSchemas", "$defs", "definitions"))
_COUNTS: Final = frozenset(
    (
        *("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains"),
        *("minProperties", "maxProperties"),
    )
)
_NUMBERS: Final = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_TEXTS: Final = frozenset(("pattern", "format", "$ref", "$dynamicRef", "$recursiveRef"))
_REST: Final = frozenset(
    ("type", "enum", "const", "required", "uniqueItems", "dependencies", "dependentRequired")
)
_READ: Final = (_ONE | _SEVERAL | _BY_NAME | _COUNTS | _NUMBERS | _TEXTS | _REST) - {"$defs", "definitions"}
# drafts in which $ref ignores its siblings
_OLD: Final = re.compile(r"https?://json-schema\.org/draft-0[3-7]/schema")
_MAX_READS: Final = 200_000
_MAX_COUNT: Final = (1 << 31) - 1  # larger counts are no practical bound, and overflow in the library


def type_of(value: object) -> str:
    """The JSON schema type of a JSON value; `integer` for an int, `number` for a float."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


class SchemaDocument:
    """A schema, and the schemas its internal references lead to."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._bases: dict[int, str] = {}  # by a schema's id(): its base URI, if not the root's
        self._pointers: dict[str, str] = {}  # absolute names -> pointers
        self._nodes: dict[int, dict[str, Any]] = {}  # normalized schemas, by the schema's id()
        self._references: dict[str, list[str]] = {}  # by the pointer of the schema that contains them
        self._reads = 0
        self._refs_alone = _OLD.match(str(root.get("$schema"))) is not None
        self._index(root, "", "")

    def target(self, reference: str) -> tuple[Schema, str] | None:
        """The schema a reference leads to, and its pointer; None if it is outside the document."""
        pointer = reference.removeprefix("#")
        if pointer and not pointer.startswith("/"):
            return None
        found: Any = self.root
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                return None
        return (found, pointer) if reference.startswith("#") and isinstance(found, Mapping | bool) else None

    def references(self, pointer: str) -> list[str]:
        """The pointers that references in the schema at `pointer` lead to."""
        if pointer not in self._references:
            self._references[pointer] = self._read_references(pointer)
        return self._references[pointer]

    def _read_references(self, pointer: str) -> list[str]:
        found, todo = list[str](), [self.target(f"#{pointer}")]
        while todo:
            entry = todo.pop()
            if entry is None or not isinstance(entry[0], Mapping):
                continue
            schema = entry[0]
            if isinstance(reference := schema.get("$ref"), str):
                resolved = self.target(self._resolved(reference, self._bases.get(id(schema), "")))
                found += [] if resolved is None else [resolved[1]]
            for key, one in _inner(schema):
                if isinstance(one, Mapping) and not key.startswith(("$defs/", "definitions/")):
                    todo.append((one, ""))
        return found

    def node(self, schema: Schema, at: str) -> dict[str, Any]:
        """The keywords of a schema that is not a boolean, in order, validated.

        A `$ref` is a pointer into the root, or an address that `target` does not resolve. `at` is the
        schema's pointer, for messages. Raises RequestError for an invalid keyword, and after too many reads,
        because an untrusted schema would take seconds.
        """
        self._reads += 1
        if self._reads > _MAX_READS:
            raise RequestError("it has too many nested alternatives; make it smaller")
        known = self._nodes.get(id(schema))
        if known is not None:
            return dict(known)
        node = self._read(schema, at)
        if id(schema) in self._bases:  # other schemas are temporary, and their id() is reused
            self._nodes[id(schema)] = node
        return dict(node)

    def _read(self, schema: Schema, at: str) -> dict[str, Any]:
        if not isinstance(schema, Mapping):
            raise RequestError(f"{pointer_text(at)} is {shown(schema)}; allowed: an object or a boolean")
        found = {key: _shaped(key, value, at) for key, value in schema.items() if key in _READ}
        if "$ref" in found and self._refs_alone:
            found = {"$ref": found["$ref"]}
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if key in found:
                found[key] = self._resolved(found[key], self._bases.get(id(schema), ""))
        if found.get("required") in (True, False):  # draft 3 has a boolean in the property itself
            del found["required"]
        if isinstance(found.get("items"), list):
            found["prefixItems"] = found.pop("items")
            if "additionalItems" in found:
                found["items"] = found["additionalItems"]
        found.pop("additionalItems", None)
        for own, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if found.get(own) is True and bound in found:
                found[own] = found.pop(bound)
            elif isinstance(found.get(own), bool):
                del found[own]
        for name, needed in found.pop("dependencies", {}).items():
            kind = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
            found[kind] = {**found.get(kind, {}), name: needed}
        return found

    def _index(self, schema: object, pointer: str, base: str) -> None:
        """Record the names that a schema and its subschemas define."""
        if not isinstance(schema, Mapping):
            return
        name = schema.get("$id", schema.get("id"))
        if isinstance(name, str) and not name.startswith("#"):
            base = urldefrag(urljoin(base, name)).url
            self._pointers.setdefault(base, pointer)
        anchors = [schema.get("$anchor"), schema.get("$dynamicAnchor")]
        anchors += [name[1:]] if isinstance(name, str) and name.startswith("#") else []
        for anchor in anchors:
            if isinstance(anchor, str):
                self._pointers.setdefault(f"{base}#{anchor}", pointer)
        self._bases[id(schema)] = base
        for key, one in _inner(schema):
            self._index(one, f"{pointer}/{key}", base)

    def _resolved(self, reference: str, base: str) -> str:
        url, fragment = urldefrag(urljoin(base, reference) if base else reference)
        resource = self._pointers.get(url) if url else ""
        if resource is None:
            return reference if not reference.startswith("#") else f"{url}#{fragment}"
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            anchored = self._pointers.get(f"{url}#{fragment}")
            return reference if anchored is None else f"#{anchored}"
        return f"#{resource}{fragment.rstrip('/') if fragment == '/' else fragment}"


def pointer_text(at: str) -> str:
    """A JSON pointer for messages."""
    return at or "the schema"


def escaped_key(key: str) -> str:
    """A name escaped for a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """The subschemas of a schema, with the rest of their pointers."""
    for key, value in schema.items():
        if key in _BY_NAME | {"dependencies"} and isinstance(value, Mapping):
            for name, one in value.items():
                yield f"{key}/{escaped_key(name)}", one
        elif key in _SEVERAL | {"items"} and isinstance(value, list):
            for index, one in enumerate(value):
                yield f"{key}/{index}", one
        elif key in _ONE:
            yield key, value


def _shaped(key: str, value: Any, at: str) -> Any:
    """Validate a keyword's value."""
    allowed = ""
    if key in _TEXTS:
        allowed = "" if isinstance(value, str) else "a string"
    elif key in _COUNTS:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if _is_number(value) and isinstance(value, int) and value >= 0:
            return min(value, _MAX_COUNT)
        allowed = "an integer >= 0"
    elif key in _NUMBERS:
        old = isinstance(value, bool) and key.startswith("exclusive")
        fits = _is_number(value) and not math.isnan(value) and (key != "multipleOf" or value > 0)
        allowed = "" if old or fits else "a number" if key != "multipleOf" else "a number > 0"
    elif key in _SEVERAL:
        allowed = "" if isinstance(value, list) and value else "a list of one schema or more"
    elif key in _BY_NAME or key in ("dependencies", "dependentRequired"):
        allowed = "" if isinstance(value, Mapping) else "an object"
    elif key == "type":
        names = value if isinstance(value, list) and value else [value]
        known = all(isinstance(name, str) and name in (*TYPES, "integer") for name in names)
        allowed = "" if known else f"one or more of {', '.join(sorted((*TYPES, 'integer')))}"
    elif key == "enum":
        allowed = "" if isinstance(value, list) else "a list"
    elif key == "required":
        named = isinstance(value, list) and all(isinstance(name, str) for name in value)
        allowed = "" if named or isinstance(value, bool) else "a list of names"
    elif key == "uniqueItems":
        allowed = "" if isinstance(value, bool) else "true or false"
    if allowed:
        raise RequestError(f"{at}/{key} is {shown(value)}; allowed: {allowed}")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
