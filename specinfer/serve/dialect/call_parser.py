"""Incremental parser of text and tool calls in an answer.

It holds back text that may be the start of a call until the next characters decide. A call starts when its
name is complete and its arguments have started; other text is content. Arguments are returned unchanged,
piece by piece.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection

from specinfer.serve.dialect.call_format import (
    ARGS,
    CALL_ID,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
    CallFormat,
)
from specinfer.serve.dialect.reader import (
    ArgumentsPiece,
    CallEnded,
    CallStarted,
    Content,
    Event,
    Reader,
    Rule,
)

_CLOSERS = {"{": "}", "[": "]"}
_BETWEEN = frozenset(" \t\r\n,:+-.")  # in JSON outside of strings, besides letters, digits, brackets


class NoCallError(Exception):
    """The text since the last call is not a call."""


class CallParser(Reader[list[Event]]):
    """Finds the calls in an answer of one format, in linear time; no text makes it raise.

    `names` are the tools that may be called; a call of another tool is content. `new_id` returns the id of a
    call. White space around calls is dropped. A call that breaks off before its arguments is content, or is
    dropped after other calls, because an answer has no content after its calls.
    """

    def __init__(
        self, call_format: CallFormat, names: Collection[str], new_id: Callable[[], str] | None = None
    ) -> None:
        super().__init__()
        self._format = call_format.name
        self._names = frozenset(names)
        self._new_id = new_id or call_format.new_id
        self._events: list[Event] = []
        self._pieces: list[str] = []  # text that is not yet an event
        self._of_call = False  # True if they are arguments of the last call, False for content
        self.calls = 0  # number of started calls

    def _take(self) -> list[Event]:
        self._flush()
        taken, self._events = self._events, []
        return taken

    def _flush(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if text:
            self._events.append(ArgumentsPiece(self.calls - 1, text) if self._of_call else Content(text))

    def _emit(self, text: str) -> None:
        self._pieces.append(text)

    def _start(self, name: str) -> None:
        self._drop()
        self._flush()
        self._events.append(CallStarted(self.calls, self._new_id(), name))
        self.calls += 1
        self._of_call = True

    def _stop(self, complete: bool) -> None:
        self._flush()
        self._events.append(CallEnded(self.calls - 1, complete))
        self._of_call = False

    def _text(self) -> Rule[None]:
        match self._format:
            case "hermes" | "qwen3_coder":
                yield from self._anywhere(TOOL_CALL, self._delimited)
            case "mistral" | "mistral_args":
                yield from self._anywhere(TOOL_CALLS, self._mistral)
            case "llama3":
                yield from self._from_the_start(self._llama3)

    def _anywhere(self, delimiter: str, calls: Callable[[], Rule[None]]) -> Rule[None]:
        """Text with calls after each `delimiter`."""
        while self.char:
            yield from self._spaces()
            if self.char != delimiter[0]:
                if self.char:
                    self._emit(self._release() + self.char)
                    yield
            elif (yield from self._literal(delimiter)):
                yield from self._try(calls)
            elif self.char or not self.calls:
                self._emit(self._release())
        if not self.calls:  # after calls, drop the held white space or start of a call
            self._emit(self._release())

    def _from_the_start(self, calls: Callable[[], Rule[None]]) -> Rule[None]:
        """Only calls, or only text."""
        yield from self._spaces()
        if self.char:
            yield from self._try(calls)
        if self.char or not self.calls:
            self._emit(self._release())
        while self.char:
            self._emit(self.char)
            yield

    def _try(self, calls: Callable[[], Rule[None]]) -> Rule[None]:
        try:
            yield from calls()
        except NoCallError:
            if self.char or not self.calls:
                self._emit(self._release())
            self._drop()  # an incomplete call at the end of the answer

    def _delimited(self) -> Rule[None]:
        yield from self._spaces()
        yield from self._call()
        yield from self._spaces()
        yield from self._expect(TOOL_CALL_END)
        self._drop()

    def _call(self) -> Rule[None]:
        """One call between delimiters."""
        yield from self._object()

    def _llama3(self) -> Rule[None]:
        if self.char == PYTHON_TAG[0]:
            yield from self._expect(PYTHON_TAG)
            yield from self._spaces()
        yield from self._objects(";")

    def _mistral(self) -> Rule[None]:
        yield from self._spaces()
        if self.char != "[":
            yield from self._named_arguments()
            return
        yield from self._hold()
        yield from self._spaces()
        yield from self._objects(",")
        yield from self._expect("]")
        self._drop()

    def _named_arguments(self) -> Rule[None]:
        """name[ARGS]{...}; an id may stand before [ARGS]."""
        name: list[str] = []
        while self.char and self.char not in "[{" and not self.char.isspace():
            name.append(self.char)
            yield from self._hold()
        if self.char == "[":
            yield from self._hold()
            if self.char == CALL_ID[1]:
                yield from self._expect(CALL_ID[1:])
                while self.char.isalnum():
                    yield from self._hold()
                yield from self._expect("[")
            yield from self._expect(ARGS[1:])
        yield from self._spaces()
        self._known("".join(name))
        yield from self._stream("".join(name))

    def _objects(self, between: str) -> Rule[None]:
        """Calls with separators, and the white space after them."""
        yield from self._object()
        yield from self._spaces()
        while self.char == between:
            yield from self._hold()
            yield from self._spaces()
            yield from self._object()
            yield from self._spaces()

    def _object(self) -> Rule[None]:
        """{"name": ..., "arguments": {...}}, with its keys in any order."""
        name = arguments = None
        called = False
        yield from self._expect("{")
        while True:
            yield from self._spaces()
            key = yield from self._string()
            yield from self._spaces()
            yield from self._expect(":")
            yield from self._spaces()
            if key == "name" and name is None:
                name = self._known((yield from self._string()))
                if arguments is not None:
                    self._start(name)
                    self._emit(arguments)
                    self._stop(complete=True)
                    called = True
            elif key in ("arguments", "parameters") and arguments is None and not called:
                if name is None:
                    kept: list[str] = []
                    yield from self._braces(kept.append, hold=True)
                    arguments = "".join(kept)
                else:
                    yield from self._stream(name)
                    called = True
            elif key in ("type", "id"):
                yield from self._string()
            else:
                raise NoCallError
            yield from self._spaces()
            if self.char != ",":
                break
            yield from self._hold()
        if not called:
            raise NoCallError
        yield from self._expect("}")
        self._drop()

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise NoCallError
        return name

    def _stream(self, name: str) -> Rule[None]:
        """Arguments, which are emitted at once."""
        if self.char != "{":
            raise NoCallError
        self._start(name)
        try:
            yield from self._braces(self._emit, hold=False)
        except NoCallError:
            self._stop(complete=False)
            raise
        self._stop(complete=True)

    def _braces(self, keep: Callable[[str], None], hold: bool) -> Rule[None]:
        """Read up to the matching brace; the content must look like JSON, but is not parsed."""
        if self.char != "{":
            raise NoCallError
        closers: list[str] = []
        quoted = escaped = False
        while True:
            char = self.char
            if not char:
                raise NoCallError
            if quoted:
                quoted = escaped or char != '"'
                escaped = not escaped and char == "\\"
            elif char == '"':
                quoted = True
            elif char in _CLOSERS:
                closers.append(_CLOSERS[char])
            elif char == closers[-1]:
                closers.pop()
            elif not (char.isalnum() or char in _BETWEEN):
                raise NoCallError
            keep(char)
            if hold:
                yield from self._hold()
            else:
                yield
            if not closers:
                return

    def _string(self) -> Rule[str]:
        """The value of a JSON string."""
        raw: list[str] = []
        quoted, escaped = True, False
        while quoted:
            if self.char in ("", "\n") or (not raw and self.char != '"'):
                raise NoCallError
            quoted = not raw or escaped or self.char != '"'
            escaped = not escaped and self.char == "\\"
            raw.append(self.char)
            yield from self._hold()
        try:
            return str(json.loads("".join(raw)))
        except ValueError:
            raise NoCallError from None

    def _expect(self, text: str) -> Rule[None]:
        if not (yield from self._literal(text)):
            raise NoCallError
