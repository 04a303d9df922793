"""ReasoningTokens: counts the tokens of an answer's reasoning."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Splits(Protocol):
    """A parser that finds reasoning; `reasons` is None where the text so far is neither that nor content."""

    @property
    def reasons(self) -> bool | None:
        """True if the text so far ends in reasoning."""

    def feed(self, text: str) -> Any:
        """Parse more text."""


class ReasoningTokens:
    """Counts an answer's tokens up to the one that completes the end of its reasoning, marks included.

    `count` has those of reasoning that has begun. The parser is its own, as an answer's text comes later than
    its tokens if it may begin a stop string.
    """

    def __init__(self, parser: Splits, bytes_of: Callable[[int], bytes]) -> None:
        """`bytes_of` returns a token's bytes in the answer's text."""
        self.count = 0
        self._parser = parser
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open = 0  # tokens that may begin reasoning

    def add(self, tokens: Iterable[int]) -> None:
        """Add the answer's next tokens."""
        for token in tokens:
            before = self._parser.reasons
            self._parser.feed(self._decoder.decode(self._bytes_of(token)))
            self._open += 1
            if before or self._parser.reasons:
                self.count += self._open
            if self._parser.reasons is not None or before is not None:
                self._open = 0
