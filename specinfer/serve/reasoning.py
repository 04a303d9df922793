"""Reasoning: what a model writes between <think> and </think> before it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specinfer.grammar.gbnf import escaped
from specinfer.serve.reader import Reader, Rule

if TYPE_CHECKING:
    from specinfer.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How a model marks its reasoning: between OPEN and CLOSE, at the start of its answer.

    `special` are the ids of those marks that are special tokens of the model; the others are text.
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

    @property
    def visible_token_ids(self) -> tuple[int, ...]:
        """Special tokens that have to stand in a text for it to be split."""
        return tuple(self.special.values())

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


class ReasoningSplitter(Reader):
    """Splits an answer, as it grows, into reasoning and what the reader is meant to see.

    `starts_inside`: the prompt has opened the reasoning (`Reasoning.opened_by`). Otherwise an answer reasons
    only if it begins with OPEN. Line breaks beside the marks, and white space before OPEN, belong to them.
    """

    def __init__(self, starts_inside: bool) -> None:
        super().__init__()
        self._inside = starts_inside
        self._reasoning: list[str] = []
        self._content: list[str] = []

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning and the content that are certain now and were not before."""
        self._read(text)
        return self._take()

    def finish(self) -> tuple[str, str]:
        """The rest of both, at the end of the answer; reasoning that nothing closed stays reasoning."""
        self._end()
        return self._take()

    def _take(self) -> tuple[str, str]:
        taken = "".join(self._reasoning), "".join(self._content)
        self._reasoning.clear()
        self._content.clear()
        return taken

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
