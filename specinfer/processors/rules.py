"""Rules of a context-free grammar as plain data, and whether a text under them ever ends.

A rule is *endless* when every way to write it needs the rule again: `list: item "," list`. It is found from
the other side: rules that have a finite text are collected until none is added; what remains is endless.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Literal:
    """This text."""

    text: str


@dataclass(frozen=True, slots=True)
class Pattern:
    """Any text a regular expression matches; one character of a class, in a GBNF grammar."""

    regex: str


@dataclass(frozen=True, slots=True)
class Reference:
    """Whatever the rule of that name stands for."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Any one of them."""

    options: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times; without end when `high` is None."""

    item: Expression
    low: int
    high: int | None


Expression = Literal | Pattern | Reference | Sequence | Choice | Repeat
Rules = Mapping[str, Expression]


def endless_rule(rules: Rules, start: str) -> str | None:
    """A rule in use under which no text ever ends, the furthest from `start`; None when all end."""
    finite: set[str] = set()
    grew = True
    while grew:
        ending = {name for name, body in rules.items() if name not in finite and _ends(body, finite)}
        finite |= ending
        grew = bool(ending)
    return next((name for name in reversed(in_use(rules, start)) if name not in finite), None)


def in_use(rules: Rules, start: str) -> list[str]:
    """The names of the rules that `start` leads to, itself first."""
    found = [start]
    for name in found:
        found.extend(n for n in dict.fromkeys(references(rules[name])) if n not in found)
    return found


def references(body: Expression) -> Iterator[str]:
    """The names a rule's body mentions, in order."""
    match body:
        case Reference(name):
            yield name
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from references(part)
        case Repeat(item):
            yield from references(item)


def _ends(body: Expression, finite: set[str]) -> bool:
    match body:
        case Reference(name):
            return name in finite
        case Sequence(items):
            return all(_ends(item, finite) for item in items)
        case Choice(options):
            return any(_ends(option, finite) for option in options)
        case Repeat(item, low):
            return low == 0 or _ends(item, finite)
        case _:
            return True
