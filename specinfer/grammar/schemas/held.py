"""A JSON schema, written anew as one that the library can hold, and what of it had to be left out.

The library (llguidance) knows part of the keywords. Many of the others say what these can say, too: `oneOf`
of schemas that exclude each other is `anyOf`, `if` is two alternatives, `dependentRequired` another two. They
are written so, exactly. What is left out only ever restricts: the texts of what is written are all of the
schema's, and more. (The order of properties and the spelling of numbers are the library's own.)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from specinfer.errors import RequestError
from specinfer.grammar.library_vocabulary import fault_of, in_one_line, without_places
from specinfer.grammar.schemas.alternatives import (
    MOST_BRANCHES,
    branches,
    hold_condition,
    hold_one_of,
    merged_conditions,
    options_of,
)
from specinfer.grammar.schemas.document import TYPES, Schema, SchemaDocument, place
from specinfer.grammar.schemas.negation import negated, types_of
from specinfer.grammar.schemas.objects import ARRAY_KEYWORDS, OBJECT_KEYWORDS, hold_array, hold_object
from specinfer.grammar.schemas.repair import UNMET, Repair, as_object
from specinfer.grammar.schemas.scalars import (
    NUMBER_KEYWORDS,
    TEXT_KEYWORDS,
    VALUE_KEYWORDS,
    hold_numbers,
    hold_texts,
    hold_values,
)

_LOG = logging.getLogger(__name__)
_MOST_NODES: Final = 20_000  # of schemas that are written, what is written twice counted twice
_MOST_TRIALS: Final = 300  # of parts
_MOST_TRIED: Final = 300  # definitions, each of which is compiled with all others
_MOST_FOLLOWED: Final = 500_000
_KEPT_SOURCE: Final = 16 * 1024  # characters; what becomes of longer ones is not kept
_SHOWN: Final = 8  # places in a log line
_LONG: Final = 80  # characters of a place there
_FAMILIES: Final = (
    ("object", OBJECT_KEYWORDS, hold_object),
    ("array", ARRAY_KEYWORDS, hold_array),
    ("string", TEXT_KEYWORDS, hold_texts),
    ("number", NUMBER_KEYWORDS, hold_numbers),
)


@dataclass(frozen=True, slots=True)
class HeldSchema:
    """What is held of a schema: `source` is JSON, and `left_out` says what it lacks, each with its place.

    `has_other_names`: objects may have properties beside those that are described, so a described name must
    not be written in another spelling (an escape for a letter).
    """

    source: str
    left_out: tuple[str, ...]
    has_other_names: bool


def held_schema(source: str, strict: bool) -> HeldSchema:
    """What can be held of a schema, given as JSON; one line of the log says what is left out.

    Raises RequestError on a malformed keyword, on a schema that becomes too large, and where `strict` also on
    one of which something would be left out.
    """
    return _held_again(source, strict) if len(source) <= _KEPT_SOURCE else _held(source, strict)


@lru_cache(maxsize=256)
def _held_again(source: str, strict: bool) -> HeldSchema:
    return _held(source, strict)


def _held(source: str, strict: bool) -> HeldSchema:
    root = json.loads(source)
    try:
        holder = SchemaHolder(root, strict)
        written, said = holder.whole()
        if said:
            holder = SchemaHolder(root, strict, careful=True)
            written, said = holder.whole()
        if said and strict:
            raise RequestError(
                f"it cannot be held while the answer is written ({without_places(in_one_line(said))}); "
                "leave out strict to hold the rest, or change that part of the schema"
            )
        if said:
            written = holder.repaired(written)
    except RecursionError:
        raise RequestError("it has parts too deep inside one another; make it flatter") from None
    left_out = tuple(holder.left_out)
    if left_out:
        more = f" and {len(left_out) - _SHOWN} more" if len(left_out) > _SHOWN else ""
        _LOG.warning("a schema is held without %s%s", ", ".join(left_out[:_SHOWN]), more)
    return HeldSchema(json.dumps(written, ensure_ascii=False), left_out, holder.has_other_names)


class SchemaHolder:
    """Writes one schema anew; `strict` refuses what would be left out.

    `careful` asks the library about each regular expression and leaves out what it refuses. That takes a
    millisecond each, so it is for schemas that it refused whole.
    """

    def __init__(self, root: Mapping[str, Any], strict: bool, *, careful: bool = False) -> None:
        self._careful = careful
        self.document = SchemaDocument(root)
        self.strict = strict
        self.left_out: dict[str, None] = {}
        self.has_other_names = False
        self._names: dict[str, str] = {}  # of definitions, by their pointers
        self._definitions: dict[str, Schema] = {}
        self._pending: list[str] = []  # pointers of definitions that are still to be written
        self._writing: str | None = None  # the pointer of the one that is being written
        self._nodes = 0
        self._followed = 0  # references, in search of those that lead back
        self._faults: dict[str, str] = {}  # by what is written

    def whole(self) -> tuple[Mapping[str, Any], str]:
        """The whole schema, and what the library says against it, other than that nothing meets it."""
        written = as_object(self.hold(self.document.root, ""))
        while self._pending:  # not one within the other: references may follow one another by the thousand
            self._writing = pointer = self._pending.pop()
            found = self.document.target(f"#{pointer}")
            assert found is not None
            self._definitions[self._names[pointer]] = as_object(self.hold(*found))
        if not self._definitions:
            said = self._said(written)
            return written, "" if UNMET in said else said
        written = {**written, "$defs": self._definitions}
        if UNMET in (said := self._said(written)):
            written = self._without_unmet(written)
            said = self._said(written)
        return written, "" if UNMET in said else said

    def repaired(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same without what the library refuses of it."""
        places = {name: pointer for pointer, name in self._names.items()}
        return as_object(Repair(self._said, self.leave_out).whole(written, places))

    def _without_unmet(self, written: Mapping[str, Any]) -> Mapping[str, Any]:
        """The same without definitions that nothing meets, on which the library gives up the whole schema."""
        definitions = written["$defs"]
        if len(definitions) > _MOST_TRIED:
            raise RequestError(
                f"nothing meets one of its {len(definitions)} definitions; take that one out, or make the "
                "schema smaller"
            )
        unmet = {
            f"#/$defs/{name}"
            for name in definitions
            if UNMET in self._said({"$ref": f"#/$defs/{name}", "$defs": definitions})
        }
        replaced: dict[str, Any] = _without(written, unmet)
        return replaced

    def leave_out(self, keyword: str, at: str) -> None:
        """Note that a keyword is not held, or not whole; raises RequestError where it has to be."""
        if self.strict:
            raise RequestError(
                f"{keyword} at {place(at)} cannot be held while the answer is written; "
                "leave out strict to hold the rest, or change that part of the schema"
            )
        where = place(at)
        self.left_out[f"{keyword} at {where if len(where) < _LONG else f'{where[:_LONG]}...'}"] = None

    def refuses(self, schema: Mapping[str, Any]) -> bool:
        """Whether the library, asked carefully, refuses a part that is written already."""
        return self._careful and (len(self._faults) >= _MOST_TRIALS or bool(self._said(schema)))

    def _said(self, schema: Mapping[str, Any]) -> str:
        written = json.dumps(schema)
        if written not in self._faults:
            self._faults[written] = fault_of(f"start: %json {written}")
        return self._faults[written]

    def hold(self, schema: Schema, at: str) -> Schema:
        """One schema, written anew; `at` is its place, for messages."""
        if isinstance(schema, bool):
            return schema
        self._nodes += 1
        if self._nodes > _MOST_NODES:
            raise RequestError(f"it becomes more than {_MOST_NODES} schemas; make it smaller")
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
                    hold_values(node, out, at, self)
            else:
                self._hold_logic(key, node, out, at)
            done.add(key)
        return out or True

    def also(self, out: dict[str, Any], written: Schema) -> None:
        """What is written already holds as well."""
        if written is not True:
            out.setdefault("allOf", []).append(written)

    def fits(self, out: Mapping[str, Any], options: Sequence[Schema]) -> bool:
        """Whether so many alternatives can stand beside those that are there."""
        return branches(out) * max(1, len(options)) <= MOST_BRANCHES

    def one_of_these(self, out: dict[str, Any], options: Sequence[Schema], keyword: str, at: str) -> None:
        """One alternative holds at least; `keyword`, which says so, is left out where they are too many."""
        given = out.get("type")
        known = types_of({"type": given} if given is not None else {})
        kept: list[Schema] = []
        for option in options:
            if isinstance(option, Mapping) and given is not None:
                own = option.get("type")
                if own is not None and not types_of({"type": own}) & known:
                    continue
                option = {"type": given, **option}
            held = self.hold(option, at)
            if held is True:
                return
            if held is not False:
                kept.append(held)
        if branches(out) * sum(map(branches, kept)) > MOST_BRANCHES:
            self.leave_out(keyword, at)
            return
        self.also(out, {"anyOf": kept} if len(kept) != 1 else kept[0])
        if not kept:
            out["allOf"][-1] = False

    def _simplified(self, node: dict[str, Any], at: str) -> dict[str, Any]:
        """The same without what the library cannot have beside a reference that leads back to itself."""
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
        """Whether a definition leads, by references, to the one that is being written.

        Raises RequestError where so many were followed that a stranger's schema would take seconds.
        """
        seen, todo = set[str](), [pointer]
        while todo and self._writing is not None:
            pointer = todo.pop()
            if pointer == self._writing:
                return True
            if pointer not in seen:
                self._followed += 1
                if self._followed > _MOST_FOLLOWED:
                    raise RequestError("it has too many references in one another; make it smaller")
                seen.add(pointer)
                todo += self.document.references(pointer)
        return False

    def _types(self, schema: Schema) -> frozenset[str]:
        """The types of a schema's values, as far as its own keywords or those it refers to say."""
        for _ in range(8):
            if isinstance(schema, bool):
                break
            node = self.document.node(schema, "")
            target = self.document.target(node["$ref"]) if "$ref" in node else None
            if target is None:
                return types_of(node)
            schema = target[0]
        return frozenset(TYPES)

    def _hold_logic(self, key: str, node: Mapping[str, Any], out: dict[str, Any], at: str) -> None:
        value = node[key]
        match key:
            case "$ref" | "$dynamicRef" | "$recursiveRef":
                self._hold_reference(key, value, out, at)
            case "allOf":
                for index, one in enumerate(merged_conditions(value, node, self.document)):
                    held = self.hold(one, f"{at}/allOf/{index}")
                    if branches(held) > 1 and branches(out) * branches(held) > MOST_BRANCHES:
                        self.leave_out("allOf", f"{at}/allOf/{index}")
                    else:
                        self.also(out, held)
            case "anyOf":
                options = [self.hold(one, f"{at}/anyOf/{index}") for index, one in enumerate(value)]
                if True not in options:
                    if "anyOf" in out:
                        self.also(out, {"anyOf": options})
                    else:
                        out["anyOf"] = options
            case "oneOf":
                hold_one_of(value, out, at, self)
            case "not":
                refused = negated(value, self.document)
                if refused is None:
                    self.leave_out("not", at)
                else:
                    self.one_of_these(out, options_of(refused), "not", at)
            case "if":
                hold_condition(node, out, at, self)

    def _hold_reference(self, key: str, reference: str, out: dict[str, Any], at: str) -> None:
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
    """A part of a schema that is written, in which references to any of `unmet` allow nothing."""
    if isinstance(part, list):
        return [_without(one, unmet) for one in part]
    if not isinstance(part, Mapping):
        return part
    if isinstance(part.get("$ref"), str) and part["$ref"] in unmet:
        return False if "$defs" not in part else {"allOf": [False]}
    # Values that are named stay as they are.
    return {key: one if key in VALUE_KEYWORDS else _without(one, unmet) for key, one in part.items()}
