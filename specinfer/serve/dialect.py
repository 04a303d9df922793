"""Dialect: how a model writes what is not plain text, as its chat template shows: calls and reasoning."""

from __future__ import annotations

from dataclasses import dataclass

from specinfer.errors import RequestError
from specinfer.serve.reasoning import Reasoning, ReasoningSplitter
from specinfer.serve.tools.call_format import CallFormat
from specinfer.serve.tools.call_parser import CallParser
from specinfer.serve.tools.events import Content, Event, Thought
from specinfer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Dialect:
    """A model's own ways; `no_calls` says why it has none to call tools in."""

    calls: CallFormat | None
    no_calls: str
    reasoning: Reasoning | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, call_format: str = "auto") -> Dialect:
        """The ways of the model's templates; `call_format` is the name of another form of calls.

        Raises RequestError for a form that is unknown.
        """
        reasoning = Reasoning.of(tokenizer)
        try:
            return cls(CallFormat.of(tokenizer, call_format), "", reasoning)
        except RequestError as error:
            if call_format != "auto":
                raise
            return cls(None, str(error), reasoning)


class AnswerReader:
    """Reads an answer as it grows: what of it is reasoning, text for the reader, calls of tools."""

    def __init__(self, splitter: ReasoningSplitter | None, parser: CallParser | None) -> None:
        self._splitter = splitter
        self._parser = parser
        self.reasoning_tokens = 0

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return self._parser is not None and self._parser.calls > 0

    def read(self, text: str, tokens: int, *, last: bool) -> list[Event]:
        """What `text`, of so many tokens, brings, in the order of the answer; with the last the rest, too.

        Of the tokens of a text with reasoning and content, reasoning has its share of the characters.
        """
        reasoning, content = ("", text) if self._splitter is None else self._splitter.feed(text)
        if self._splitter is not None and last:
            rest = self._splitter.finish()
            reasoning, content = reasoning + rest[0], content + rest[1]
        if reasoning:
            self.reasoning_tokens += tokens * len(reasoning) // len(reasoning + content)
        found: list[Event] = [Thought(reasoning)] if reasoning else []
        if self._parser is None:
            return [*found, Content(content)] if content else found
        found += self._parser.feed(content)
        return found + self._parser.finish() if last else found
