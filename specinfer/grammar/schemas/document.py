"""SchemaDocument: a JSON schema of any draft, read in the form of draft 2020-12, its references found.

Older drafts write the same things otherwise: `exclusiveMinimum: true` beside `minimum`, a list as `items`,
`dependencies`, `$recursiveRef`. Read through its document, a schema has one form, of the right shape.
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
_OLD: Final = re.compile(r"https?://json-schema\.org/draft-0[3-7]/schema")  # where $ref stands alone
_MOST_READS: Final = 200_000
_MOST: Final = (1 << 31) - 1  # a larger count is no bound to anybody, and more than the library can write


def type_of(value: object) -> str:
    """The JSON schema type of a JSON value; `integer` where it is an int, for a float `number`."""
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
    """One schema, with all that its references may lead to inside of it."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.root = root
        self._bases: dict[int, str] = {}  # of a schema, by its identity, where it is not that of the root
        self._places: dict[str, str] = {}  # absolute names -> pointers
        self._nodes: dict[int, dict[str, Any]] = {}  # that were read, by the identity of the schema
        self._references: dict[str, list[str]] = {}  # by the pointer of the schema that has them
        self._reads = 0
        self._refs_alone = _OLD.match(str(root.get("$schema"))) is not None
        self._index(root, "", "")

    def target(self, reference: str) -> tuple[Schema, str] | None:
        """The schema a reference of `node` leads to, and its pointer; None where it leads outside."""
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
            placed = todo.pop()
            if placed is None or not isinstance(placed[0], Mapping):
                continue
            schema = placed[0]
            if isinstance(reference := schema.get("$ref"), str):
                resolved = self.target(self._resolved(reference, self._bases.get(id(schema), "")))
                found += [] if resolved is None else [resolved[1]]
            for key, one in _inner(schema):
                if isinstance(one, Mapping) and not key.startswith(("$defs/", "definitions/")):
                    todo.append((one, ""))
        return found

    def node(self, schema: Schema, at: str) -> dict[str, Any]:
        """The keywords of a schema that is no boolean, in their order, each of the right shape.

        A `$ref` is a pointer into the root, or an address that `target` does not know. `at` is where the
        schema stands, for messages. Raises RequestError on a keyword of another shape, and when schemas have
        been read so often that a stranger's would take seconds.
        """
        self._reads += 1
        if self._reads > _MOST_READS:
            raise RequestError("it has too many alternatives in one another; make it smaller")
        known = self._nodes.get(id(schema))
        if known is not None:
            return dict(known)
        node = self._read(schema, at)
        if id(schema) in self._bases:  # others are made on the way, and their identities used again
            self._nodes[id(schema)] = node
        return dict(node)

    def _read(self, schema: Schema, at: str) -> dict[str, Any]:
        if not isinstance(schema, Mapping):
            raise RequestError(f"{place(at)} is {shown(schema)}; allowed: an object or a boolean")
        found = {key: _shaped(key, value, at) for key, value in schema.items() if key in _READ}
        if "$ref" in found and self._refs_alone:
            found = {"$ref": found["$ref"]}
        for key in ("$ref", "$dynamicRef", "$recursiveRef"):
            if key in found:
                found[key] = self._resolved(found[key], self._bases.get(id(schema), ""))
        if found.get("required") in (True, False):  # of draft 3, beside what is required
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
        """Note the names that a schema and those in it give themselves."""
        if not isinstance(schema, Mapping):
            return
        name = schema.get("$id", schema.get("id"))
        if isinstance(name, str) and not name.startswith("#"):
            base = urldefrag(urljoin(base, name)).url
            self._places.setdefault(base, pointer)
        anchors = [schema.get("$anchor"), schema.get("$dynamicAnchor")]
        anchors += [name[1:]] if isinstance(name, str) and name.startswith("#") else []
        for anchor in anchors:
            if isinstance(anchor, str):
                self._places.setdefault(f"{base}#{anchor}", pointer)
        self._bases[id(schema)] = base
        for key, one in _inner(schema):
            self._index(one, f"{pointer}/{key}", base)

    def _resolved(self, reference: str, base: str) -> str:
        url, fragment = urldefrag(urljoin(base, reference) if base else reference)
        resource = self._places.get(url) if url else ""
        if resource is None:
            return reference if not reference.startswith("#") else f"{url}#{fragment}"
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            anchored = self._places.get(f"{url}#{fragment}")
            return reference if anchored is None else f"#{anchored}"
        return f"#{resource}{fragment.rstrip('/') if fragment == '/' else fragment}"


def place(at: str) -> str:
    """A JSON pointer, as messages name it."""
    return at or "the schema"


def escaped_key(key: str) -> str:
    """A name as it stands in a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def _inner(schema: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """The schemas in a schema, by the rest of their pointers."""
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
    """A keyword's value, once it is of the right shape."""
    allowed = ""
    if key in _TEXTS:
        allowed = "" if isinstance(value, str) else "a string"
    elif key in _COUNTS:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if _is_number(value) and isinstance(value, int) and value >= 0:
            return min(value, _MOST)
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
