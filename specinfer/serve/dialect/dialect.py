"""A model's formats of tool calls and reasoning, as read from its chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from specinfer.errors import RequestError
from specinfer.request import Delta
from specinfer.serve.dialect.call_form import Notation, Tags
from specinfer.serve.dialect.call_format import CallFormat, Tool
from specinfer.serve.dialect.call_parser import (
    ArgumentsReader,
    CallParser,
    Content,
    Event,
    JsonArguments,
    ReasoningPiece,
)
from specinfer.serve.dialect.channels import ChannelParser, Channels
from specinfer.serve.dialect.reasoning import Reasoning, ReasoningSplitter
from specinfer.serve.dialect.reasoning_tokens import ReasoningTokens
from specinfer.serve.dialect.tagged_calls import TaggedArguments
from specinfer.serve.dialect.written_values import ValueArguments
from specinfer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Dialect:
    """Formats of a model. `no_calls` is the reason why `calls` is None."""

    calls: CallFormat | None
    no_calls: str
    reasoning: Reasoning | None

    @classmethod
    def of(cls, tokenizer: Tokenizer, call_format: str = "auto") -> Dialect:
        """Read the formats of the model's templates; `call_format` overrides the format of calls.

        Raises RequestError for an unknown format.
        """
        reasoning = Channels.of(tokenizer) or Reasoning.of(tokenizer)
        try:
            return cls(CallFormat.of(tokenizer, call_format), "", reasoning)
        except RequestError as error:
            if call_format != "auto":
                raise
            return cls(None, str(error), reasoning)

    def reader(
        self,
        tools: Sequence[Tool],
        starts_inside: bool,
        bytes_of: Callable[[int], bytes],
        *,
        bare: bool = True,
    ) -> AnswerReader:
        """Return a reader of one answer that may call these tools.

        `starts_inside`: the prompt has opened the reasoning or, with channels, the final message. `bytes_of`
        returns a token's bytes in the text. With `bare` an answer that is one JSON object may be a call.
        """
        if isinstance(self.reasoning, Channels):
            channels = partial(ChannelParser, self.calls if tools else None, tools, starts_inside)
            return AnswerReader(None, channels(), ReasoningTokens(channels(), bytes_of))
        parser = None if self.calls is None or not tools else call_parser(self.calls, tools, bare=bare)
        if self.reasoning is None:
            return AnswerReader(None, parser, None)
        splitter = partial(self.reasoning.splitter, starts_inside)
        return AnswerReader(splitter(), parser, ReasoningTokens(splitter(), bytes_of))


def call_parser(call_format: CallFormat, tools: Sequence[Tool], *, bare: bool = True) -> CallParser:
    """Return a parser for calls of these tools in a format; `bare` as for `Dialect.reader`."""
    form, named = call_format.form, {tool.name: tool for tool in tools}

    def arguments(name: str) -> ArgumentsReader:
        match form.arguments:
            case Tags() as tags:
                return TaggedArguments(named[name], tags, form)
            case Notation() as notation:
                return ValueArguments(notation)
        return JsonArguments()

    return CallParser(call_format, tools, arguments, bare=bare)


class AnswerReader:
    """Splits an answer incrementally into reasoning, content and tool calls."""

    def __init__(
        self,
        splitter: ReasoningSplitter | None,
        parser: CallParser | ChannelParser | None,
        reasoning: ReasoningTokens | None,
    ) -> None:
        self._splitter = splitter
        self._parser = parser
        self._reasoning = reasoning

    @property
    def reasoning_tokens(self) -> int:
        """The tokens of reasoning so far, with its marks."""
        return 0 if self._reasoning is None else self._reasoning.count

    @property
    def called(self) -> bool:
        """True if a tool was called."""
        return self._parser is not None and self._parser.calls > 0

    def read(self, delta: Delta) -> list[Event]:
        """Add a delta and return its events in order; the last one flushes held text."""
        if self._reasoning is not None:
            self._reasoning.add(delta.token_ids)
        text, last = delta.text, delta.finish_reason is not None
        reasoning, content = ("", text) if self._splitter is None else self._splitter.feed(text, last=last)
        found: list[Event] = [ReasoningPiece(reasoning)] if reasoning else []
        if self._parser is not None:
            found += self._parser.feed(content, last=last)
        elif content:
            found.append(Content(content))
        return found
