"""Objects and arrays in JSON schemas: names, items and counts, rewritten in supported keywords."""

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
    from specinfer.grammar.schemas.rewriter import SchemaRewriter

_MAX_SUBSETS: Final = 4  # optional properties whose subsets are all listed
_MAX_SINGLE: Final = 16  # optional properties if at least one is required
_MAX_DEPTH: Final = 8
_OBJECT_KEYWORDS: Final = (
    *("properties", "patternProperties", "additionalProperties", "required", "minProperties"),
    *("maxProperties", "propertyNames", "dependentRequired", "dependentSchemas", "unevaluatedProperties"),
)
OBJECT_KEYWORDS: Final = frozenset(_OBJECT_KEYWORDS)
_MAX_DISTINCT: Final = 4  # values for which all lists without duplicates are listed: 65
_MAX_POSITIONS: Final = 16  # positions of the required item
_ARRAY_KEYWORDS: Final = (
    *("prefixItems", "items", "minItems", "maxItems", "uniqueItems", "contains", "minContains"),
    *("maxContains", "unevaluatedItems"),
)
ARRAY_KEYWORDS: Final = frozenset(_ARRAY_KEYWORDS)


def rewrite_object(node: Mapping[str, Any], out: dict[str, Any], at: str, rewriter: SchemaRewriter) -> None:
    """Write the constraints on objects into `out`, in supported keywords, and drop the rest."""
    rules = {key: node[key] for key in node if key in OBJECT_KEYWORDS}
    _close(node, rules, at, rewriter)
    properties: Mapping[str, Schema] = rules.get("properties", {})
    needed_names = dict.fromkeys(rules.get("required", ()))
    others: Schema = rules.get("additionalProperties", True)
    given = rules.get("patternProperties", {})
    patterns, others = _patterns(given, others, bool(properties), at, rewriter)
    named = {
        name: rewriter.rewrite(one, f"{at}/properties/{escaped_key(name)}")
        for name, one in properties.items()
    }
    for name, needed in rules.get("dependentRequired", {}).items():
        if name in needed_names:
            needed_names |= dict.fromkeys(needed)
    required = list(needed_names)
    if named:
        out["properties"] = named
    if patterns:
        out["patternProperties"] = {
            written: rewriter.rewrite(one, f"{at}/patternProperties/{escaped_key(given)}")
            for written, (given, one) in patterns.items()
        }
    if others is not True:
        out["additionalProperties"] = rewriter.rewrite(others, f"{at}/additionalProperties")
    if out.get("additionalProperties", True) is not False and (named or patterns):
        rewriter.has_other_names = True
    if required:
        out["required"] = required
    _names(rules.get("propertyNames", True), out, bool(patterns), at, rewriter)
    _dependents(rules, required, out, at, rewriter)
    _count(rules, required, out, at, rewriter)


def _patterns(
    given: Mapping[str, Schema], others: Schema, described: bool, at: str, rewriter: SchemaRewriter
) -> tuple[dict[str, tuple[str, Schema]], Schema]:
    """The enforced name patterns, written for the library, and the schema of all other names.

    Names of a dropped pattern count as other names, and may satisfy its schema instead.
    """
    enforced: dict[str, tuple[str, Schema]] = {}
    for pattern, one in given.items():
        try:
            read = read_ecma(pattern)
        except UnreadableError:
            read = None
        finite = others is False and described and _is_finite(pattern)
        if read is not None and not read.left_out and len(read.parts) == 1 and not finite:
            [written] = read.parts
            together = dict.fromkeys([*enforced, written], True)
            if written not in enforced and not rewriter.refuses(
                {"type": "object", "patternProperties": together}
            ):
                enforced[written] = (pattern, one)
                continue
        rewriter.leave_out("patternProperties", f"{at}/patternProperties/{escaped_key(pattern)}")
        if others is not True:
            others = one if others is False else {"anyOf": [others, one]}
    return enforced, others


def _is_finite(pattern: str | None) -> bool:
    """True if an expression may match only finitely many names, since it has no unbounded repeat.

    If all of them are described, the library would write a comma for one more, with nothing after it.
    """
    whole = pattern is not None and pattern.startswith("^") and pattern.endswith("$")
    return whole and not re.search(r"[*+]|\{\d*,\}|\[\^|\.", pattern or "")


