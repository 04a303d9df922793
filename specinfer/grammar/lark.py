"""Writes structured-output forms as grammars in the library's Lark, and rejects unsupported options."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from specinfer.errors import RequestError
from specinfer.grammar.ecma_regex import MAX_REPEAT, largest_repeat
from specinfer.grammar.gbnf import escaped, read_gbnf, to_lark
from specinfer.grammar.schemas.rewriter import enforced_schema
from specinfer.structured_output import JsonWhitespace, OutputKind, StructuredOutput

# Between two parts of a JSON text: nothing, one space, or a line break with indentation. Unbounded, a
# degenerating model would write spaces until max_tokens.
_WHITESPACE: Mapping[JsonWhitespace, Mapping[str, Any]] = {
    "bounded": {"whitespace_pattern": r" |\n[ \t]{0,32}"},
    "any": {"whitespace_pattern": r"[ \t\n\r]+"},
    "none": {"whitespace_flexible": False},
}

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z][\w-]*\s*::=", re.MULTILINE)
_OPTIONS = re.compile(r"^[ \t]*[?!]?([\w-]+)\s*\[([^\]\n]*)\]\s*:", re.MULTILINE)
# Strings, regular expressions and comments of Lark, and the start of an embedded schema (group 1).
_JSON = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?![/*])(?:\\.|[^/\\\n])+/|(?://|#)[^\n]*|%json\s*(?=\{)()')
_REFUSED = re.compile(r"\b(max_tokens|temperature|stop)\b")


def lark_of(spec: StructuredOutput) -> str:
    """The Lark grammar of a form, after its preamble if it has one.

    Raises RequestError for a regex that repeats a part too often, a malformed GBNF grammar, and Lark rules
    with options that do not describe the text.
    """
    form = _grammar(spec) if spec.kind is OutputKind.GRAMMAR else f"start: {_body(spec)}"
    if not spec.preamble:
        return form
    _refuse_options("preamble", spec.preamble)
    preamble = f"start: preamble\n{spec.preamble}"
    return f"start: %lark {{\n{preamble}\n}} %lark {{\n{form}\n}}"  # each part has its own rule names


def _grammar(spec: StructuredOutput) -> str:
    if _GBNF_RULE.search(spec.source):
        return to_lark(read_gbnf(spec.source))
    _refuse_options("grammar", spec.source)
    return _with_whitespace(spec.source, spec.whitespace)


def _with_whitespace(lark: str, whitespace: JsonWhitespace) -> str:
    """Set the whitespace of `%json` schemas in Lark rules; the library's default allows any."""
    written: list[str] = []
    at = 0
    for found in _JSON.finditer(lark):
        if found[1] is None or found.start() < at:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, found.end(1))
        except (ValueError, RecursionError):
            continue  # the library reports the error
        options = schema.get("x-guidance", {}) if isinstance(schema, dict) else None
        if isinstance(options, dict) and not any(key.startswith("whitespace") for key in options):
            schema["x-guidance"] = {**_WHITESPACE[whitespace], **options}
            written += [lark[at : found.end(1)], json.dumps(schema, ensure_ascii=False)]
            at = end
    return "".join([*written, lark[at:]])


def _body(spec: StructuredOutput) -> str:
    """The body of a rule for a form that is not a grammar."""
    match spec.kind:
        case OutputKind.REGEX:
            repeat = largest_repeat(spec.source)
            if repeat > MAX_REPEAT:
                raise RequestError(
                    f"regex repeats a part {repeat} times (nested counts are multiplied); "
                    f"allowed: at most {MAX_REPEAT}"
                )
            return _one_regex(spec.source)
        case OutputKind.CHOICE:
            return _one_regex("|".join("".join(map(escaped, choice)) for choice in json.loads(spec.source)))
        case OutputKind.JSON_SCHEMA:
            try:
                return json_rule(json.loads(spec.source), strict=spec.strict, whitespace=spec.whitespace)
            except RequestError as error:
                raise RequestError(f"{spec.parameter} cannot be used: {error}", spec.parameter) from None
        case _:
            return json_rule({"type": "object"}, whitespace=spec.whitespace)


def json_rule(
    schema: Mapping[str, Any], *, strict: bool = True, whitespace: JsonWhitespace = "bounded"
) -> str:
    """The body of a Lark rule for the JSON texts of a schema, in one line.

    Parts of the schema that cannot be enforced are dropped (schemas/rewriter.py), or rejected if `strict`.
    Raises RequestError for these and for a malformed schema.
    """
    rewritten = enforced_schema(json.dumps(schema), strict)
    options: dict[str, Any] = dict(_WHITESPACE[whitespace])
    if strict and rewritten.has_other_names:
        # An escaped letter would let the name of a described property pass as another name.
        options["json_allowed_escapes"] = 'nrbtf\\"'
    return f"%json {json.dumps({**json.loads(rewritten.source), 'x-guidance': options})}"


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
