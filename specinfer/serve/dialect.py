"""Dialect: how a model writes what is not plain text, as its chat template shows: calls and reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specinfer.errors import RequestError
from specinfer.serve.reasoning import Reasoning, ReasoningSplitter
from specinfer.serve.tools.call_format import CallFormat
from specinfer.serve.tools.call_parser import CallParser
from specinfer.serve.tools.events import ArgumentsPiece, CallStarted, Content, Event
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

    def read(self, text: str, tokens: int, *, last: bool) -> dict[str, Any]:
        """The delta of a message that `text`, of so many tokens, brings; with the last the rest comes, too.

        A delta with reasoning counts as reasoning as a whole.
        """
        reasoning, content = ("", text) if self._splitter is None else self._splitter.feed(text)
        if self._splitter is not None and last:
            rest = self._splitter.finish()
            reasoning, content = reasoning + rest[0], content + rest[1]
        self.reasoning_tokens += tokens if reasoning else 0
        delta: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        if self._parser is None:
            return delta | ({"content": content} if content else {})
        events = self._parser.feed(content)
        return delta | _delta(events + self._parser.finish() if last else events)


def _delta(events: list[Event]) -> dict[str, Any]:
    """Events as OpenAI's streams have them; of one call there is one entry."""
    delta: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case Content(text):
                delta["content"] = delta.get("content", "") + text
            case CallStarted(index, call_id, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case ArgumentsPiece(index, text):
                entry = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                entry["function"]["arguments"] += text
    return delta | ({"tool_calls": list(calls.values())} if calls else {})
