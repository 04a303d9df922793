"""Harmony, the format of gpt-oss: an answer is messages in the channels analysis, commentary and final.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
    <|channel|>final<|message|>...

The prompt ends with `<|start|>assistant`, and an answer with its final message or a call. Analysis is
reasoning, a message to a function is a call, and all others are content. A message to a function that is not
offered is content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from specinfer.sampling_params import ThinkingBudget
from specinfer.serve.dialect.call_form import FORMS, lark_text
from specinfer.serve.dialect.call_format import CallFormat, Tool, channel_ids
from specinfer.serve.dialect.call_parser import (
    ArgumentsPiece,
    CallEnded,
    CallStarted,
    Content,
    Event,
    JsonArguments,
    ReasoningPiece,
)
from specinfer.serve.dialect.reasoning import Reasoning
from specinfer.tokenizer import Rendered, Tokenizer

_BEGIN, _CHANNEL, _KIND, _MESSAGE, _CALL, _END = FORMS["harmony"].marks
_ANALYSIS: Final = "analysis"
_ENDS: Final = re.compile(r"<\|(?:end|call|return|start|channel)\|>")
_CUT: Final = re.compile(r"<(?:\|[a-z]*\|?)?\Z")  # a mark that is not complete
# The beginning of a head, which may name the recipient first, or the end of an answer.
_HEAD: Final = re.compile(r"(?: ?to=[^\s<]*)?<\|(?:start|channel|constrain|message|call|end|return)\|>")


@dataclass(frozen=True, slots=True)
class Channels(Reasoning):
    """Reasoning in the channel analysis. All marks but that of a call's end must be special tokens."""

    open: str = f"{_CHANNEL}{_ANALYSIS}{_MESSAGE}"
    close: str = _END

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Channels | None:
        """Return the channels of a model whose templates and tokens are Harmony's, else None."""
        special = channel_ids(tokenizer)
        return None if special is None else cls(special)

    def state(self, prompt: Rendered) -> tuple[bool, bool]:
        """Return True twice if the answer continues a final message."""
        return bool(prompt.continued), bool(prompt.continued)

    def bound(
        self, tokens: int, prompt: Rendered, tokenizer: Tokenizer, *, calls: bool = False
    ) -> ThinkingBudget:
        """Return the bound of all analysis; the final message follows it, or with `calls` any other one."""
        head = f"{_END}{_BEGIN}assistant{'' if calls else f'{_CHANNEL}final{_MESSAGE}'}"
        beginnings = [_ANALYSIS[: size + 1] for size in range(len(_ANALYSIS) if calls else 0)]
        return ThinkingBudget(
            tokens=tokens,
            open=self.open,
            close=self.close,
            ending=tuple(tokenizer.encode(head, add_special=False)),
            repeats=True,
            head=_CHANNEL,
            # The grammar of calls leaves other channels, so the model cannot open analysis again and again.
            barred=tuple(sorted({tokenizer.encode(text, add_special=False)[0] for text in beginnings})),
        )

    def preamble_rules(self, starts_inside: bool) -> dict[str, str]:
        """Return Lark rules by name: `preamble` is all that precedes a form in the final message."""
        return {"preamble": "(analysis next)* final"} | self.message_rules()

    def message_rules(self) -> dict[str, str]:
        """Return Lark rules by name: messages without their ends, and `next`, which begins another one."""
        return {
            "analysis": f"{self._text(f'{_CHANNEL}analysis{_MESSAGE}')} TEXT",
            "note": f"{self._text(f'{_CHANNEL}commentary{_MESSAGE}')} TEXT",
            "final": f"{self._text(f'{_CHANNEL}final')} kind? {self._text(_MESSAGE)}",
            "kind": f'" "? {self._text(f"{_KIND}json")} | " json"',
            "next": self._text(f"{_END}{_BEGIN}assistant"),
            "TEXT": "/(?s:.*)/",
        }

    def call_rule(self, name: str, arguments: str) -> str:
        """Return an expression for a call of a function; `arguments` is the name of a rule."""
        to, end = f" to=functions.{name}", f"{self._text(_CALL)}?" if _CALL in self.special else ""
        heads = self._text(f"{_CHANNEL}commentary{to}"), self._text(f"{to}{_CHANNEL}commentary")
        return f"({' | '.join(heads)}) kind? {self._text(_MESSAGE)} {arguments} {end}"

    def _text(self, text: str) -> str:
        return lark_text(text, self.special)


class ChannelParser:
    """Finds reasoning, content and calls of these tools in an answer, however it is cut into pieces.

    `starts_inside`: the prompt has opened the final message. A line is left free between messages of content.
    """

    def __init__(self, call_format: CallFormat | None, tools: Sequence[Tool], starts_inside: bool) -> None:
        self.calls = 0  # number of started calls
        self._format = call_format
        names = "|".join(re.escape(tool.name) for tool in tools) or "(?!)"
        self._recipient = re.compile(rf"to=functions\.({names})(?=[\s<]|\Z)")
        self._held = ""  # text whose meaning is not known yet
        self._kind: type[ReasoningPiece | Content] | None = Content if starts_inside else None  # of a body
        self._reader: JsonArguments | None = None  # while a call has begun
        self._spoke = False  # there was content

    @property
    def reasons(self) -> bool | None:
        """True within reasoning, None between messages."""
        if self._kind is None and self._reader is None:
            return None
        return self._kind is ReasoningPiece

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        """Parse more text and return its events; `last` ends the answer."""
        self._held += text
        found: list[Event] = []
        while (events := self._next(last)) is not None:
            found += events
        if last and self._reader is not None:
            found.append(CallEnded(self.calls - 1, complete=False))
        return found

    def _next(self, last: bool) -> list[Event] | None:
        """Read the next part and return its events; None if more text is needed."""
        if self._reader is not None:
            return self._arguments(self._reader)
        return self._head(last) if self._kind is None else self._body(self._kind, last)

    def _head(self, last: bool) -> list[Event] | None:
        """Read the head of a message, and choose its kind."""
        head, found, body = self._held.partition(_MESSAGE)
        call = self._recipient.search(head) if self._format is not None else None
        if not found or (call is not None and not body.strip() and not last):
            is_text = last and self._held and not _HEAD.match(self._held)  # an answer without channels
            return [Content(self._take(len(self._held)))] if is_text else None
        self._held = body
        if call is None or self._format is None or not body.lstrip().startswith("{"):
            self._kind = ReasoningPiece if f"{_CHANNEL}analysis" in head else Content
            return [Content("\n\n")] if self._spoke and self._kind is Content else []
        self._reader = JsonArguments()
        self.calls += 1
        return [CallStarted(self.calls - 1, self._format.new_id(), call[1])]

    def _body(self, kind: type[ReasoningPiece | Content], last: bool) -> list[Event] | None:
        """Read text of reasoning or content."""
        end, cut = _ENDS.search(self._held), _CUT.search(self._held)
        stop = end or (None if last else cut)
        text = self._take(len(self._held) if stop is None else stop.start())
        self._kind = None if end else kind
        self._spoke |= kind is Content and text != ""
        return [kind(text)] if text else [] if end else None

    def _arguments(self, reader: JsonArguments) -> list[Event] | None:
        piece = reader.feed(self._take(len(self._held)))
        events: list[Event] = [ArgumentsPiece(self.calls - 1, piece)] if piece else []
        if reader.done:
            self._held, self._reader = reader.held, None
            events.append(CallEnded(self.calls - 1))
        return events or None

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken
