"""GBNF: parses llama.cpp's grammars (`::=`) and writes them as Lark for the library.

    root ::= "yes" | "no" | list list ::= "[" [0-9]+ ("," [0-9]+)* "]"

The library's Lark splits a text greedily into lexemes, and its own gbnf_to_lark makes such lexemes of rules:
with `word ::= [a-z]+`, `word "x"` matches nothing there. GBNF has no lexemes, so a grammar without recursion
becomes one regular expression, and any other grammar is written character by character. Both match exactly
the texts of the grammar.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specinfer.errors import RequestError
from specinfer.grammar.ecma_regex import MAX_REPEAT, largest_repeat

START = "root"
MAX_REGEX = 32 * 1024  # characters; a larger grammar is written as rules
_RULE = re.compile(r"([A-Za-z][\w-]*)\s*::=")
_NAME = re.compile(r"[A-Za-z][\w-]*")
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_BOUNDS = re.compile(r"\{\s*(?=[\d,])(\d{0,9})\s*(,?)\s*(\d{0,9})\s*\}")
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([\s\S]))")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}


@dataclass(frozen=True, slots=True)
class Literal:
    """A fixed text."""

    text: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """Any text that a regular expression matches; one character of a class in a GBNF grammar."""

    regex: str


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """Expressions in order."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """Any one of the options."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times; unbounded if `high` is None."""

    item: Expression
    low: int
    high: int | None


Expression = Literal | Pattern | Reference | Sequence | Alternation | Repeat
Rules = Mapping[str, Expression]


def in_use(rules: Rules, start: str) -> list[str]:
    """The names of the rules reachable from `start`, itself first."""
    found: dict[str, None] = {start: None}
    todo = deque(found)
    while todo:
        new = [name for name in dict.fromkeys(references(rules[todo.popleft()])) if name not in found]
        found.update(dict.fromkeys(new))
        todo.extend(new)
    return list(found)


def references(body: Expression) -> Iterator[str]:
    """The names that a rule's body refers to, in order."""
    match body:
        case Reference(name):
            yield name
        case Sequence(parts) | Alternation(parts):
            for part in parts:
                yield from references(part)
        case Repeat(item):
            yield from references(item)


def read_gbnf(text: str) -> dict[str, Expression]:
    """Parse a GBNF grammar; the rules include `root`.

    Raises RequestError, with the line, for a malformed grammar or an undefined rule.
    """
    rules = _GbnfReader(text).rules()
    if START not in rules:
        raise RequestError(f"grammar has no rule {START}; the text starts with it, add one")
    for name, body in rules.items():
        for other in references(body):
            if other not in rules:
                raise RequestError(f"grammar: rule {name} uses {other}, which is not defined; define it")
    return rules


def to_lark(rules: Rules) -> str:
    """A Lark grammar for the same texts; raises RequestError if it repeats a part too often."""
    names = in_use(rules, START)
    for name in names:
        if (repeat := _largest_repeat(rules[name])) > MAX_REPEAT:
            raise _too_often(f"rule {name}", repeat)
    regex = _regex(rules[START], rules, {START: None})
    if regex is not None:
        if (repeat := largest_repeat(regex)) > MAX_REPEAT:
            raise _too_often("the grammar", repeat)
        return f"start: /{regex}/"
    short = {name: "start" if name == START else f"r{i}" for i, name in enumerate(names)}
    return "\n".join(f"{short[name]}: {_lark(rules[name], short)}" for name in names)


def _largest_repeat(body: Expression) -> int:
    """The largest product of nested counted repeats within one rule."""
    match body:
        case Sequence(parts) | Alternation(parts):
            return max(map(_largest_repeat, parts), default=1)
        case Repeat(item, low, high):
            return max(1, low, high or 0) * _largest_repeat(item)
    return 1


def _too_often(what: str, repeat: int) -> RequestError:
    return RequestError(
        f"grammar: {what} repeats a part {repeat} times (nested counts are multiplied); "
        f"allowed: at most {MAX_REPEAT}"
    )


def _regex(body: Expression, rules: Rules, known: dict[str, str | None]) -> str | None:
    """The regular expression of a body; None if it is too long or recursive.

    `known` collects the result for each rule.
    """
    match body:
        case Literal(text):
            written = "".join(escaped(c) for c in text)
        case Pattern(regex):
            written = regex
        case Reference(name):
            if name not in known:
                known[name] = None  # a reference to it before it is translated is recursion
                inner = _regex(rules[name], rules, known)
                known[name] = None if inner is None else f"(?:{inner})"
            return known[name]
        case Sequence(parts) | Alternation(parts):
            inners: list[str] = []
            for part in parts:
                inner = _regex(part, rules, known)
                if inner is None:
                    return None
                inners.append(inner)
            if sum(map(len, inners)) > MAX_REGEX:
                return None
            written = f"(?:{('' if isinstance(body, Sequence) else '|').join(inners)})"
        case Repeat(item, low, high):
            inner = _regex(item, rules, known)
            if inner is None:
                return None
            written = f"(?:{inner}){{{low},{'' if high is None else high}}}"
    return written if len(written) <= MAX_REGEX else None


