"""Rules of a context-free grammar as plain data."""

from __future__ import annotations

from collections import deque
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
