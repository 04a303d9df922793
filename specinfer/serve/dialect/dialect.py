"""A model's formats of tool calls and reasoning, as read from its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specinfer.errors import RequestError
from specinfer.grammar.lark import escaped
from specinfer.request import Delta
from specinfer.serve.dialect.call_format import CallFormat
from specinfer.serve.dialect.call_parser import CallParser
from specinfer.serve.dialect.reader import Content, Event, Reader, ReasoningPiece, Rule
from specinfer.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning between OPEN and CLOSE at the start of an answer.

    `special` has the ids of delimiters that are special tokens. The tokenizer must render these in the text,
    or the reasoning is not found. Other delimiters are plain text.
    """

    special: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Reasoning | None:
        """Return the delimiters of the model's chat templates; None if they have no reasoning."""
        templates = (tokenizer.chat_template or "", tokenizer.tool_template or "")
        if not any(CLOSE in template for template in templates):
            return None
        found = ((text, tokenizer.special_id(text)) for text in (OPEN, CLOSE))
        return cls({text: token for text, token in found if token is not None})

    def opened_by(self, prompt: str) -> bool:
        """Return whether a prompt ends within the reasoning, so that the answer starts there."""
        return prompt.rstrip().endswith(OPEN)

    def closed_by(self, prompt: str) -> bool:
        """Return whether a prompt ends after the reasoning, so that the answer has none."""
        return prompt.rstrip().endswith(CLOSE)

    def delimiter_rules(self, *, blanks: bool = True) -> dict[str, str]:
        """Return Lark rules by name: `open` is OPEN, after blanks if `blanks`; `close` is all up to CLOSE."""
        spaces = r"\s{0,8}" if blanks else ""
        rules = {
            "open[lazy]": f"/{spaces}{escaped(OPEN)}/",
            "close[lazy]": f"/(?s:.*){escaped(CLOSE)}/",
        }
        if OPEN in self.special:
            del rules["open[lazy]"]
            rules["open"] = f"<[{self.special[OPEN]}]>"
            if blanks:
                rules |= {"open": f"blank? {rules['open']}", "blank": r"/\s{1,8}/"}
        if CLOSE in self.special:
            del rules["close[lazy]"]
            rules |= {"close": f"REASONING <[{self.special[CLOSE]}]>", "REASONING": "/(?s:.*)/"}
        return rules

    def preamble_rules(self, starts_inside: bool) -> dict[str, str]:
        """Return Lark rules by name: `preamble` is the reasoning that precedes a form.

        No blanks are allowed before OPEN. Only OPEN could follow them, which would force a model to reason
        because it wrote a line break.
        """
        reasoning = "close gap?" if starts_inside else "(open close gap?)?"
        return {"preamble": reasoning, "gap": r"/\n{1,4}/"} | self.delimiter_rules(blanks=False)


class ReasoningSplitter(Reader[tuple[str, str]]):
    """Splits an answer incrementally into reasoning and content.

    `starts_inside`: the prompt has opened the reasoning (`Reasoning.opened_by`). Otherwise an answer has
    reasoning only if it starts with OPEN. Line breaks next to the delimiters and white space before OPEN are
    dropped. Reasoning without CLOSE extends to the end of the answer.
    """

    def __init__(self, starts_inside: bool) -> None:
        super().__init__()
        self._inside = starts_inside
        self._reasoning: list[str] = []
        self._content: list[str] = []

    def _take(self) -> tuple[str, str]:
        reasoning, content = "".join(self._reasoning), "".join(self._content)
        self._reasoning, self._content = [], []
        return reasoning, content

    def _text(self) -> Rule[None]:
        if not self._inside:
            yield from self._spaces()
            self._inside = yield from self._literal(OPEN)
        if self._inside:
            self._drop()
            yield from self._up_to_close()
        self._content.append(self._release())
        while self.char:
            self._content.append(self.char)
            yield

    def _up_to_close(self) -> Rule[None]:
        """Reasoning, CLOSE, and the line breaks around it."""
        yield from self._newlines()
        self._drop()
        while self.char:
            yield from self._newlines()
            if self.char == CLOSE[0] and (yield from self._literal(CLOSE)):
                yield from self._newlines()
                self._drop()
                return
            self._reasoning.append(self._release())
            if self.char and self.char not in ("\n", CLOSE[0]):
                self._reasoning.append(self.char)
                yield
        self._reasoning.append(self._release())


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
        reasoning = Reasoning.of(tokenizer)
        try:
            return cls(CallFormat.of(tokenizer, call_format), "", reasoning)
        except RequestError as error:
            if call_format != "auto":
                raise
            return cls(None, str(error), reasoning)


class AnswerReader:
    """Splits an answer incrementally into reasoning, content and tool calls."""

    def __init__(self, splitter: ReasoningSplitter | None, parser: CallParser | None) -> None:
        self._splitter = splitter
        self._parser = parser
        self.reasoning_tokens = 0

    @property
    def called(self) -> bool:
        """True if a tool was called."""
        return self._parser is not None and self._parser.calls > 0

    def read(self, delta: Delta) -> list[Event]:
        """Add a delta and return its events in order; the last one flushes held text.

        In a text with both reasoning and content, tokens are counted in proportion to characters.
        """
        text, last = delta.text, delta.finish_reason is not None
        reasoning, content = ("", text) if self._splitter is None else self._splitter.feed(text)
        if self._splitter is not None and last:
            rest = self._splitter.finish()
            reasoning, content = reasoning + rest[0], content + rest[1]
        if reasoning:
            self.reasoning_tokens += len(delta.token_ids) * len(reasoning) // len(reasoning + content)
        found: list[Event] = [ReasoningPiece(reasoning)] if reasoning else []
        if self._parser is None:
            return [*found, Content(content)] if content else found
        found += self._parser.feed(content)
        return found + self._parser.finish() if last else found
