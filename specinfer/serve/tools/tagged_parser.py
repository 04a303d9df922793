"""TaggedCallParser: calls whose arguments stand between tags, as Qwen3-Coder writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from specinfer.serve.reader import Rule
from specinfer.serve.tools.call_format import (
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    CallFormat,
)
from specinfer.serve.tools.call_parser import CallParser, NoCallError
from specinfer.serve.tools.tagged_arguments import TYPES, json_of, schemas_of, types_of
from specinfer.serve.tools.tool import Tool


def call_parser(
    call_format: CallFormat, tools: Sequence[Tool], new_id: Callable[[], str] | None = None
) -> CallParser:
    """A parser of the format's calls of these tools."""
    if call_format.name == "qwen3_coder":
        return TaggedCallParser(call_format, tools, new_id)
    return CallParser(call_format, [tool.name for tool in tools], new_id)


class TaggedCallParser(CallParser):
    """Finds such calls; arguments go out as JSON, texts among them as they are written.

    The schemas say which values are texts. What is no JSON where only JSON may be goes out as a string.
    """

    def __init__(
        self, call_format: CallFormat, tools: Sequence[Tool], new_id: Callable[[], str] | None = None
    ) -> None:
        super().__init__(call_format, [tool.name for tool in tools], new_id)
        self._types = {
            tool.name: {name: types_of(schema) for name, schema in schemas_of(tool).items()} for tool in tools
        }

    def _call(self) -> Rule[None]:
        yield from self._expect(FUNCTION)
        name = self._known((yield from self._name()))
        self._start(name)
        try:
            yield from self._parameters(self._types[name])
        except NoCallError:
            self._stop(complete=False)
            raise
        self._stop(complete=True)

    def _parameters(self, types: dict[str, frozenset[str]]) -> Rule[None]:
        between = "{"
        while True:
            yield from self._spaces()
            yield from self._expect("<")
            if self.char == FUNCTION_END[1]:
                break
            yield from self._expect(PARAMETER[1:])
            key = yield from self._name()
            if self.char == "\n":
                yield from self._hold()
            self._drop()
            self._say(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value(types.get(key, TYPES))
            between = ", "
        yield from self._expect(FUNCTION_END[1:])
        self._drop()
        self._say("{}" if between == "{" else "}")

    def _value(self, types: frozenset[str]) -> Rule[None]:
        """A value and the tag behind it; one line break before the tag belongs to it."""
        is_text = types == {"string"}
        kept: list[str] = []
        if is_text:
            self._say('"')
        while True:
            if self.char == "\n":
                yield from self._hold()
            if self.char == PARAMETER_END[0] and (yield from self._literal(PARAMETER_END)):
                self._drop()
                self._say('"' if is_text else json_of("".join(kept), types))
                return
            if not self.char:
                raise NoCallError
            is_plain = self.char not in ("\n", PARAMETER_END[0])
            more = self._release() + (self.char if is_plain else "")
            if is_text:
                self._say(json.dumps(more, ensure_ascii=False)[1:-1])
            else:
                kept.append(more)
            if is_plain:
                yield

    def _name(self) -> Rule[str]:
        """Up to the end of a tag."""
        name: list[str] = []
        while self.char != ">":
            if self.char in ("", "\n"):
                raise NoCallError
            name.append(self.char)
            yield from self._hold()
        yield from self._hold()
        return "".join(name)
