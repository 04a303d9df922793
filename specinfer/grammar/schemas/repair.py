"""Removes parts that the library rejects from a schema whose keywords it supports, by trial.

The library may support each keyword and reject the combination: two name patterns that may overlap after
schemas are merged, or a reference to an enclosing schema with further keywords beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from specinfer.errors import RequestError
from specinfer.grammar.schemas.document import Schema, escaped_key

_MAX_TRIALS: Final = 300
# Order in which keywords are dropped; related keywords are dropped together.
_DROP_ORDER: Final = (
    *(
        ("pattern",),
        ("format",),
        ("multipleOf",),
        ("minProperties", "maxProperties"),
        ("minItems", "maxItems"),
    ),
    *(("patternProperties", "additionalProperties"), ("allOf",), ("anyOf",), ("$ref",)),
)
# the library's message that no text satisfies a schema; not an error here
UNMET: Final = "Unsatisfiable schema"


class Repair:
    """Drops the parts of rewritten schemas that the library rejects.

    `fault` returns the library's error for a schema; `leave_out` is called with each dropped keyword and its
    JSON pointer.
    """

    def __init__(
        self, fault: Callable[[Mapping[str, Any]], str], leave_out: Callable[[str, str], None]
    ) -> None:
        self._fault = fault
        self._leave_out = leave_out
        self._definitions: dict[str, Schema] = {}
        self._trials = 0

    def whole(self, schema: Mapping[str, Any], pointers: Mapping[str, str]) -> Schema:
        """Repair a schema with definitions at `pointers`; raises RequestError after too many trials."""
        self._definitions = dict(schema.get("$defs", {}))
        for name in list(self._definitions):
            if self._refused({"$ref": f"#/$defs/{name}"}):
                self._definitions[name] = as_object(self._repaired(self._definitions[name], pointers[name]))
        root = {key: value for key, value in schema.items() if key != "$defs"}
        repaired = self._repaired(root, "")
        return repaired if isinstance(repaired, bool) else {**repaired, "$defs": self._definitions}

    def _refused(self, schema: Schema) -> bool:
        if isinstance(schema, bool):
            return False
        self._trials += 1
        if self._trials > _MAX_TRIALS:
            raise RequestError("it has too many parts that cannot be enforced; make it smaller")
        error = self._fault({**schema, "$defs": self._definitions})
        return bool(error) and UNMET not in error

    def _repaired(self, schema: Schema, at: str) -> Schema:
        if isinstance(schema, bool) or not self._refused(schema):
            return schema
        repaired = dict(schema)
        for where, part in _parts(schema):
            _put(repaired, where, self._repaired(part, "/".join([at, *map(escaped_key, map(str, where))])))
        for keys in _DROP_ORDER:
            if keys == ("allOf",):
                while len(repaired.get("allOf", ())) > 1 and self._refused(repaired):
                    repaired["allOf"] = repaired["allOf"][:-1]
                    self._leave_out("allOf", f"{at}/allOf/{len(repaired['allOf'])}")
            if not self._refused(repaired):
                return repaired
            dropped = [key for key in keys if key in repaired]
            if dropped:
                repaired = {key: value for key, value in repaired.items() if key not in dropped}
                for key in dropped:
                    self._leave_out(key, at)
        if not self._refused(repaired):
            return repaired
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
    """A rewritten schema as an object; True becomes {}."""
    return schema if isinstance(schema, Mapping) else {}
