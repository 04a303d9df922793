"""What the library refuses of a schema that has none but its keywords: found by trying, and taken out.

Each keyword may be one that the library has, and their sum still be refused: two expressions for names that
may overlap once schemas are joined, a reference to a schema inside of itself that says more beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from specinfer.errors import RequestError
from specinfer.grammar.schemas.document import Schema, escaped_key

_MOST_TRIALS: Final = 300
# In which order keywords are given up, those together that say something of one another.
_GIVEN_UP: Final = (
    *(
        ("pattern",),
        ("format",),
        ("multipleOf",),
        ("minProperties", "maxProperties"),
        ("minItems", "maxItems"),
    ),
    *(("patternProperties", "additionalProperties"), ("allOf",), ("anyOf",), ("$ref",)),
)
UNMET: Final = "Unsatisfiable schema"  # how the library says that no text meets a schema: no fault here


class Repair:
    """Takes out of written schemas what the library refuses.

    `fault` says what the library has against one; `leave_out` hears of each keyword that goes, and its place.
    """

    def __init__(
        self, fault: Callable[[Mapping[str, Any]], str], leave_out: Callable[[str, str], None]
    ) -> None:
        self._fault = fault
        self._leave_out = leave_out
        self._definitions: dict[str, Schema] = {}
        self._trials = 0

    def whole(self, schema: Mapping[str, Any], places: Mapping[str, str]) -> Schema:
        """A schema with its definitions, which stand at `places`; raises RequestError after many trials."""
        self._definitions = dict(schema.get("$defs", {}))
        for name in list(self._definitions):
            if self._refused({"$ref": f"#/$defs/{name}"}):
                self._definitions[name] = as_object(self._mended(self._definitions[name], places[name]))
        root = {key: value for key, value in schema.items() if key != "$defs"}
        mended = self._mended(root, "")
        return mended if isinstance(mended, bool) else {**mended, "$defs": self._definitions}

    def _refused(self, schema: Schema) -> bool:
        if isinstance(schema, bool):
            return False
        self._trials += 1
        if self._trials > _MOST_TRIALS:
            raise RequestError("it has too many parts that cannot be held; make it smaller")
        said = self._fault({**schema, "$defs": self._definitions})
        return bool(said) and UNMET not in said

    def _mended(self, schema: Schema, at: str) -> Schema:
        if isinstance(schema, bool) or not self._refused(schema):
            return schema
        mended = dict(schema)
        for where, part in _parts(schema):
            _put(mended, where, self._mended(part, "/".join([at, *map(escaped_key, map(str, where))])))
        for keys in _GIVEN_UP:
            if keys == ("allOf",):
                while len(mended.get("allOf", ())) > 1 and self._refused(mended):
                    mended["allOf"] = mended["allOf"][:-1]
                    self._leave_out("allOf", f"{at}/allOf/{len(mended['allOf'])}")
            if not self._refused(mended):
                return mended
            gone = [key for key in keys if key in mended]
            if gone:
                mended = {key: value for key, value in mended.items() if key not in gone}
                for key in gone:
                    self._leave_out(key, at)
        if not self._refused(mended):
            return mended
        self._leave_out("everything", at)
        return True


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...] | tuple[str, str | int], Schema]]:
    for key in ("properties", "patternProperties"):
        for name, part in schema.get(key, {}).items():
            yield (key, name), part
    for key in ("allOf", "anyOf", "prefixItems"):
        for index, part in enumerate(schema.get(key, ())):
            yield (key, index), part
    for key in ("additionalProperties", "items"):
        if key in schema:
            yield (key,), schema[key]


def _put(schema: dict[str, Any], where: tuple[Any, ...], part: Schema) -> None:
    if len(where) == 1:
        schema[where[0]] = part
        return
    key, name = where
    schema[key] = schema[key].copy()
    schema[key][name] = part


def as_object(schema: Schema) -> Mapping[str, Any]:
    """A schema that is written, which is an object or True, as an object."""
    return schema if isinstance(schema, Mapping) else {}
