"""Reader: a text that comes in pieces, read by rules that wait for more; and events, found in an answer.

A rule is a generator that looks at `char` and yields when it has taken it. So a rule reads as if the whole
text were there, and however the text is cut into pieces, the rules see the same characters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

_Found = TypeVar("_Found")
_Result = TypeVar("_Result")
Rule = Generator[None, None, _Result]  # yields for each character it took


@dataclass(frozen=True, slots=True)
class Thought:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call of a tool, number `index` of the answer, from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of a call's arguments, as the model wrote them: together they are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call's arguments are over; `complete` is False when they break off, or are no JSON."""

    index: int
    complete: bool = True


Event = Thought | Content | CallStarted | ArgumentsPiece | CallEnded


class Reader(ABC, Generic[_Found]):
    """Reads a text once, in time that grows with its length.

    What a rule takes is held until it shows what it belongs to: it is dropped, or released as text.
    """

    def __init__(self) -> None:
        self.char = ""  # the next character, which no rule has taken yet; "" at the end of the text
        self._held: list[str] = []
        self._rules = self._text()

    def feed(self, text: str) -> _Found:
        """What is certain now and was not before."""
        for self.char in text:
            next(self._rules)
        return self._take()

    def finish(self) -> _Found:
        """The rest, at the end of the text."""
        self.char = ""
        for _ in self._rules:
            raise AssertionError("a rule took a character after the last one")
        return self._take()

    @abstractmethod
    def _text(self) -> Rule[None]:
        """The rule for the whole text; it comes to its end when `char` is ""."""

    @abstractmethod
    def _take(self) -> _Found:
        """What the rules have found since this was called last."""

    def _hold(self) -> Rule[None]:
        """Take a character, whose meaning is not known yet."""
        self._held.append(self.char)
        yield

    def _drop(self) -> None:
        """What is held belongs to the form of the text."""
        self._held.clear()

    def _release(self) -> str:
        """What is held turned out to be text."""
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
        """Take `text`, as much of it as is there; whether all of it was."""
        for wanted in text:
            if self.char != wanted:
                return False
            yield from self._hold()
        return True
