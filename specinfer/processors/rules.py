"""Rules of a context-free grammar as plain data, and whether a text under them ever ends.

A rule is *endless* when every way to write it needs the rule again: `list: item "," list`. It is found from
the other side: rules that have a finite text are collected until none is added; what remains is endless.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

_Body = TypeVar("_Body")


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
    finite = found_finite(rules, references, _ends)
    return next((name for name in reversed(in_use(rules, start)) if name not in finite), None)


def found_finite(
    bodies: Mapping[str, _Body],
    mentions: Callable[[_Body], Iterable[str]],
    ends: Callable[[_Body, set[str]], bool],
) -> set[str]:
    """The names whose bodies have a finite text, or document: `ends` tells, given the names found so far."""
    users: dict[str, list[str]] = {}
    for name, body in bodies.items():
        for other in mentions(body):
            users.setdefault(other, []).append(name)
    finite: set[str] = set()
    todo = list(bodies)
    while todo:
        name = todo.pop()
        if name not in finite and ends(bodies[name], finite):
            finite.add(name)
            todo.extend(users.get(name, ()))  # they are looked at again, nobody else
    return finite


def in_use(rules: Rules, start: str) -> list[str]:
    """The names of the rules that `start` leads to, itself first."""
    found: dict[str, None] = {start: None}
    todo = deque(found)
    while todo:
        new = [name for name in dict.fromkeys(references(rules[todo.popleft()])) if name not in found]
        found.update(dict.fromkeys(new))
        todo.extend(new)
    return list(found)


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