def _names(given: Schema, out: dict[str, Any], has_patterns: bool, at: str, rewriter: SchemaRewriter) -> None:
    """Enforce `propertyNames` as an expression that every name matches."""
    if given is True:
        return
    if given is False:
        out["maxProperties"] = 0
        return
    node = rewriter.document.node(given, f"{at}/propertyNames")
    for _ in range(_MAX_DEPTH):
        found = rewriter.document.target(node["$ref"]) if set(node) == {"$ref"} else None
        if found is None or isinstance(found[0], bool):
            break
        node = rewriter.document.node(*found)
    rules = [key for key in node if key != "type" or node[key] != "string"]
    values = values_of(node)
    pattern = None
    if not rules:
        return
    described = out.get("properties", {})
    texts = None if values is None else [value for value in values if isinstance(value, str)]
    own = {*described, *out.get("required", ())}
    if texts is not None and len(rules) == 1 and not has_patterns and own.issuperset(texts):
        # No other name is possible. The library would write a comma for one, with nothing after it.
        others = out.get("additionalProperties", True)
        named = {name: one if name in texts else False for name, one in described.items()}
        out["properties"] = {**named, **{one: others for one in texts if one not in described}}
        out["additionalProperties"] = False
        return
    if values is not None and len(rules) == 1:
        pattern = "|".join(re.escape(value) for value in values if isinstance(value, str))
        pattern = f"^(?:{pattern})$" if pattern else "[]"
    elif rules == ["pattern"]:
        pattern = node["pattern"]
    elif set(rules) <= {"minLength", "maxLength"}:
        pattern = f"^[^]{{{node.get('minLength', 0)},{node.get('maxLength', '')}}}$"
    try:
        read = None if pattern is None or has_patterns else read_ecma(pattern)
    except UnreadableError:
        read = None
    none_left = bool(described) and texts is None and _is_finite(pattern)
    if read is None or read.left_out or len(read.parts) > 1 or none_left:
        rewriter.leave_out("propertyNames", at)
        return
    only: dict[str, Any] = {"patternProperties": {read.parts[0]: True}, "additionalProperties": False}
    if rewriter.refuses(only):
        rewriter.leave_out("propertyNames", at)
        return
    rewriter.also(out, only)


def _dependents(
    rules: Mapping[str, Any], required: list[str], out: dict[str, Any], at: str, rewriter: SchemaRewriter
) -> None:
    """Rewrite each as two alternatives: the property is absent, or the dependency holds."""
    for name, needed in rules.get("dependentRequired", {}).items():
        if set(needed) <= set(required):
            continue
        options: list[Schema] = [{"properties": {name: False}}, {"required": list(needed)}]
        rewriter.one_of_these(out, options, "dependentRequired", at)
    for name, one in rules.get("dependentSchemas", {}).items():
        absent: Schema = {"properties": {name: False}}
        is_there = name in required and out.get("type") == "object"
        options = [one] if is_there else [absent, one]
        rewriter.one_of_these(out, options, "dependentSchemas", at)


def _count(
    rules: Mapping[str, Any], required: list[str], out: dict[str, Any], at: str, rewriter: SchemaRewriter
) -> None:
    """Enforce the number of properties.

    The library counts properties if all described ones are required; small sets of optional ones are listed.
    It does not detect duplicate names.
    """
    named = out.get("properties", {})
    optional = [name for name, one in named.items() if name not in required and one is not False]
    low, high = rules.get("minProperties", 0), rules.get("maxProperties")
    is_open = bool(out.get("patternProperties")) or out.get("additionalProperties", True) is not False
    if low <= len(required):
        low = 0
    if high is not None and not is_open and high >= len(required) + len(optional):
        high = None
    if low - len(required) > 1 and is_open:
        rewriter.leave_out("minProperties", at)
    if not low and high is None:
        return
    counted = {"minProperties": low} if low else {}
    counted |= {} if high is None else {"maxProperties": high}
    if not optional:
        out |= counted | ({"maxProperties": 0} if out.get("maxProperties") == 0 else {})
        return
    options: list[dict[str, Any]] = []
    if high is None and low == len(required) + 1 and len(optional) <= _MAX_SINGLE:
        options = [{"required": [name]} for name in optional]
        options.append({"properties": dict.fromkeys(optional, False), **counted})
    elif len(optional) <= _MAX_SUBSETS:
        for size in range(len(optional) + 1):
            for chosen in itertools.combinations(optional, size):
                absent = dict.fromkeys([name for name in optional if name not in chosen], False)
                options.append({"required": list(chosen), "properties": absent, **counted})
    if not options or not rewriter.fits(out, options):
        for key in counted:
            rewriter.leave_out(key, at)
        return
    rewriter.also(out, {"anyOf": options})


@dataclass
class _Evaluated:
    """The properties that keywords of an object evaluate."""

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    all: bool = False
    certain: bool = True


def _close(node: Mapping[str, Any], rules: dict[str, Any], at: str, rewriter: SchemaRewriter) -> None:
    """Rewrite `unevaluatedProperties` as `additionalProperties`, with all evaluated names described."""
    rest = rules.pop("unevaluatedProperties", True)
    if rest is True or "additionalProperties" in rules:
        return
    found = _Evaluated()
    _evaluate(node, found, rewriter, 0)
    if not found.certain:
        rewriter.leave_out("unevaluatedProperties", at)
    if found.all:
        return
    rules["properties"] = dict.fromkeys(found.names, True) | dict(rules.get("properties", {}))
    if found.patterns:
        rules["patternProperties"] = dict.fromkeys(found.patterns, True) | rules.get("patternProperties", {})
    rules["additionalProperties"] = rest


