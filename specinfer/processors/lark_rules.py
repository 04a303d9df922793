"""What a Lark grammar's rules lead to: enough of its syntax to see whether a text under them ends.

The library parses the grammar in full and complains about mistakes; it does not see that a rule needs
itself without end. Terminals cannot be recursive, so they count as finished here.
"""

from __future__ import annotations

import json
import re

from specinfer.errors import RequestError
from specinfer.processors.rules import Choice, Expression, Pattern, Reference, Repeat, Sequence, references

START = "start"
_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|\#[^\n]*)
    |(?P<leaf>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^<>\s]+>)
    |(?P<directive>%[a-z]+)
    |(?P<head>[?!]?[a-zA-Z_][\w-]*(?:\.-?\d+)?\s*(?:\[[^\[\]\n]*\]\s*)?:(?!:))
    |(?P<name>[a-zA-Z_][\w-]*)
    |(?P<repeat>~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d*\s*,?\s*\d*\s*\})
    |(?P<mark>\.\.|->|[|()\[\]*+?.,&~])""",
    re.VERBOSE,
)
_HEAD_NAME = re.compile(r"[\w-]+")
_OPTIONS = re.compile(r"^[ \t]*[?!]?([\w-]+)\s*\[([^\]\n]*)\]\s*:", re.MULTILINE)
_REFUSED = re.compile(r"\b(max_tokens|temperature|stop)\b")
_ANY = Pattern("")  # something that has a text, whatever it is

Token = tuple[str, str]  # the name of a group of _TOKEN, and what it matched


class _UnknownSyntaxError(Exception):
    """The library may know it; this reader does not."""


def read_lark(text: str) -> dict[str, Expression] | None:
    """The rules (lower-case names) of a Lark grammar; None when it uses syntax this reader does not know.

    Raises RequestError on a rule option that asks for something other than a form of text: max_tokens,
    temperature and stop.
    """
    _refuse_options(text)
    bodies: dict[str, list[Token]] = {}
    try:
        body: list[Token] = []
        for kind, word in _tokens(text):
            if kind == "head":
                name = _HEAD_NAME.search(word)
                assert name is not None
                body = bodies[name[0]] = []
            elif kind == "directive":
                body = []  # what follows, up to the next head, belongs to no rule
            else:
                body.append((kind, word))
        rules = {name: _Body(body).read() for name, body in bodies.items() if name.islower()}
    except _UnknownSyntaxError:
        return None
    used = {name for body in rules.values() for name in references(body)}
    return rules if used | {START} <= set(rules) else None


def _tokens(text: str) -> list[Token]:
    found: list[Token] = []
    at = 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise _UnknownSyntaxError
        kind, at = str(token.lastgroup), token.end()
        if kind == "directive" and token[0] in ("%json", "%regex", "%llguidance"):
            start = text.find("{", at)
            try:
                _, at = json.JSONDecoder().raw_decode(text, start)
            except ValueError:
                raise _UnknownSyntaxError from None
            kind = "directive" if token[0] == "%llguidance" else "leaf"
        if kind != "skip":
            found.append((kind, token[0]))
    return found


def _refuse_options(text: str) -> None:
    for head in _OPTIONS.finditer(text):
        refused = _REFUSED.search(head[2])
        if refused:
            raise RequestError(
                f"grammar: rule {head[1]} has the option {refused[1]}; allowed: options that describe the "
                "text; use the sampling parameter of that name for the whole text"
            )


class _Body:
    """Reads the tokens of one rule's body from left to right."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at = tokens, 0

    def read(self) -> Expression:
        body = self._choice()
        if self.at < len(self.tokens):
            raise _UnknownSyntaxError
        return body

    def _choice(self) -> Expression:
        options = [self._sequence()]
        while self._next("|"):
            options.append(self._sequence())
        return Choice(tuple(options))

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        while (item := self._item()) is not None:
            items.append(item)
        if self._next("->"):  # an alias, for syntax trees
            self.at += 1
        return Sequence(tuple(items))

    def _item(self) -> Expression | None:
        kind, word = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        item: Expression
        if kind == "leaf" or (kind == "name" and not word.islower()):
            item, self.at = _ANY, self.at + 1
            if self._next(".."):  # "a".."z"
                self.at += 1
        elif kind == "name":
            item, self.at = Reference(word), self.at + 1
        elif self._next("("):
            item = self._closed(")")
        elif self._next("["):
            item = Repeat(self._closed("]"), 0, 1)
        else:
            return None
        return self._repeated(item)

    def _closed(self, sign: str) -> Expression:
        inner = self._choice()
        if not self._next(sign):
            raise _UnknownSyntaxError
        return inner

    def _repeated(self, item: Expression) -> Expression:
        kind, word = self.tokens[self.at] if self.at < len(self.tokens) else ("", "")
        if kind == "repeat":
            low = re.search(r"\d+", word.partition(",")[0])
            return self._after(Repeat(item, int(low[0]) if low else 0, None))
        if word in ("*", "?"):
            return self._after(Repeat(item, 0, None))
        return self._after(item) if word == "+" else item

    def _after(self, item: Expression) -> Expression:
        self.at += 1
        return self._repeated(item)

    def _next(self, mark: str) -> bool:
        found = self.at < len(self.tokens) and self.tokens[self.at] == ("mark", mark)
        self.at += found
        return found
