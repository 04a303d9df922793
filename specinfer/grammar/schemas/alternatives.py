"""Alternatives in JSON schemas: rewrites `oneOf` and conditions as `anyOf`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from specinfer.grammar.schemas.document import Schema, SchemaDocument
from specinfer.grammar.schemas.negation import are_disjoint, negated

if TYPE_CHECKING:
    from specinfer.grammar.schemas.rewriter import SchemaRewriter

MAX_BRANCHES: Final = 256  # product of the alternatives of one schema


def rewrite_one_of(options: Sequence[Schema], out: dict[str, Any], at: str, rewriter: SchemaRewriter) -> None:
    """Enforce that exactly one option holds; options that exclude each other need no negation."""
    exclusive: list[Schema] = []
    for index, one in enumerate(options):
        parts: list[Schema] = [one]
        for another in [*options[:index], *options[index + 1 :]]:
            if are_disjoint(one, another, rewriter.document):
                continue
            refused = negated(another, rewriter.document)
            if refused is None:
                rewriter.leave_out("oneOf", at)
                exclusive = list(options)
                break
            parts.append(refused)
        else:
            exclusive.append(one if len(parts) == 1 else {"allOf": parts})
            continue
        break
    _rewrite_options(exclusive, options, out, at, rewriter)


def _rewrite_options(
    exclusive: Sequence[Schema],
    given: Sequence[Schema],
    out: dict[str, Any],
    at: str,
    rewriter: SchemaRewriter,
) -> None:
    rewritten = [rewriter.rewrite(one, f"{at}/oneOf/{index}") for index, one in enumerate(exclusive)]
    if list(exclusive) != list(given) and branches(out) * sum(map(branches, rewritten)) > MAX_BRANCHES:
        rewriter.leave_out("oneOf", at)
        rewritten = [rewriter.rewrite(one, f"{at}/oneOf/{index}") for index, one in enumerate(given)]
    if True not in rewritten:
        rewriter.also(out, {"anyOf": rewritten})


def rewrite_condition(
    node: Mapping[str, Any], out: dict[str, Any], at: str, rewriter: SchemaRewriter
) -> None:
    """Enforce `if` as alternatives: the condition and `then`, or its negation and `else`."""
    condition, then, otherwise = node["if"], node.get("then", True), node.get("else", True)
    if then is True and otherwise is True:
        return
    refused = negated(condition, rewriter.document)
    if refused is None:
        rewriter.leave_out("if", at)
        refused = True
    yes: Schema = {"allOf": [condition, then]}
    no = [option if otherwise is True else {"allOf": [option, otherwise]} for option in options_of(refused)]
    rewriter.one_of_these(out, [yes, *no], "if", at)


def merged_conditions(
    parts: Sequence[Schema], node: Mapping[str, Any], document: SchemaDocument
) -> list[Schema]:
    """The parts of the `allOf` of `node`; conditions that exclude each other become one choice.

    Each condition alone is a choice of two, so ten of them are a choice of a thousand. At most one
    condition on the value of one required property holds.
    """
    chains: dict[str, dict[int, list[Any]]] = {}  # by property name: the values of each case
    for index, part in enumerate(parts if node.get("type") == "object" else ()):
        found = _case(part, node.get("required", ()))
        if found is not None:
            chain = chains.setdefault(found[0], {})
            if not {value for values in chain.values() for value in values} & set(found[1]):
                chain[index] = found[1]
    merged: dict[int, Schema | None] = {}
    for name, chain in chains.items():
        named = [value for values in chain.values() for value in values]
        refused = negated({"properties": {name: {"enum": named}}, "required": [name]}, document)
        if len(chain) > 1 and refused is not None:
            cases = [one for one in map(parts.__getitem__, chain) if isinstance(one, Mapping)]
            either = [{"allOf": [case["if"], case["then"]]} for case in cases]
            merged |= dict.fromkeys(chain)
            merged[next(iter(chain))] = {"anyOf": [*either, *options_of(refused)]}
    written = [merged.get(index, part) for index, part in enumerate(parts)]
    return [part for part in written if part is not None]


def _case(part: Schema, required: Collection[str]) -> tuple[str, list[str]] | None:
    """The required property that a condition tests, and the accepted texts; None for other conditions."""
    if not isinstance(part, Mapping) or set(part) != {"if", "then"} or not isinstance(part["if"], Mapping):
        return None
    condition = part["if"]
    properties = condition.get("properties")
    if not isinstance(properties, Mapping) or len(properties) != 1:
        return None
    [(name, one)] = properties.items()
    needed = condition.get("required", [name] if name in required else None)
    if not set(condition) <= {"properties", "required"} or needed != [name] or not isinstance(one, Mapping):
        return None
    values = one["enum"] if set(one) == {"enum"} else [one["const"]] if set(one) == {"const"} else None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return None
    return name, values


def options_of(schema: Schema) -> list[Schema]:
    """The options of a schema that consists of `anyOf` alone, or the schema itself."""
    if isinstance(schema, Mapping) and set(schema) == {"anyOf"}:
        return list(schema["anyOf"])
    return [schema]


def branches(schema: Schema) -> int:
    """The number of alternatives that the library makes of a rewritten schema."""
    if isinstance(schema, bool):
        return 1
    found = sum(map(branches, schema.get("anyOf", ()))) or 1
    for part in schema.get("allOf", ()):
        found *= branches(part)
    return found
