"""Base class of incremental parsers, and the events that they find in an answer.

A rule is a generator that reads `char` and yields to advance to the next one. A rule is thus written as if
the whole text were present, and its result does not depend on how the text is cut into pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

_Found = TypeVar("_Found")
_Result = TypeVar("_Result")
Rule = Generator[None, None, _Result]  # yields once per consumed character


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """New text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """New text of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """Start of a tool call; `index` counts the calls of an answer from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """New text of a call's arguments, which form a JSON object together."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """End of a call's arguments; `complete` is False if they break off or are not JSON."""

    index: int
    complete: bool = True


Event = ReasoningPiece | Content | CallStarted | ArgumentsPiece | CallEnded


class Reader(ABC, Generic[_Found]):
    """Parses a text once, in linear time.

    Characters that a rule consumes are held until their meaning is known; then they are dropped, or released
    as text.
    """

    def __init__(self) -> None:
        self.char = ""  # the next character; "" at the end of the text
        self._held: list[str] = []
        self._rules = self._text()

    def feed(self, text: str) -> _Found:
        """Parse more text and return the new results."""
        for self.char in text:
            next(self._rules)
        return self._take()

    def finish(self) -> _Found:
        """End the text and return the remaining results."""
        self.char = ""
        for _ in self._rules:
            raise AssertionError("a rule took a character after the last one")
        return self._take()

    @abstractmethod
    def _text(self) -> Rule[None]:
        """The rule of the whole text; it returns when `char` is ""."""

    @abstractmethod
    def _take(self) -> _Found:
        """Return the results since the last call."""

    def _hold(self) -> Rule[None]:
        """Consume a character whose meaning is not known yet."""
        self._held.append(self.char)
        yield

    def _drop(self) -> None:
        """Drop the held characters."""
        self._held.clear()

    def _release(self) -> str:
        """Return the held characters as text."""
        text = "".join(self._held)
        self._held.clear()
        return text

    def _spaces(self) -> Rule[None]:
        while self.char.isspace():
            yield from self._hold()

    def _newlines(self) -> Rule[None]:
        while self.char == "\n":
            yield from self._hold()

    def _literal(self, text: str) -> Rule[bool]:
        """Consume the longest matching prefix of `text`; return whether all of it matched."""
        for expected in text:
            if self.char != expected:
                return False
            yield from self._hold()
        return True
