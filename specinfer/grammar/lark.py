"""Writes structured-output forms as grammars in the library's Lark, and rejects unsupported options."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from specinfer.errors import RequestError
from specinfer.grammar.gbnf import escaped, lark_of_gbnf
from specinfer.grammar.schema import prepared_schema
from specinfer.structured_output import JsonWhitespace, OutputKind, StructuredOutput

# Between two parts of a JSON text: nothing, one space, or a line break with indentation. Unbounded, a
# degenerating model would write spaces until max_tokens.
_WHITESPACE: Mapping[JsonWhitespace, Mapping[str, Any]] = {
    "bounded": {"whitespace_pattern": r" |\n[ \t]{0,32}"},
    "any": {"whitespace_pattern": r"[ \t\n\r]+"},
    "none": {"whitespace_flexible": False},
}

_LEFT_OUT = "not enforced: "
# By the beginning of a warning of the library; others quote the keywords.
_WARNINGS = {"Unknown format": "format", "oneOf": "oneOf", "min/maxProperties": "minProperties"}
_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z][\w-]*\s*::=", re.MULTILINE)
_OPTIONS = re.compile(r"^[ \t]*[?!]?([\w-]+)\s*\[([^\]\n]*)\]\s*:", re.MULTILINE)
_REFUSED = re.compile(r"\b(max_tokens|temperature|stop)\b")


def lark_of(spec: StructuredOutput) -> str:
    """The Lark grammar of a form, after its preamble if it has one.

    Raises RequestError for a malformed GBNF grammar, for Lark rules with options that do not describe the
    text, and for a form that is nested too deeply.
    """
    try:
        form = _grammar(spec) if spec.kind is OutputKind.GRAMMAR else f"start: {_body(spec)}"
    except RecursionError:
        raise RequestError(f"{spec.parameter} is nested too deeply; make it flatter") from None
    if not spec.preamble:
        return form
    _refuse_options("preamble", spec.preamble)
    preamble = f"start: preamble\n{spec.preamble}"
    return f"start: %lark {{\n{preamble}\n}} %lark {{\n{form}\n}}"  # each part has its own rule names


def _grammar(spec: StructuredOutput) -> str:
    if _GBNF_RULE.search(spec.source):
        return lark_of_gbnf(spec.source)
    _refuse_options("grammar", spec.source)
    return spec.source


def _body(spec: StructuredOutput) -> str:
    """The body of a rule for a form that is not a grammar."""
    match spec.kind:
        case OutputKind.REGEX:
            return _one_regex(spec.source)
        case OutputKind.CHOICE:
            return _one_regex("|".join(map(escaped, json.loads(spec.source))))
        case OutputKind.JSON_SCHEMA:
            try:
                return json_rule(json.loads(spec.source), strict=spec.strict, whitespace=spec.whitespace)
            except RequestError as error:
                raise RequestError(f"{spec.parameter} cannot be used: {error}", spec.parameter) from None
        case _:
            return json_rule({"type": "object"}, strict=False, whitespace=spec.whitespace)


def json_rule(
    schema: Mapping[str, Any], *, strict: bool = True, whitespace: JsonWhitespace = "bounded"
) -> str:
    """The body of a Lark rule for the JSON texts of a schema, in one line.

    The library refuses a `strict` schema that it cannot enforce as a whole. It ignores such parts of other
    schemas, and `unenforced_keywords` names them. Raises RequestError for a strict schema that it would
    misread, and for one that is too deep.
    """
    return _json_rule(json.dumps(schema), strict, whitespace)


@lru_cache(maxsize=64)
def _json_rule(source: str, strict: bool, whitespace: JsonWhitespace) -> str:
    try:
        written, left_out = prepared_schema(json.loads(source), strict)
    except RecursionError:
        raise RequestError("it is nested too deeply; make it flatter") from None
    # An escaped letter would let a described name pass for another.
    more: dict[str, Any] = {"json_allowed_escapes": 'nrbtf\\"'} if strict else {"lenient": True}
    comment = {"$comment": f"{_LEFT_OUT}{' '.join(left_out)}"} if left_out else {}
    return f"%json {json.dumps({**written, **comment, 'x-guidance': {**_WHITESPACE[whitespace], **more}})}"


def unenforced_keywords(lark: str, warnings: Sequence[str]) -> tuple[str, ...]:
    """The keywords that a grammar leaves out of its schemas, by its text and the library's warnings."""
    found = [name for names in re.findall(f'"{_LEFT_OUT}([^"]*)"', lark) for name in names.split()]
    for warning in warnings:
        known = [name for start, name in _WARNINGS.items() if warning.startswith(start)]
        found += known or re.findall(r'"([^"]+)"', warning)
    return tuple(dict.fromkeys(found))


def _one_regex(regex: str) -> str:
    from llguidance import regex_to_lark

    return f"/{regex_to_lark(regex, '')}/"


def _refuse_options(name: str, lark: str) -> None:
    for head in _OPTIONS.finditer(lark):
        refused = _REFUSED.search(head[2])
        if refused:
            raise RequestError(
                f"{name}: rule {head[1]} has the option {refused[1]}; allowed: options that describe the "
                "text; use the sampling parameter of that name for the whole text"
            )