def _lark(body: Expression, short: dict[str, str]) -> str:
    match body:
        case Literal(text):  # character by character, so that no lexeme is longer than another
            return "(" + " ".join(json.dumps(c, ensure_ascii=False) for c in text) + ")" if text else '""'
        case Pattern(regex):
            return f"/{regex}/"
        case Reference(name):
            return short[name]
        case Sequence(items):
            return "(" + " ".join(_lark(item, short) for item in items) + ")" if items else '""'
        case Alternation(options):
            return "(" + " | ".join(_lark(option, short) for option in options) + ")"
        case Repeat(item, 0, 1):
            return f"({_lark(item, short)})?"
        case Repeat(item, low, None) if low < 2:
            return f"({_lark(item, short)}){'+' if low else '*'}"
        case Repeat(item, low, high):
            return f"({_lark(item, short)}){{{low},{'' if high is None else high}}}"


def escaped(c: str) -> str:
    """A character escaped for a regular expression, inside or outside a class."""
    return c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):X}}}"


class _GbnfReader:
    """A parser that reads left to right; `at` is the next character."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def rules(self) -> dict[str, Expression]:
        found: dict[str, Expression] = {}
        self._skip()
        while self.at < len(self.text):
            head = _RULE.match(self.text, self.at)
            if head is None:
                raise self._error("expected a rule, name ::= ...")
            if head[1] in found:
                raise self._error(f"rule {head[1]} is defined twice")
            self.at = head.end()
            found[head[1]] = self._choice()
        return found

    def _choice(self) -> Expression:
        options = [self._sequence()]
        while self._next("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        while (item := self._item()) is not None:
            items.append(item)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _item(self) -> Expression | None:
        self._skip()
        item: Expression
        if self._next('"'):
            item = Literal("".join(self._characters('"')))
        elif self._next("["):
            item = self._character_class()
        elif self._next("."):
            item = Pattern("(?s:.)")
        elif self._next("("):
            item = self._choice()
            if not self._next(")"):
                raise self._error("expected )")
        else:
            name = _NAME.match(self.text, self.at)
            if name is None or _RULE.match(self.text, self.at):
                if self.at < len(self.text) and name is None and self.text[self.at] not in "|)":
                    raise self._error(f"{self.text[self.at]!r} is unexpected")
                return None
            self.at = name.end()
            item = Reference(name[0])
        return self._repeated(item)

    def _repeated(self, item: Expression) -> Expression:
        self._skip()
        bounds = _BOUNDS.match(self.text, self.at)
        if bounds is not None:
            if bounds[1] == bounds[3] == "":
                raise self._error(f"{bounds[0]} has no number")
            low = int(bounds[1] or 0)
            high = int(bounds[3]) if bounds[3] else None if bounds[2] else low
            if high is not None and high < low:
                raise self._error(f"{bounds[0]} has a minimum above its maximum")
            self.at = bounds.end()
            return self._repeated(Repeat(item, low, high))
        for sign, low, high in (("*", 0, None), ("+", 1, None), ("?", 0, 1)):
            if self._next(sign):
                return self._repeated(Repeat(item, low, high))
        return item

    def _character_class(self) -> Expression:
        negated = self._next_here("^")
        ranges: list[str] = []
        characters = self._characters("]", ranges_apart=True)
        i = 0
        while i < len(characters):
            first = last = characters[i]
            if characters[i + 1 : i + 2] == [""] and i + 2 < len(characters):
                last = characters[i + 2]
                i += 2
            if last < first:
                raise self._error(f"the range {first}-{last} is reversed")
            ranges.append(escaped(first) if first == last else f"{escaped(first)}-{escaped(last)}")
            i += 1
        if not ranges:
            raise self._error("an empty character class matches nothing")
        return Pattern(f"[{'^' if negated else ''}{''.join(ranges)}]")

    def _characters(self, end: str, *, ranges_apart: bool = False) -> list[str]:
        """The characters up to `end`, unescaped; if `ranges_apart`, a bare - between two is ""."""
        found: list[str] = []
        while not self._next_here(end):
            if self.at >= len(self.text):
                raise self._error(f"expected {end}")
            escape = _ESCAPE.match(self.text, self.at)
            c = self.text[self.at]
            if escape is not None:
                c = self._escaped(escape)
                self.at = escape.end()
            else:
                self.at += 1
                if c == "-" and ranges_apart and found and self.text[self.at : self.at + 1] != end:
                    c = ""
            found.append(c)
        return found

    def _escaped(self, escape: re.Match[str]) -> str:
        digits = escape[1] or escape[2] or escape[3]
        if digits is None and escape[4] in _LETTERS:
            return _LETTERS[escape[4]]
        code = int(digits, 16) if digits else 0xD800
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error(f"{escape[0]!r} is not a valid escape")
        return chr(code)

    def _next(self, sign: str) -> bool:
        self._skip()
        return self._next_here(sign)

    def _next_here(self, sign: str) -> bool:
        found = self.text.startswith(sign, self.at)
        self.at += len(sign) * found
        return found

    def _skip(self) -> None:
        space = _SPACE.match(self.text, self.at)
        assert space is not None
        self.at = space.end()

    def _error(self, what: str) -> RequestError:
        line = self.text.count("\n", 0, self.at) + 1
        return RequestError(f"grammar, line {line}: {what}; write GBNF rules, or a Lark grammar")
