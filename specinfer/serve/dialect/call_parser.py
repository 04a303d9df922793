"""CallParser: finds text and tool calls in an answer while it is generated, and returns them as events.

Answers follow the grammar of their calls (`call_grammar`), so the parser knows where each part ends. It holds
back text that may be the start of a call until the next characters decide. A call starts when its name is
complete and its arguments have started; they are returned as JSON, piece by piece.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from specinfer.serve.dialect.call_form import BARE_BEGIN, BARE_NAMED, ID, NAME, PYTHON_TAG, Tags
from specinfer.serve.dialect.call_format import CallFormat, Tool

_SIGNS: Final = re.compile(r'["{}]|\\.?', re.DOTALL)  # JSON signs that start or end a string or an object
_MAX_HEAD: Final = 256  # characters of a call before its arguments, without its name
_JSON_HEAD: Final = (
    rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"{NAME}"\s*,'
    r'\s*"(?:KEYS)"\s*:\s*(?=\{)'
)


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


class ArgumentsReader(ABC):
    """Reads the arguments of one call as they come, up to their end, and returns them as JSON text."""

    def __init__(self) -> None:
        self.held = ""  # text that is not read yet; after the end, all that follows the arguments
        self.done = False

    def feed(self, text: str) -> str:
        """Take more text and return the arguments in it, unless they have ended."""
        self.held += text
        return "" if self.done else self._read()

    @abstractmethod
    def _read(self) -> str:
        """Read from `held` what is certain; at the end of the arguments `done` becomes True."""

    def _take(self, size: int) -> str:
        taken, self.held = self.held[:size], self.held[size:]
        return taken


class JsonArguments(ArgumentsReader):
    """Reads arguments that are a JSON object."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0  # of open objects
        self._quoted = self._escaped = False

    def _read(self) -> str:
        size = len(self.held)
        at, self._escaped = int(self._escaped and size > 0), self._escaped and not size
        for found in _SIGNS.finditer(self.held, at):
            sign = found[0]
            self._escaped = sign == "\\"  # the last character; the next one is part of the escape
            self._quoted ^= sign == '"'
            if sign in ("{", "}") and not self._quoted:
                self._depth += 1 if sign == "{" else -1
                if not self._depth:
                    self.done, size = True, found.end()
                    break
        return self._take(size)


class CallParser:
    """Finds the calls of these tools in an answer of one format, however the answer is cut into pieces.

    With `bare`, an answer that begins as one JSON object with a tool's name and arguments, in a fence or
    without, is a call in every format. White space before a call is dropped. A call that breaks off before
    its arguments is content, or is dropped after other calls, because an answer has no content after its
    calls. `arguments` makes a reader of arguments for a tool's name.
    """

    def __init__(
        self,
        call_format: CallFormat,
        tools: Sequence[Tool],
        arguments: Callable[[str], ArgumentsReader],
        *,
        bare: bool = True,
    ) -> None:
        self.calls = 0  # number of started calls
        self._format, form = call_format, call_format.form
        self._new_reader = arguments
        self._reader: ArgumentsReader | None = None  # while a call has begun
        self._mark = form.mark  # the first call follows it; calls without it are the whole answer
        self._held = ""  # text whose meaning is not known yet
        names = [tool.name for tool in tools]
        self._longest = _MAX_HEAD + max(map(len, names), default=0)
        named = f"({'|'.join(map(re.escape, names))})"
        # Beside a structured answer only Llama 3's own form is a call.
        keys = ("arguments", "parameters") if bare or form.mark else ("parameters",)
        json_head = _JSON_HEAD.replace(NAME, named).replace("KEYS", "|".join(keys))
        head = _expression(form.head).replace(re.escape(NAME), named).replace(re.escape(ID), r"\w+")
        if form.arguments is None:
            head = json_head if form.head.startswith("{") else head + r"(?=\{)"
        elif isinstance(form.arguments, Tags):
            head += r"(?=\s*<)"
        if form.mark:
            begin = rf"{_expression(form.mark)}[\s\[]*"
        else:  # as `_beginnings` have it
            tag = rf"(?:{re.escape(PYTHON_TAG)}\s*)?" if form.arguments is None else ""
            begin = rf"{tag}{re.escape(form.open)}\s*"
        self._first = re.compile(rf"\s*{begin}{head}")
        self._next = re.compile(rf"{_expression(form.between)}{head}")
        self._bare = re.compile(rf"{BARE_BEGIN}{named}{BARE_NAMED} ?(?=\{{)" if bare else "(?!)")
        # All beginnings, without white space, of answers whose calls have no mark.
        fences = ["", "```", "```json"] if bare else [] if form.mark else [""]
        self._beginnings = [
            f'{begin}{{{kind}"name":"{name}","{key}":{{'
            for begin in [*fences, *([] if form.mark else [PYTHON_TAG])]
            for kind in ("", '"type":"function",')
            for name in names
            for key in keys
        ]
        if not form.mark and form.arguments is not None:
            self._beginnings += [f"[{name}(" for name in names]

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        """Parse more text and return its events; `last` ends the answer."""
        self._held += text
        content = "" if self.calls else self._content(last)
        calls = self._found()
        if last and self._reader is not None:
            calls.append(CallEnded(self.calls - 1, complete=False))
        elif last and not self.calls:
            content += self._held
        return [Content(content), *calls] if content else calls

    def _content(self, last: bool) -> str:
        """Take the text that belongs to no call; a mark without a call is text."""
        if self._beginnings:
            begun = "".join(self._held.split())
            is_short = len(self._held) <= self._longest
            if self._bare.match(self._held) or (not self._mark and self._first.match(self._held)):
                return ""
            if is_short and any(one.startswith(begun) or begun.startswith(one) for one in self._beginnings):
                return ""
            self._beginnings = []  # the answer has begun otherwise
        if not self._mark:
            return self._take(len(self._held))
        at, limit = self._held.find(self._mark), 0 if last else self._longest
        while at >= 0 and len(self._held) - at > limit and not self._first.match(self._held, at):
            at = self._held.find(self._mark, at + 1)
        return self._take(certain(self._held, self._mark) if at < 0 else len(self._held[:at].rstrip()))

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken

    def _found(self) -> list[Event]:
        """Return the events of calls."""
        found: list[Event] = []
        while True:
            if self._reader is None:
                head = self._head()
                if head is None:
                    self._held = self._held[-self._longest :] if self.calls else self._held
                    return found
                self._take(head.end())
                found.append(CallStarted(self.calls, self._format.new_id(), head[1]))
                self.calls += 1
            assert self._reader is not None
            if piece := self._reader.feed(self._take(len(self._held))):
                found.append(ArgumentsPiece(self.calls - 1, piece))
            if not self._reader.done:
                return found
            self._held, self._reader = self._reader.held, None
            found.append(CallEnded(self.calls - 1))

    def _head(self) -> re.Match[str] | None:
        """Find the next call, and make the reader of its arguments."""
        if self.calls:
            head = self._next.search(self._held)
        elif self._beginnings and (bare := self._bare.match(self._held)):
            self._reader = JsonArguments()
            return bare
        else:
            head = self._first.match(self._held)
        if head is not None:
            self._reader = self._new_reader(head[1])
        return head


def _expression(text: str) -> str:
    """Return an expression for a part of a form, with any white space where it has some."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))
