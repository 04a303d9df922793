"""Cursor: a matcher that moves to any path below the committed text, and is replaced when it breaks.

Matchers of one grammar share the automaton they build as they go. It has a limited size, and one that is
full stays so for all of them: a request that fills it must not fail the others, nor may a grammar wear out
with use. So a matcher that breaks is replaced by one with a new automaton, and asked once more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from specinfer.errors import RequestError
from specinfer.grammar.complaint import complaint
from specinfer.grammar.library_vocabulary import LibraryVocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

_DEAD_END = "NoExtension"  # how the library's complaint begins when nothing can follow
_Answer = TypeVar("_Answer")


class MatcherSource:
    """Makes matchers that share one automaton, until that is worn. Safe to share by threads."""

    def __init__(self, grammar: str, vocabulary: LibraryVocabulary, parameter: str) -> None:
        self.vocabulary = vocabulary
        self.parameter = parameter  # for messages
        self._grammar = grammar
        self._lock = threading.Lock()
        self._first: LLMatcher | None = vocabulary.matcher(grammar)

    @property
    def first(self) -> LLMatcher:
        """The matcher the others are copied from, at the start of the text; it is never moved itself."""
        with self._lock:
            if self._first is None:
                self._first = self.vocabulary.matcher(self._grammar)
            return self._first

    def replace(self, worn: LLMatcher) -> None:
        """Begin a new automaton, unless `worn` is not the present one any more."""
        with self._lock:
            if worn is self._first:
                self._first = None


class Cursor:
    """A place in a grammar: the committed text, and any path of tokens below it."""

    def __init__(self, source: MatcherSource) -> None:
        self._source = source
        self._first = source.first
        self._matcher = self._first.deep_copy()
        self._base = 0  # of the committed tokens the matcher has followed so many,
        self._path: list[int] = []  # and consumed these after them
        self.committed: list[int] = []

    def ask(self, path: Sequence[int], question: Callable[[LLMatcher], _Answer]) -> _Answer | None:
        """What `question` makes of the matcher after the committed text and `path`.

        None when `path` is not allowed, or turns out to be a dead end. `question` may compute, but not
        consume. Raises RequestError when the grammar is too complex to follow there.
        """
        for is_last in (False, True):
            answer = question(self._matcher) if self._follow() and self._go_to(path) else None
            if not self._matcher.is_error():
                return answer
            said = complaint(self._matcher)
            if said.startswith(_DEAD_END):
                self._start_again()
                return None
            self._source.replace(self._first)
            self._start_again()
            if is_last:
                raise RequestError(
                    f"{self._source.parameter} is too complex to follow ({said}); make it smaller: fewer "
                    "nested repeats, tighter bounds"
                )
        raise AssertionError("the second time ends the loop")

    def commit(self, tokens: Sequence[int]) -> None:
        """Move the committed text on; the tokens must be allowed.

        The matcher follows when it is next asked: a grammar that breaks on the way fails whoever asks, never
        the commit, which a whole batch shares.
        """
        self.committed += tokens

    def _follow(self) -> bool:
        """Put the matcher behind what was committed since it was last asked; False when it broke there."""
        ahead = self.committed[self._base :]
        if self._path[: len(ahead)] != ahead and not self._go_to(ahead):
            self._matcher.compute_bitmask()  # one whose automaton is full says so only when it makes a mask
            assert self._matcher.is_error(), f"tokens {ahead} are not allowed by {self._source.parameter}"
            return False
        del self._path[: len(ahead)]
        self._base += len(ahead)
        return True

    def _go_to(self, path: Sequence[int]) -> bool:
        """Put the matcher after `path`; False when it is not allowed, or the matcher broke on the way."""
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if len(self._path) > shared:
            self._matcher.rollback(len(self._path) - shared)
            del self._path[shared:]
        rest = list(path[shared:])
        if not all(map(self._source.vocabulary.is_text, rest)):
            return False
        consumed = self._matcher.try_consume_tokens(rest) if rest else 0
        self._path += rest[:consumed]
        return consumed == len(rest) and not self._matcher.is_error()

    def _start_again(self) -> None:
        self._first = self._source.first
        self._matcher = self._first.deep_copy()
        self._path.clear()
        if self._base:
            self._matcher.consume_tokens(self.committed[: self._base])
