"""Objects and arrays of JSON schemas: names and items, and how many, in keywords the library has."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from specinfer.grammar.ecma_regex import UnreadableError, read_ecma
from specinfer.grammar.schemas.document import TYPES, Schema, escaped_key
from specinfer.grammar.schemas.negation import values_of

if TYPE_CHECKING:
    from specinfer.grammar.schemas.held import SchemaHolder

_MOST_SUBSETS: Final = 4  # optional properties, of which every set may be there
_MOST_SINGLE: Final = 16  # optional properties, of which one has to be there
_DEEPEST: Final = 8
_SAID: Final = (
    *("properties", "patternProperties", "additionalProperties", "required", "minProperties"),
    *("maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
)
OBJECT_KEYWORDS: Final = frozenset(_SAID)
_MOST_DISTINCT: Final = 4  # values of which all lists without a value twice are written out: 65
_MOST_PLACES: Final = 16  # where the one item may stand that has to be in the array
_SAID_OF_ARRAYS: Final = (
    *("prefixItems", "items", "minItems", "maxItems", "uniqueItems", "contains", "minContains"),
    *("maxContains", "unevaluatedItems"),
)
ARRAY_KEYWORDS: Final = frozenset(_SAID_OF_ARRAYS)


def hold_object(node: Mapping[str, Any], out: dict[str, Any], at: str, holder: SchemaHolder) -> None:
    """Put what `node` says of objects into `out`, in keywords the library has, and leave out the rest."""
    said = {key: node[key] for key in node if key in OBJECT_KEYWORDS}
    _close(node, said, at, holder)
    properties: Mapping[str, Schema] = said.get("properties", {})
    needed_names = dict.fromkeys(said.get("required", ()))
    others: Schema = said.get("additionalProperties", True)
    given = said.get("patternProperties", {})
    patterns, others = _patterns(given, others, bool(properties), at, holder)
    named = {
        name: holder.hold(one, f"{at}/properties/{escaped_key(name)}") for name, one in properties.items()
    }
    for name, needed in said.get("dependentRequired", {}).items():
        if name in needed_names:
            needed_names |= dict.fromkeys(needed)
    required = list(needed_names)
    if named:
        out["properties"] = named
    if patterns:
        out["patternProperties"] = {
            written: holder.hold(one, f"{at}/patternProperties/{escaped_key(given)}")
            for written, (given, one) in patterns.items()
        }
    if others is not True:
        out["additionalProperties"] = holder.hold(others, f"{at}/additionalProperties")
    if out.get("additionalProperties", True) is not False and (named or patterns):
        holder.has_other_names = True
    if required:
        out["required"] = required
    _names(said.get("propertyNames", True), out, bool(patterns), at, holder)
    _dependents(said, required, out, at, holder)
    _count(said, required, out, at, holder)


def _patterns(
    given: Mapping[str, Schema], others: Schema, described: bool, at: str, holder: SchemaHolder
) -> tuple[dict[str, tuple[str, Schema]], Schema]:
    """The expressions for names that are held, written for the library, and what holds of all other names.

    Names that an expression is meant for and that is not held count as other names, and may be as it says.
    """
    held: dict[str, tuple[str, Schema]] = {}
    for pattern, one in given.items():
        try:
            read = read_ecma(pattern)
        except UnreadableError:
            read = None
        finite = others is False and described and _is_finite(pattern)
        if read is not None and not read.left_out and len(read.parts) == 1 and not finite:
            [written] = read.parts
            together = dict.fromkeys([*held, written], True)
            if written not in held and not holder.refuses({"type": "object", "patternProperties": together}):
                held[written] = (pattern, one)
                continue
        holder.leave_out("patternProperties", f"{at}/patternProperties/{escaped_key(pattern)}")
        if others is not True:
            others = one if others is False else {"anyOf": [others, one]}
    return held, others


def _is_finite(pattern: str | None) -> bool:
    """Whether an expression may match but a few names, as it repeats nothing endlessly.

    Where all of them are described, the library would write a comma for one more, with nothing behind it.
    """
    whole = pattern is not None and pattern.startswith("^") and pattern.endswith("$")
    return whole and not re.search(r"[*+]|\{\d*,\}|\[\^|\.", pattern or "")


def _names(given: Schema, out: dict[str, Any], has_patterns: bool, at: str, holder: SchemaHolder) -> None:
    """What `propertyNames` says, as an expression that every name matches."""
    if given is True:
        return
    if given is False:
        out["maxProperties"] = 0
        return
    node = holder.document.node(given, f"{at}/propertyNames")
    for _ in range(_DEEPEST):
        found = holder.document.target(node["$ref"]) if set(node) == {"$ref"} else None
        if found is None or isinstance(found[0], bool):
            break
        node = holder.document.node(*found)
    said = [key for key in node if key != "type" or node[key] != "string"]
    values = values_of(node)
    pattern = None
    if not said:
        return
    described = out.get("properties", {})
    texts = None if values is None else [value for value in values if isinstance(value, str)]
    own = {*described, *out.get("required", ())}
    if texts is not None and len(said) == 1 and not has_patterns and own.issuperset(texts):
        # No other name is left. The library would write a comma for one, with nothing behind it.
        others = out.get("additionalProperties", True)
        named = {name: one if name in texts else False for name, one in described.items()}
        out["properties"] = {**named, **{one: others for one in texts if one not in described}}
        out["additionalProperties"] = False
        return
    if values is not None and len(said) == 1:
        pattern = "|".join(re.escape(value) for value in values if isinstance(value, str))
        pattern = f"^(?:{pattern})$" if pattern else "[]"
    elif said == ["pattern"]:
        pattern = node["pattern"]
    elif set(said) <= {"minLength", "maxLength"}:
        pattern = f"^[^]{{{node.get('minLength', 0)},{node.get('maxLength', '')}}}$"
    try:
        read = None if pattern is None or has_patterns else read_ecma(pattern)
    except UnreadableError:
        read = None
    none_left = bool(described) and texts is None and _is_finite(pattern)
    if read is None or read.left_out or len(read.parts) > 1 or none_left:
        holder.leave_out("propertyNames", at)
        return
    only: dict[str, Any] = {"patternProperties": {read.parts[0]: True}, "additionalProperties": False}
    if holder.refuses(only):
        holder.leave_out("propertyNames", at)
        return
    holder.also(out, only)


def _dependents(
    said: Mapping[str, Any], required: list[str], out: dict[str, Any], at: str, holder: SchemaHolder
) -> None:
    """Each as two alternatives: the property is absent, or what depends on it holds."""
    for name, needed in said.get("dependentRequired", {}).items():
        if set(needed) <= set(required):
            continue
        options: list[Schema] = [{"properties": {name: False}}, {"required": list(needed)}]
        holder.one_of_these(out, options, "dependentRequired", at)
    for name, one in said.get("dependentSchemas", {}).items():
        absent: Schema = {"properties": {name: False}}
        is_there = name in required and out.get("type") == "object"
        options = [one] if is_there else [absent, one]
        holder.one_of_these(out, options, "dependentSchemas", at)


def _count(
    said: Mapping[str, Any], required: list[str], out: dict[str, Any], at: str, holder: SchemaHolder
) -> None:
    """How many properties there are.

    The library counts where all that have names of their own are required; sets of the optional ones are
    written out where they are few. It does not see that a name is there twice.
    """
    named = out.get("properties", {})
    optional = [name for name, one in named.items() if name not in required and one is not False]
    least, most = said.get("minProperties", 0), said.get("maxProperties")
    is_open = bool(out.get("patternProperties")) or out.get("additionalProperties", True) is not False
    if least <= len(required):
        least = 0
    if most is not None and not is_open and most >= len(required) + len(optional):
        most = None
    if least - len(required) > 1 and is_open:
        holder.leave_out("minProperties", at)
    if not least and most is None:
        return
    counted = {"minProperties": least} if least else {}
    counted |= {} if most is None else {"maxProperties": most}
    if not optional:
        out |= counted | ({"maxProperties": 0} if out.get("maxProperties") == 0 else {})
        return
    options: list[dict[str, Any]] = []
    if most is None and least == len(required) + 1 and len(optional) <= _MOST_SINGLE:
        options = [{"required": [name]} for name in optional]
        options.append({"properties": dict.fromkeys(optional, False), **counted})
    elif len(optional) <= _MOST_SUBSETS:
        for size in range(len(optional) + 1):
            for chosen in itertools.combinations(optional, size):
                absent = dict.fromkeys([name for name in optional if name not in chosen], False)
                options.append({"required": list(chosen), "properties": absent, **counted})
    if not options or not holder.fits(out, options):
        for key in counted:
            holder.leave_out(key, at)
        return
    holder.also(out, {"anyOf": options})


@dataclass
class _Evaluated:
    """The properties that keywords of an object have looked at."""

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    all: bool = False
    certain: bool = True


def _close(node: Mapping[str, Any], said: dict[str, Any], at: str, holder: SchemaHolder) -> None:
    """Put `unevaluatedProperties` as `additionalProperties` beside the names that all keywords look at."""
    rest = said.pop("unevaluatedProperties", True)
    if rest is True or "additionalProperties" in said:
        return
    found = _Evaluated()
    _evaluate(node, found, holder, 0)
    if not found.certain:
        holder.leave_out("unevaluatedProperties", at)
    if found.all:
        return
    said["properties"] = dict.fromkeys(found.names, True) | dict(said.get("properties", {}))
    if found.patterns:
        said["patternProperties"] = dict.fromkeys(found.patterns, True) | said.get("patternProperties", {})
    said["additionalProperties"] = rest


def _evaluate(node: Mapping[str, Any], found: _Evaluated, holder: SchemaHolder, depth: int) -> None:
    found.names |= dict.fromkeys(node.get("properties", ()))
    found.patterns |= dict.fromkeys(node.get("patternProperties", ()))
    found.all |= depth > 0 and ("additionalProperties" in node or node.get("unevaluatedProperties") is True)
    branches = [(one, True) for one in node.get("allOf", ())]
    for key in ("anyOf", "oneOf"):
        branches += [(one, False) for one in node.get(key, ())]
    branches += [(node[key], False) for key in ("if", "then", "else") if key in node]
    branches += [(one, False) for one in node.get("dependentSchemas", {}).values()]
    if "$ref" in node:
        target = holder.document.target(node["$ref"])
        branches.append((True if target is None else target[0], target is not None))
    for one, always in branches:
        if isinstance(one, bool):
            continue
        if depth > _DEEPEST:
            found.all, found.certain = True, False
            return
        inner = holder.document.node(one, "")
        if inner.keys() & {*OBJECT_KEYWORDS, "allOf", "anyOf", "oneOf", "$ref", "if"} - {"required"}:
            found.certain &= always
            _evaluate(inner, found, holder, depth + 1)


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
