"""Writes structured-output forms as grammars in the library's Lark, and rejects unsupported options.

GBNF grammars, llama.cpp's, are parsed with the library. The library's Lark splits a text greedily into
lexemes, and its own gbnf_to_lark makes such lexemes of rules: with `word ::= [a-z]+`, `word "x"` matches
nothing there. GBNF has no lexemes, so a grammar without recursion becomes one regular expression, and any
other grammar is written character by character. Both match exactly the texts of the grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from specinfer.errors import RequestError
from specinfer.grammar.schema import prepared_schema, rust_pattern
from specinfer.structured_output import JsonWhitespace, OutputKind, StructuredOutput

if TYPE_CHECKING:
    from llguidance.gbnf_to_lark import ASTNode

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
_MAX_REGEX = 32 * 1024  # characters; a larger grammar is written as rules
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([\s\S]))")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", **{sign: sign for sign in '\\"[]-^'}}
_EMPTY = '""'
_SIGNS = {(0, None): "*", (1, None): "+", (0, 1): "?"}


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


def escaped(text: str) -> str:
    """A text escaped for a regular expression, inside or outside a class."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}" for c in text)


def lark_of_gbnf(text: str) -> str:
    """A Lark grammar for the texts of a GBNF grammar; raises RequestError if it is malformed."""
    from llguidance.gbnf_to_lark import GbnfToLarkError, GrammarParser

    try:
        parsed = GrammarParser().parse(_ESCAPE.sub(_plain, text))
    except (GbnfToLarkError, ValueError) as error:
        raise RequestError(f"grammar cannot be used: {error}; write GBNF rules, or a Lark grammar") from None
    rules = {name: rule.alternatives for name, rule in parsed.items()}
    names = {name: "start" if name == "root" else f"r{index}" for index, name in enumerate(rules)}
    known: dict[str, str | None] = {}  # regular expressions of rules; None while one is being written

    def inlined(name: str) -> str:
        if name not in known:
            known[name] = None  # a reference to it before it is written is recursion
            known[name] = _written(rules[name], inlined, "")
        regex = known[name]
        if regex is None:
            raise _IsLargeError
        return regex

    try:
        with suppress(_IsLargeError, RecursionError):
            return f"start: /{inlined('root')}/"
        return "\n".join(f"{names[one]}: {_written(rules[one], names.__getitem__, ' ')}" for one in rules)
    except KeyError as error:
        raise RequestError(
            f"grammar has no rule {error.args[0]}; add one (the text starts with root)"
        ) from None


class _IsLargeError(Exception):
    """The regular expression of a grammar is too large, or infinite."""


def _written(node: ASTNode, refer: Callable[[str], str], space: str) -> str:
    """A body as a regular expression or, with a `space` between its parts, as the body of a rule.

    In a rule each character is a lexeme, so that none is longer than another.
    """
    from llguidance import gbnf_to_lark as ast

    def group(parts: list[str], between: str = space) -> str:
        if space:
            return f"({between.join(parts) or _EMPTY})"
        if sum(map(len, parts)) > _MAX_REGEX:
            raise _IsLargeError
        return f"(?:{between.join(parts)})"

    match node:
        case ast.LiteralNode(value):
            characters = [escaped(c) for c in _ESCAPE.sub(_character, value)]
            return group([f"/{c}/" for c in characters] if space else characters)
        case ast.RegexNode(rx):
            regex = "(?s:.)" if rx == "." else rust_pattern(rx)
            return f"/{regex}/" if space else regex
        case ast.RuleRefNode(name):
            return refer(name)
        case ast.SequenceNode(nodes):
            return group([_written(one, refer, space) for one in nodes])
        case ast.AlternativeNode(nodes):
            return group([_written(one, refer, space) for one in nodes], "|")
        case ast.RepetitionNode(inner, low, high):
            sign = _SIGNS.get((low, high), f"{{{low},{'' if high is None else high}}}")
            return group([_written(inner, refer, space)]) + sign
    raise AssertionError(f"unknown part of a grammar: {node!r}")


def _plain(escape: re.Match[str]) -> str:
    """An escape in a form that the library's parser reads."""
    character = _character(escape)
    if character == escape[0]:
        return character  # unknown: the library refuses it
    if "\ud800" <= character < "\ue000":
        raise ValueError(f"{escape[0]} is half of a character")
    return f"\\x{ord(character):02x}" if character.isascii() else character


def _character(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2] or escape[3]
    return chr(int(digits, 16)) if digits else _LETTERS.get(escape[4], escape[0])
