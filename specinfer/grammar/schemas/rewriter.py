"""Rewrites a JSON schema as one that the library can enforce, and lists the parts that are dropped.

The library (llguidance) supports some keywords. Many others can be expressed with these, exactly: `oneOf` of
schemas that exclude each other is `anyOf`, `if` is two alternatives, and so is `dependentRequired`. Dropped
parts are always restrictions, so every text of the schema is also a text of the rewritten schema. (The order
of properties and the spelling of numbers are the library's own.)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from specinfer.errors import RequestError
from specinfer.grammar.library_vocabulary import fault_of, in_one_line, without_positions
from specinfer.grammar.schemas.alternatives import (
    MAX_BRANCHES,
    branches,
    merged_conditions,
    options_of,
    rewrite_condition,
    rewrite_one_of,
)
from specinfer.grammar.schemas.document import TYPES, Schema, SchemaDocument, pointer_text
from specinfer.grammar.schemas.negation import negated, types_of
from specinfer.grammar.schemas.objects import ARRAY_KEYWORDS, OBJECT_KEYWORDS, rewrite_array, rewrite_object
from specinfer.grammar.schemas.repair import UNMET, Repair, as_object
from specinfer.grammar.schemas.scalars import (
    NUMBER_KEYWORDS,
    TEXT_KEYWORDS,
    VALUE_KEYWORDS,
    rewrite_numbers,
    rewrite_texts,
    rewrite_values,
)

_LOG = logging.getLogger(__name__)
_MAX_NODES: Final = 20_000  # rewritten schemas; a schema that is written twice counts twice
_MAX_TRIALS: Final = 300  # tested parts
_MAX_DEFINITIONS: Final = 300  # definitions; each is compiled with all others
_MAX_FOLLOWED: Final = 500_000
_MAX_CACHED_SOURCE: Final = 16 * 1024  # characters; results for longer schemas are not cached
_MAX_SHOWN: Final = 8  # dropped parts in a log line
_MAX_POINTER: Final = 80  # characters of a JSON pointer in a log line
_FAMILIES: Final = (
    ("object", OBJECT_KEYWORDS, rewrite_object),
    ("array", ARRAY_KEYWORDS, rewrite_array),
    ("string", TEXT_KEYWORDS, rewrite_texts),
    ("number", NUMBER_KEYWORDS, rewrite_numbers),
)


@dataclass(frozen=True, slots=True)
class EnforcedSchema:
    """The enforced part of a schema: `source` is JSON, `left_out` lists dropped keywords with their pointers.

    `has_other_names`: objects may have properties that are not described, so a described name must not be
    written in another spelling (an escaped letter).
    """

    source: str
    left_out: tuple[str, ...]
    has_other_names: bool


def enforced_schema(source: str, strict: bool) -> EnforcedSchema:
    """The enforceable part of a schema given as JSON; dropped parts are logged in one line.

    Raises RequestError for a malformed keyword, for a schema that becomes too large, and if `strict` also for
    one that cannot be enforced completely.
    """
    return _cached(source, strict) if len(source) <= _MAX_CACHED_SOURCE else _enforced(source, strict)


@lru_cache(maxsize=256)
def _cached(source: str, strict: bool) -> EnforcedSchema:
    return _enforced(source, strict)


def _enforced(source: str, strict: bool) -> EnforcedSchema:
    root = json.loads(source)
    try:
        rewriter = SchemaRewriter(root, strict)
        written, error = rewriter.whole()
        if error:
            rewriter = SchemaRewriter(root, strict, careful=True)
            written, error = rewriter.whole()
        if error and strict:
            raise RequestError(
                f"it cannot be enforced during generation ({without_positions(in_one_line(error))}); "
                "leave out strict to enforce the rest, or change that part of the schema"
            )
        if error:
            written = rewriter.repaired(written)
    except RecursionError:
        raise RequestError("it is nested too deeply; make it flatter") from None
    left_out = tuple(rewriter.left_out)
    if left_out:
        more = f" and {len(left_out) - _MAX_SHOWN} more" if len(left_out) > _MAX_SHOWN else ""
        _LOG.warning("a schema is enforced without %s%s", ", ".join(left_out[:_MAX_SHOWN]), more)
    return EnforcedSchema(json.dumps(written, ensure_ascii=False), left_out, rewriter.has_other_names)


class SchemaRewriter:
    """Rewrites one schema; `strict` rejects parts that would be dropped.

    `careful` tests each regular expression with the library and drops those it rejects. A test takes about 1
    ms, so this is for schemas that the library rejected as a whole.
    """

    def __init__(self, root: Mapping[str, Any], strict: bool, *, careful: bool = False) -> None:
        self._careful = careful
        self.document = SchemaDocument(root)
        self.strict = strict
        self.left_out: dict[str, None] = {}
        self.has_other_names = False
        self._names: dict[str, str] = {}  # definition names by pointer
        self._definitions: dict[str, Schema] = {}
        self._pending: list[str] = []  # pointers of definitions to be rewritten
        self._writing: str | None = None  # pointer of the definition being rewritten
        self._nodes = 0
        self._followed = 0  # references followed in search of cycles
        self._faults: dict[str, str] = {}  # by rewritten schema

    def whole(self) -> tuple[Mapping[str, Any], str]:
        """The rewritten schema, and the library's error for it, other than that no text satisfies it."""
        written = as_object(self.rewrite(self.document.root, ""))
        while self._pending:  # not recursive: references may form a chain of thousands
            self._writing = pointer = self._pending.pop()
            found = self.document.target(f"#{pointer}")
            assert found is not None
            self._definitions[self._names[pointer]] = as_object(self.rewrite(*found))
        if not self._definitions:
            error = self._error(written)
            return written, "" if UNMET in error else error
        written = {**written, "$defs": self._definitions}
        if UNMET in (error := self._error(written)):
            written = self._without_unmet(written)
            error = self._error(written)
        return written, "" if UNMET in error else error

    def repaired(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema without the parts that the library rejects."""
        pointers = {name: pointer for pointer, name in self._names.items()}
        return as_object(Repair(self._error, self.leave_out).whole(written, pointers))

    def _without_unmet(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """The schema without unsatisfiable definitions, for which the library rejects the whole schema."""
        definitions = written["$defs"]
        if len(definitions) > _MAX_DEFINITIONS:
            raise RequestError(
                f"one of its {len(definitions)} definitions is unsatisfiable; remove it, or make the "
                "schema smaller"
            )
        unmet = {
            f"#/$defs/{name}"
            for name in definitions
            if UNMET in self._error({"$ref": f"#/$defs/{name}", "$defs": definitions})
        }
        replaced: dict[str, Any] = _without(written, unmet)
        return replaced

    def leave_out(self, keyword: str, at: str) -> None:
        """Record that a keyword is not fully enforced; raises RequestError if `strict`."""
        if self.strict:
            raise RequestError(
                f"{keyword} at {pointer_text(at)} cannot be enforced during generation; "
                "leave out strict to enforce the rest, or change that part of the schema"
            )
        where = pointer_text(at)
        self.left_out[
            f"{keyword} at {where if len(where) < _MAX_POINTER else f'{where[:_MAX_POINTER]}...'}"
        ] = None

    def refuses(self, schema: Mapping[str, Any]) -> bool:
        """True if, in careful mode, the library rejects a rewritten part."""
        return self._careful and (len(self._faults) >= _MAX_TRIALS or bool(self._error(schema)))

    def _error(self, schema: Mapping[str, Any]) -> str:
        written = json.dumps(schema)
        if written not in self._faults:
            self._faults[written] = fault_of(f"start: %json {written}")
        return self._faults[written]

    def rewrite(self, schema: Schema, at: str) -> Schema:
        """Rewrite one schema; `at` is its JSON pointer, for messages."""
        if isinstance(schema, bool):
            return schema
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise RequestError(f"it becomes more than {_MAX_NODES} schemas; make it smaller")
        node = self._simplified(self.document.node(schema, at), at)
        types = types_of({"type": node["type"]} if "type" in node else {})
        out: dict[str, Any] = {}
        done: set[str] = set()
        if "type" in node:
            out["type"] = node["type"]
        for key in node:
            family = next((one for one in _FAMILIES if key in one[1]), None)
            if family is not None:
                name, keywords, write = family
                if name in types and not done & keywords:
                    write(node, out, at, self)
            elif key in VALUE_KEYWORDS:
                if not done & VALUE_KEYWORDS:
                    rewrite_values(node, out, at, self)
            else:
                self._rewrite_logic(key, node, out, at)
            done.add(key)
        return out or True

    def also(self, out: dict[str, Any], written: Schema) -> None:
        """Add a rewritten schema that must hold as well."""
        if written is not True:
            out.setdefault("allOf", []).append(written)

    def fits(self, out: Mapping[str, Any], options: Sequence[Schema]) -> bool:
        """True if that many alternatives can be combined with those in `out`."""
        return branches(out) * max(1, len(options)) <= MAX_BRANCHES

    def one_of_these(self, out: dict[str, Any], options: Sequence[Schema], keyword: str, at: str) -> None:
        """Enforce that at least one option holds; `keyword` is reported if there are too many."""
        given = out.get("type")
        known = types_of({"type": given} if given is not None else {})
        kept: list[Schema] = []
        for option in options:
            if isinstance(option, Mapping) and given is not None:
                own = option.get("type")
                if own is not None and not types_of({"type": own}) & known:
                    continue
                option = {"type": given, **option}
            rewritten = self.rewrite(option, at)
            if rewritten is True:
                return
            if rewritten is not False:
                kept.append(rewritten)
        if branches(out) * sum(map(branches, kept)) > MAX_BRANCHES:
            self.leave_out(keyword, at)
            return
        self.also(out, {"anyOf": kept} if len(kept) != 1 else kept[0])
        if not kept:
            out["allOf"][-1] = False

    def _simplified(self, node: dict[str, Any], at: str) -> dict[str, Any]:
        """Drop what the library does not accept beside a recursive reference."""
        if "type" in node and len(node) == 2:
            options = node.get("anyOf") or node.get("oneOf") or ([node] if "$ref" in node else [])
            named = [node["type"]] if isinstance(node["type"], str) else node["type"]
            within = all(self._types(option) <= types_of(node) for option in options)
            if options and within and "integer" not in named:
                del node["type"]
        target = self.document.target(node["$ref"]) if "$ref" in node else None
        if target is not None and len(node) > 1 and self._leads_back(target[1]):
            for key in node:
                if key != "$ref":
                    self.leave_out(key, at)
            return {"$ref": node["$ref"]}
        return node

    def _leads_back(self, pointer: str) -> bool:
        """True if a definition's references lead to the one being rewritten.

        Raises RequestError after _MAX_FOLLOWED references: an untrusted schema would take seconds.
        """
        seen, todo = set[str](), [pointer]
        while todo and self._writing is not None:
            pointer = todo.pop()
            if pointer == self._writing:
                return True
            if pointer not in seen:
                self._followed += 1
                if self._followed > _MAX_FOLLOWED:
                    raise RequestError("it has too many nested references; make it smaller")
                seen.add(pointer)
                todo += self.document.references(pointer)
        return False

    def _types(self, schema: Schema) -> frozenset[str]:
        """The types of a schema's values, from its own keywords or those of the schema it refers to."""
        for _ in range(8):
            if isinstance(schema, bool):
                break
            node = self.document.node(schema, "")
            target = self.document.target(node["$ref"]) if "$ref" in node else None
            if target is None:
                return types_of(node)
            schema = target[0]
        return frozenset(TYPES)

    def _rewrite_logic(self, key: str, node: Mapping[str, Any], out: dict[str, Any], at: str) -> None:
        value = node[key]
        match key:
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                self._rewrite_reference(key, value, out, at)
            case "allOf":
                for index, one in enumerate(merged_conditions(value, node, self.document)):
                    rewritten = self.rewrite(one, f"{at}/allOf/{index}")
                    if branches(rewritten) > 1 and branches(out) * branches(rewritten) > MAX_BRANCHES:
                        self.leave_out("allOf", f"{at}/allOf/{index}")
                    else:
                        self.also(out, rewritten)
            case "anyOf":
                options = [self.rewrite(one, f"{at}/anyOf/{index}") for index, one in enumerate(value)]
                if True not in options:
                    if "anyOf" in out:
                        self.also(out, {"anyOf": options})
                    else:
                        out["anyOf"] = options
            case "oneOf":
                rewrite_one_of(value, out, at, self)
            case "not":
                refused = negated(value, self.document)
                if refused is None:
                    self.leave_out("not", at)
                else:
                    self.one_of_these(out, options_of(refused), "not", at)
            case "if":
                rewrite_condition(node, out, at, self)

    def _rewrite_reference(self, key: str, reference: str, out: dict[str, Any], at: str) -> None:
        found = self.document.target(reference)
        if found is None:
            self.leave_out(key, at)
            return
        schema, pointer = found
        if isinstance(schema, bool):
            self.also(out, schema)
            return
        name = self._names.get(pointer)
        if name is None:
            name = self._names[pointer] = f"d{len(self._names)}"
            self._pending.append(pointer)
        written = {"$ref": f"#/$defs/{name}"}
        if "$ref" in out:
            self.also(out, written)
        else:
            out |= written


def _without(part: Any, unmet: Collection[str]) -> Any:
    """A part of a rewritten schema in which references to any of `unmet` allow nothing."""
    if isinstance(part, list):
        return [_without(one, unmet) for one in part]
    if not isinstance(part, Mapping):
        return part
    if isinstance(part.get("$ref"), str) and part["$ref"] in unmet:
        return False if "$defs" not in part else {"allOf": [False]}
    # The values of const and enum are unchanged.
    return {key: one if key in VALUE_KEYWORDS else _without(one, unmet) for key, one in part.items()}
