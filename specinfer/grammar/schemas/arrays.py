"""Arrays of JSON schemas, in keywords the library has."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from specinfer.grammar.schemas.disjoint import values_of
from specinfer.grammar.schemas.document import TYPES, Schema

if TYPE_CHECKING:
    from specinfer.grammar.schemas.held import SchemaHolder

_MOST_DISTINCT: Final = 4  # values of which all lists without a value twice are written out: 65
_MOST_PLACES: Final = 16  # where the one item may stand that has to be in the array
_SAID: Final = (
    *("prefixItems", "items", "minItems", "maxItems", "uniqueItems", "contains", "minContains"),
    *("maxContains", "unevaluatedItems"),
)
ARRAY_KEYWORDS: Final = frozenset(_SAID)


def hold_array(node: Mapping[str, Any], out: dict[str, Any], at: str, holder: SchemaHolder) -> None:
    """Put what `node` says of arrays into `out`, in keywords the library has, and leave out the rest."""
    prefix: Sequence[Schema] = node.get("prefixItems", ())
    items: Schema = node.get("items", True)
    if "unevaluatedItems" in node and "items" not in node and node["unevaluatedItems"] is not True:
        if node.keys() & {"allOf", "anyOf", "oneOf", "$ref", "if", "contains", "dependentSchemas"}:
            holder.leave_out("unevaluatedItems", at)
        else:
            items = node["unevaluatedItems"]
    if prefix:
        out["prefixItems"] = [
            holder.hold(one, f"{at}/prefixItems/{index}") for index, one in enumerate(prefix)
        ]
    if items is not True:
        out["items"] = holder.hold(items, f"{at}/items")
    least, most = node.get("minItems", 0), node.get("maxItems")
    if items is False and (most is None or most > len(prefix)):
        most = len(prefix)
    least = max(least, _hold_contains(node, most, out, at, holder))
    if least:
        out["minItems"] = least
    if most is not None:
        out["maxItems"] = most
    if node.get("uniqueItems") and (most is None or most > 1):
        _hold_unique(items if not prefix else True, least, most, out, at, holder)


def _hold_contains(
    node: Mapping[str, Any], most: int | None, out: dict[str, Any], at: str, holder: SchemaHolder
) -> int:
    """Hold `contains` where the array is short; the least number of items that it needs in any case."""
    wanted = node.get("contains")
    least, limit = node.get("minContains", 1), node.get("maxContains")
    if wanted is None or (not least and limit is None):
        return 0
    if wanted is True and limit is None:
        return int(least)
    if most is not None and least > most:
        return int(least)  # which no array has
    if least == 1 and limit is None and most is not None and most <= _MOST_PLACES:
        options: list[Schema] = [
            {"prefixItems": [*[True] * index, wanted], "minItems": index + 1} for index in range(most)
        ]
        holder.one_of_these(out, options, "contains", at)
    else:
        holder.leave_out("contains", at)
    return int(least)


def _hold_unique(
    items: Schema, least: int, most: int | None, out: dict[str, Any], at: str, holder: SchemaHolder
) -> None:
    """Hold `uniqueItems` where the items are a few values: as all lists of them without one twice."""
    found = None
    if isinstance(items, Mapping):
        node = holder.document.node(items, f"{at}/items")
        if set(node) <= {"type", "enum", "const"}:
            found = [True, False] if node == {"type": "boolean"} else values_of(node)
    if found is None or ("type" in node and node["type"] != "string" and found != [True, False]):
        holder.leave_out("uniqueItems", at)
        return
    values = [value for index, value in enumerate(found) if value not in found[:index]]
    if len(values) > _MOST_DISTINCT or not all(isinstance(value, str | bool) for value in values):
        holder.leave_out("uniqueItems", at)
        return
    if node.get("type") == "string":
        values = [value for value in values if isinstance(value, str)]
    longest = min(len(values), len(values) if most is None else most)
    lists = [list(one) for size in range(least, longest + 1) for one in itertools.permutations(values, size)]
    out.pop("items", None)
    if out.get("type") == "array":
        holder.also(out, {"enum": lists})
    else:
        holder.also(out, {"anyOf": [{"enum": lists}, {"type": [name for name in TYPES if name != "array"]}]})
