"""Reasoning at the start of an answer: its delimiters, the rules for it, and its split from the content."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from specinfer.grammar.lark import escaped
from specinfer.sampling_params import ThinkingBudget
from specinfer.serve.dialect.call_form import lark_text, marks_in
from specinfer.serve.dialect.call_parser import certain
from specinfer.tokenizer import Rendered, Tokenizer

OPEN, CLOSE = "<think>", "</think>"
_DELIMITERS: Final = ((OPEN, CLOSE), ("<|channel>thought", "<channel|>"))  # the second ones are Gemma 4's


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning between `open` and `close` at the start of an answer.

    `special` has the ids of delimiters that are special tokens. The tokenizer must render these in the text,
    or the reasoning is not found. Other delimiters are plain text.
    """

    special: Mapping[str, int] = field(default_factory=dict)
    open: str = OPEN
    close: str = CLOSE

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Reasoning | None:
        """Return the delimiters of the model's chat templates; None if they have no reasoning."""
        templates = (tokenizer.chat_template or "", tokenizer.tool_template or "")
        for opening, close in _DELIMITERS:
            if any(close in template for template in templates):
                found = ((text, tokenizer.special_id(text)) for text in marks_in(opening, close))
                return cls({text: token for text, token in found if token is not None}, opening, close)
        return None

    def state(self, prompt: Rendered) -> tuple[bool, bool]:
        """Return whether an answer to the prompt starts inside reasoning, and whether it has none."""
        start, end = prompt.continued, prompt.text.rstrip()
        opened = end.endswith(self.open) or start.rfind(self.open) > start.rfind(self.close)
        return opened, end.endswith(self.close) or (bool(start.strip()) and not opened)

    def bound(
        self, tokens: int, prompt: Rendered, tokenizer: Tokenizer, *, calls: bool = False
    ) -> ThinkingBudget | None:
        """Return the bound of the reasoning in an answer to the prompt; None if the answer has none.

        With `calls` the answer may call tools.
        """
        opened, closed = self.state(prompt)
        if closed and not opened:
            return None
        ending = tuple(tokenizer.encode_behind(self.close))
        return ThinkingBudget(tokens=tokens, open=self.open, close=self.close, ending=ending, started=opened)

    def splitter(self, starts_inside: bool) -> ReasoningSplitter:
        """Return a splitter of one answer."""
        return ReasoningSplitter(starts_inside, self.open, self.close)

    def delimiter_rules(self, *, blanks: bool = True) -> dict[str, str]:
        """Return Lark rules by name: `open`, after blanks if `blanks`, and `close`, all text up to it."""
        spaces = r"\s{0,8}" if blanks else ""
        rules = {
            "open[lazy]": f"/{spaces}{escaped(self.open)}/",
            "close[lazy]": f"/(?s:.*){escaped(self.close)}/",
        }
        if any(mark in self.special for mark in marks_in(self.open)):
            del rules["open[lazy]"]
            rules["open"] = lark_text(self.open, self.special)
            if blanks:
                rules |= {"open": f"blank? {rules['open']}", "blank": r"/\s{1,8}/"}
        if self.close in self.special:
            del rules["close[lazy]"]
            rules |= {"close": f"REASONING {lark_text(self.close, self.special)}", "REASONING": "/(?s:.*)/"}
        return rules

    def preamble_rules(self, starts_inside: bool) -> dict[str, str]:
        """Return Lark rules by name: `preamble` is the reasoning that precedes a form.

        No blanks are allowed before `open`. Only it could follow them, which would force a model to reason
        because it wrote a line break.
        """
        reasoning = "close gap?" if starts_inside else "(open close gap?)?"
        return {"preamble": reasoning, "gap": r"/\n{1,4}/"} | self.delimiter_rules(blanks=False)


class ReasoningSplitter:
    """Splits an answer incrementally into reasoning and content, however it is cut into pieces.

    `starts_inside`: the prompt has opened the reasoning. Otherwise an answer has reasoning only if it starts
    with the opening delimiter. Line breaks next to the delimiters and white space before the first one are
    dropped. Reasoning that is not closed extends to the end of the answer.
    """

    def __init__(self, starts_inside: bool, opening: str = OPEN, close: str = CLOSE) -> None:
        self._open, self._close = opening, close
        self._held = ""  # text whose meaning is not known yet
        self._part: Literal["start", "inside", "content"] = "inside" if starts_inside else "start"
        self._begins = True  # the next line breaks follow a delimiter

    @property
    def reasons(self) -> bool | None:
        """True within reasoning, None before it is known whether there is some."""
        return None if self._part == "start" else self._part == "inside"

    def feed(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Take more text; returns new reasoning and content. `last` ends the answer."""
        self._held += text
        if self._part == "start":
            begun = self._held.lstrip()
            if begun.startswith(self._open):
                self._part, self._held = "inside", begun.removeprefix(self._open)
            elif last or not self._open.startswith(begun):
                self._part, self._begins = "content", False
        reasoning = self._reasoning(last) if self._part == "inside" else ""
        return reasoning, self._rest() if self._part == "content" else ""

    def _reasoning(self, last: bool) -> str:
        found, closed, rest = self._rest().partition(self._close)
        if closed:
            self._part, self._held, self._begins = "content", rest, True
            return found.rstrip("\n")
        size = len(found) if last else certain(found, self._close, "\n")
        self._held = found[size:]
        return found[:size]

    def _rest(self) -> str:
        """Take the held text, without line breaks that follow a delimiter."""
        taken, self._held = self._held.lstrip("\n") if self._begins else self._held, ""
        self._begins = self._begins and not taken
        return taken
