"""CallParser: finds text and tool calls in an answer while it is generated, and returns them as events.

Answers follow the grammar of their calls (`call_grammar`), so the parser knows where each part ends. It holds
back text that may be the start of a call until the next characters decide. A call starts when its name is
complete and its arguments have started; they are returned unchanged, piece by piece.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from specinfer.serve.dialect.call_format import (
    ARGS,
    CALL_ID,
    DELIMITERS,
    FUNCTION,
    PYTHON_TAG,
    TOOL_CALLS,
    CallFormat,
    FormatName,
    Tool,
)

_SIGNS: Final = re.compile(r'["{}]|\\.?', re.DOTALL)  # JSON signs that start or end a string or an object
_MAX_HEAD: Final = 256  # characters of a call before its arguments, without its name


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """New text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """New text of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """Start of a tool call; `index` counts the calls of an answer from 0."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """New text of a call's arguments, which form a JSON object together."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """End of a call's arguments; `complete` is False if they break off."""

    index: int
    complete: bool = True


Event = ReasoningPiece | Content | CallStarted | ArgumentsPiece | CallEnded


def certain(text: str, mark: str, blanks: str | None = None) -> int:
    """Return the length of a text without an end that may belong to `mark`, or to `blanks` before it.

    `blanks` are characters; None stands for all white space.
    """
    begun = next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)
    return len(text[: len(text) - begun].rstrip(blanks))


class CallParser:
    """Finds the calls of these tools in an answer of one format, however the answer is cut into pieces.

    White space before a call is dropped. A call that breaks off before its arguments is content, or is
    dropped after other calls, because an answer has no content after its calls.
    """

    def __init__(self, call_format: CallFormat, tools: Sequence[Tool]) -> None:
        self.calls = 0  # number of started calls
        self._format = call_format
        # The text before the first call; calls of llama3 are the whole answer.
        self._mark = None if call_format.name == "llama3" else DELIMITERS[call_format.name][0]
        self._held = ""  # text whose meaning is not known yet
        self._inside = False  # within the arguments of a call
        self._depth = 0  # of open objects in JSON arguments
        self._quoted = self._escaped = False
        names = "|".join(re.escape(tool.name) for tool in tools)
        calls, call_id, args = map(re.escape, (TOOL_CALLS, CALL_ID, ARGS))
        heads: dict[FormatName, str] = {
            "qwen3_coder": rf"{FUNCTION}({names})>",
            "mistral_args": rf"{calls}({names})(?:{call_id}\w+)?{args}(?=\{{)",
        }
        kind = r'(?:"type"\s*:\s*"function"\s*,\s*)?'
        usual = rf'\{{\s*{kind}"name"\s*:\s*"({names})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
        head = heads.get(call_format.name, usual)
        self._head = re.compile(head)  # the text of a call before its arguments
        opening = "" if self._mark is None or head.startswith(calls) else rf"{re.escape(self._mark)}[\s\[]*"
        self._first = re.compile(rf"\s*{opening}{head}")  # the same of the first call, with its mark
        self._longest = _MAX_HEAD + max((len(tool.name) for tool in tools), default=0)
        # All beginnings of an answer of llama3 that has calls, without white space.
        self._beginnings = [
            f'{tag}{{{kind}"name":"{tool.name}","parameters":{{'
            for tool in tools
            for tag in ("", PYTHON_TAG)
            for kind in ("", '"type":"function",')
        ]

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        """Parse more text and return its events; `last` ends the answer."""
        self._held += text
        content = "" if self.calls else self._content(last)
        calls = self._found()
        if last and self._inside:
            calls.append(CallEnded(self.calls - 1, complete=False))
        elif last and not self.calls:
            content += self._held
        return [Content(content), *calls] if content else calls

    def _content(self, last: bool) -> str:
        """Take the text that belongs to no call; a mark without a call is text."""
        if self._mark is not None:
            at, limit = self._held.find(self._mark), 0 if last else self._longest
            while at >= 0 and len(self._held) - at > limit and not self._first.match(self._held, at):
                at = self._held.find(self._mark, at + 1)
            size = certain(self._held, self._mark) if at < 0 else len(self._held[:at].rstrip())
        else:
            begun = "".join(self._held.split())
            if not any(one.startswith(begun) or begun.startswith(one) for one in self._beginnings):
                self._beginnings = []  # all further text is content, too
            size = 0 if self._beginnings else len(self._held)
        return self._take(size)

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _found(self) -> list[Event]:
        """Return the events of calls."""
        found: list[Event] = []
        while True:
            if not self._inside:
                by_mark = self._mark is not None and not self.calls
                head = (self._first.match if by_mark else self._head.search)(self._held)
                if head is None:
                    self._held = self._held[-self._longest :] if self.calls else self._held
                    return found
                self._take(head.end())
                found.append(CallStarted(self.calls, self._format.new_id(), head[1]))
                self.calls += 1
                self._inside = True
                self._start(head[1])
            if piece := self._arguments():
                found.append(ArgumentsPiece(self.calls - 1, piece))
            if self._inside:
                return found
            found.append(CallEnded(self.calls - 1))

    def _start(self, name: str) -> None:
        """Prepare for the arguments of a call of that tool."""

    def _arguments(self) -> str:
        """Take arguments and return them as JSON text; at their end `_inside` becomes False."""
        size = len(self._held)
        at, self._escaped = int(self._escaped and size > 0), self._escaped and not size
        for found in _SIGNS.finditer(self._held, at):
            sign = found[0]
            self._escaped = sign == "\\"  # the last character; the next one is part of the escape
            self._quoted ^= sign == '"'
            if sign in ("{", "}") and not self._quoted:
                self._depth += 1 if sign == "{" else -1
                if not self._depth:
                    self._inside, size = False, found.end()
                    break
        return self._take(size)
