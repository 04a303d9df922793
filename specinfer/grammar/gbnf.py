"""GBNF: parses llama.cpp's grammars with the library, and writes them as Lark.

The library's Lark splits a text greedily into lexemes, and its own gbnf_to_lark makes such lexemes of rules:
with `word ::= [a-z]+`, `word "x"` matches nothing there. GBNF has no lexemes, so a grammar without recursion
becomes one regular expression, and any other grammar is written character by character. Both match exactly
the texts of the grammar.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from specinfer.errors import RequestError
from specinfer.grammar.schema import rust_pattern

if TYPE_CHECKING:
    from llguidance.gbnf_to_lark import ASTNode

_MAX_REGEX = 32 * 1024  # characters; a larger grammar is written as rules
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([\s\S]))")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", **{sign: sign for sign in '\\"[]-^'}}
_EMPTY = '""'
_SIGNS = {(0, None): "*", (1, None): "+", (0, 1): "?"}


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
