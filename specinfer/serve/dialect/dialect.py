"""Dialect: how a model writes what is not plain text, as its chat template shows: calls and reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from specinfer.errors import RequestError
from specinfer.grammar.gbnf import escaped
from specinfer.serve.dialect.call_format import CallFormat
from specinfer.serve.dialect.call_parser import CallParser
from specinfer.serve.dialect.reader import Content, Event, Reader, Rule, Thought
from specinfer.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How a model marks its reasoning: between OPEN and CLOSE, at the start of its answer.

    `special` are the ids of those marks that are special tokens of the model, and have to stand in a text for
    it to be split; the others are text.
    """

    special: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Reasoning | None:
        """The way the model's chat template speaks of; None where it speaks of no reasoning."""
        templates = (tokenizer.chat_template or "", tokenizer.tool_template or "")
        if not any(CLOSE in template for template in templates):
            return None
        found = ((mark, tokenizer.special_id(mark)) for mark in (OPEN, CLOSE))
        return cls({mark: token for mark, token in found if token is not None})

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends inside of reasoning, so that the answer begins there."""
        return prompt.rstrip().endswith(OPEN)

    def closed_by(self, prompt: str) -> bool:
        """Whether a prompt ends behind reasoning, so that the answer has none."""
        return prompt.rstrip().endswith(CLOSE)

    def marks(self, *, blanks: bool = True) -> dict[str, str]:
        """Lark rules by name: `open` is OPEN, `blanks` or not before it, `close` all up to CLOSE."""
        spaces = r"\s{0,8}" if blanks else ""
        rules = {
            "open[lazy]": f"/{spaces}{''.join(map(escaped, OPEN))}/",
            "close[lazy]": f"/(?s:.*){''.join(map(escaped, CLOSE))}/",
        }
        if OPEN in self.special:
            del rules["open[lazy]"]
            rules["open"] = f"<[{self.special[OPEN]}]>"
            if blanks:
                rules |= {"open": f"blank? {rules['open']}", "blank": r"/\s{1,8}/"}
        if CLOSE in self.special:
            del rules["close[lazy]"]
            rules |= {"close": f"THOUGHT <[{self.special[CLOSE]}]>", "THOUGHT": "/(?s:.*)/"}
        return rules

    def preamble(self, starts_inside: bool) -> dict[str, str]:
        """Lark rules by name: `preamble` is what `ReasoningSplitter` takes away before a form.

        No blanks stand before OPEN: nothing but OPEN could follow them, and a model that writes a line break
        out of habit would have to think.
        """
        thoughts = "close gap?" if starts_inside else "(open close gap?)?"
        return {"preamble": thoughts, "gap": r"/\n{1,4}/"} | self.marks(blanks=False)


class ReasoningSplitter(Reader[tuple[str, str]]):
    """Splits an answer, as it grows, into reasoning and what the reader is meant to see.

    `starts_inside`: the prompt has opened the reasoning (`Reasoning.opened_by`). Otherwise an answer reasons
    only if it begins with OPEN. Line breaks beside the marks, and white space before OPEN, belong to them.
    Reasoning that nothing closes stays reasoning.
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
            yield from self._thought()
        self._content.append(self._release())
        while self.char:
            self._content.append(self.char)
            yield

    def _thought(self) -> Rule[None]:
        """Reasoning, the mark that closes it, and the line breaks around it."""
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
