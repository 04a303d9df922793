"""A model's formats of tool calls and reasoning, as read from its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from specinfer.errors import RequestError
from specinfer.grammar.lark import escaped
from specinfer.request import Delta
from specinfer.serve.dialect.call_format import CallFormat
from specinfer.serve.dialect.call_parser import CallParser, Content, Event, ReasoningPiece, certain
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


class ReasoningSplitter:
    """Splits an answer incrementally into reasoning and content, however it is cut into pieces.

    `starts_inside`: the prompt has opened the reasoning (it ends with OPEN). Otherwise an answer has
    reasoning only if it starts with OPEN. Line breaks next to the delimiters and white space before OPEN are
    dropped. Reasoning without CLOSE extends to the end of the answer.
    """

    def __init__(self, starts_inside: bool) -> None:
        self._held = ""  # text whose meaning is not known yet
        self._part: Literal["start", "inside", "content"] = "inside" if starts_inside else "start"
        self._begins = True  # the next line breaks follow a delimiter

    def feed(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Take more text; returns new reasoning and content. `last` ends the answer."""
        self._held += text
        if self._part == "start":
            begun = self._held.lstrip()
            if begun.startswith(OPEN):
                self._part, self._held = "inside", begun.removeprefix(OPEN)
            elif last or not OPEN.startswith(begun):
                self._part, self._begins = "content", False
        reasoning = self._reasoning(last) if self._part == "inside" else ""
        return reasoning, self._rest() if self._part == "content" else ""

    def _reasoning(self, last: bool) -> str:
        found, closed, rest = self._rest().partition(CLOSE)
        if closed:
            self._part, self._held, self._begins = "content", rest, True
            return found.rstrip("\n")
        size = len(found) if last else certain(found, CLOSE, "\n")
        self._held = found[size:]
        return found[:size]

    def _rest(self) -> str:
        """Take the held text, without line breaks that follow a delimiter."""
        taken, self._held = self._held.lstrip("\n") if self._begins else self._held, ""
        self._begins = self._begins and not taken
        return taken


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
        reasoning, content = ("", text) if self._splitter is None else self._splitter.feed(text, last=last)
        if reasoning:
            self.reasoning_tokens += len(delta.token_ids) * len(reasoning) // len(reasoning + content)
        found: list[Event] = [ReasoningPiece(reasoning)] if reasoning else []
        if self._parser is None:
            return [*found, Content(content)] if content else found
        return found + self._parser.feed(content, last=last)
