"""A form, written as a grammar in the library's Lark, and what is refused before the library sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from specinfer.errors import RequestError
from specinfer.grammar.gbnf import escaped, read_gbnf, to_lark
from specinfer.grammar.regex_repeats import largest_repeat
from specinfer.structured_output import OutputKind, StructuredOutput

MAX_REPEAT = 100_000  # of a part of a regex, counted repeats in one another multiplied

# Between the parts of a JSON text: nothing, one space, or a line break with indentation. Without a bound a
# model that has lost its thread writes spaces until max_tokens.
WHITESPACE = r" |\n[ \t]{0,32}"

_GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z][\w-]*\s*::=", re.MULTILINE)
_OPTIONS = re.compile(r"^[ \t]*[?!]?([\w-]+)\s*\[([^\]\n]*)\]\s*:", re.MULTILINE)
_REFUSED = re.compile(r"\b(max_tokens|temperature|stop)\b")


def lark_of(spec: StructuredOutput) -> str:
    """The Lark grammar of a form, behind its preamble where it has one.

    Raises RequestError on a regex that repeats a part too often, on a GBNF grammar that is none, and on Lark
    rules with options that ask for something other than a form of text.
    """
    form = _grammar(spec) if spec.kind is OutputKind.GRAMMAR else f"start: {_body(spec)}"
    if not spec.preamble:
        return form
    _refuse_options("preamble", spec.preamble)
    preamble = f"start: preamble\n{spec.preamble}"
    return f"start: %lark {{\n{preamble}\n}} %lark {{\n{form}\n}}"  # each has names of its own for its rules


def _grammar(spec: StructuredOutput) -> str:
    if _GBNF_RULE.search(spec.source):
        return to_lark(read_gbnf(spec.source))
    _refuse_options("grammar", spec.source)
    return spec.source


def _body(spec: StructuredOutput) -> str:
    """The body of a rule for a form that is no grammar."""
    match spec.kind:
        case OutputKind.REGEX:
            repeat = largest_repeat(spec.source)
            if repeat > MAX_REPEAT:
                raise RequestError(
                    f"regex repeats a part {repeat} times, counted repeats in one another multiplied; "
                    f"allowed: at most {MAX_REPEAT}"
                )
            return _one_regex(spec.source)
        case OutputKind.CHOICE:
            return _one_regex("|".join("".join(map(escaped, choice)) for choice in json.loads(spec.source)))
        case OutputKind.JSON_SCHEMA:
            return json_rule(json.loads(spec.source))
        case _:
            return json_rule({"type": "object"})


def json_rule(schema: Mapping[str, Any], *, strict: bool = True) -> str:
    """The body of a Lark rule for the JSON texts of a schema, in one line.

    What of the schema the library cannot follow is refused when the rule is compiled, or passed over where
    `strict` is False: the texts then follow the rest of it.
    """
    options = {"whitespace_pattern": WHITESPACE, "lenient": not strict, "coerce_one_of": not strict}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


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