def _evaluate(node: Mapping[str, Any], found: _Evaluated, rewriter: SchemaRewriter, depth: int) -> None:
    found.names |= dict.fromkeys(node.get("properties", ()))
    found.patterns |= dict.fromkeys(node.get("patternProperties", ()))
    found.all |= depth > 0 and ("additionalProperties" in node or node.get("unevaluatedProperties") is True)
    branches = [(one, True) for one in node.get("allOf", ())]
    for key in ("anyOf", "oneOf"):
        branches += [(one, False) for one in node.get(key, ())]
    branches += [(node[key], False) for key in ("if", "then", "else") if key in node]
    branches += [(one, False) for one in node.get("dependentSchemas", {}).values()]
    if "$ref" in node:
        target = rewriter.document.target(node["$ref"])
        branches.append((True if target is None else target[0], target is not None))
    for one, always in branches:
        if isinstance(one, bool):
            continue
        if depth > _MAX_DEPTH:
            found.all, found.certain = True, False
            return
        inner = rewriter.document.node(one, "")
        if inner.keys() & {*OBJECT_KEYWORDS, "allOf", "anyOf", "oneOf", "$ref", "if"} - {"required"}:
            found.certain &= always
            _evaluate(inner, found, rewriter, depth + 1)


def rewrite_array(node: Mapping[str, Any], out: dict[str, Any], at: str, rewriter: SchemaRewriter) -> None:
    """Write the constraints on arrays into `out`, in supported keywords, and drop the rest."""
    prefix: Sequence[Schema] = node.get("prefixItems", ())
    items: Schema = node.get("items", True)
    if "unevaluatedItems" in node and "items" not in node and node["unevaluatedItems"] is not True:
        if node.keys() & {"allOf", "anyOf", "oneOf", "$ref", "if", "contains", "dependentSchemas"}:
            rewriter.leave_out("unevaluatedItems", at)
        else:
            items = node["unevaluatedItems"]
    if prefix:
        out["prefixItems"] = [
            rewriter.rewrite(one, f"{at}/prefixItems/{index}") for index, one in enumerate(prefix)
        ]
    if items is not True:
        out["items"] = rewriter.rewrite(items, f"{at}/items")
    low, high = node.get("minItems", 0), node.get("maxItems")
    if items is False and (high is None or high > len(prefix)):
        high = len(prefix)
    low = max(low, _rewrite_contains(node, high, out, at, rewriter))
    if low:
        out["minItems"] = low
    if high is not None:
        out["maxItems"] = high
    if node.get("uniqueItems") and (high is None or high > 1):
        _rewrite_unique(items if not prefix else True, low, high, out, at, rewriter)


def _rewrite_contains(
    node: Mapping[str, Any], high: int | None, out: dict[str, Any], at: str, rewriter: SchemaRewriter
) -> int:
    """Enforce `contains` if the array is short; return the minimum number of items that it implies."""
    item = node.get("contains")
    low, limit = node.get("minContains", 1), node.get("maxContains")
    if item is None or (not low and limit is None):
        return 0
    if item is True and limit is None:
        return int(low)
    if high is not None and low > high:
        return int(low)  # unsatisfiable
    if low == 1 and limit is None and high is not None and high <= _MAX_POSITIONS:
        options: list[Schema] = [
            {"prefixItems": [*[True] * index, item], "minItems": index + 1} for index in range(high)
        ]
        rewriter.one_of_these(out, options, "contains", at)
    else:
        rewriter.leave_out("contains", at)
    return int(low)


def _rewrite_unique(
    items: Schema, low: int, high: int | None, out: dict[str, Any], at: str, rewriter: SchemaRewriter
) -> None:
    """Enforce `uniqueItems` if the items have few values, as the list of all arrays without duplicates."""
    found = None
    if isinstance(items, Mapping):
        node = rewriter.document.node(items, f"{at}/items")
        if set(node) <= {"type", "enum", "const"}:
            found = [True, False] if node == {"type": "boolean"} else values_of(node)
    if found is None or ("type" in node and node["type"] != "string" and found != [True, False]):
        rewriter.leave_out("uniqueItems", at)
        return
    values = [value for index, value in enumerate(found) if value not in found[:index]]
    if len(values) > _MAX_DISTINCT or not all(isinstance(value, str | bool) for value in values):
        rewriter.leave_out("uniqueItems", at)
        return
    if node.get("type") == "string":
        values = [value for value in values if isinstance(value, str)]
    longest = min(len(values), len(values) if high is None else high)
    lists = [list(one) for size in range(low, longest + 1) for one in itertools.permutations(values, size)]
    out.pop("items", None)
    if out.get("type") == "array":
        rewriter.also(out, {"enum": lists})
    else:
        rewriter.also(
            out, {"anyOf": [{"enum": lists}, {"type": [name for name in TYPES if name != "array"]}]}
        )
