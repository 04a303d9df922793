"""The grammar that holds an answer to a call format: calls are whole, and their arguments follow schemas.

It is lazy: an answer is free text until the beginning of a call is complete. Where the beginning is a special
token, that token ends the free text; where it is text, a lazy rule ends at its first occurrence. Reasoning
comes first and may hold anything, the beginning of a call, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from specinfer.errors import RequestError
from specinfer.grammar.gbnf import escaped
from specinfer.grammar.lark import json_rule
from specinfer.serve.reasoning import CLOSE, OPEN, Reasoning
from specinfer.serve.tools.call_format import (
    ARGS,
    CALL_ID,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
    CallFormat,
)
from specinfer.serve.tools.tool import Tool, ToolChoice
from specinfer.structured_output import MAX_SOURCE


def call_grammar(
    call_format: CallFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool = True,
    reasoning: Reasoning | None = None,
    starts_inside: bool = False,
) -> str | None:
    """A Lark grammar for answers that may, or must, call tools; None where nothing holds the answer.

    `parallel`: an answer may have several calls. `reasoning` is how the model thinks, if it does, and
    `starts_inside` whether its answer begins there. Raises RequestError when the schemas are too long.
    """
    callable_tools = choice.among(tools)
    if choice.mode == "none" or not callable_tools:
        return None
    several = parallel and not call_format.single and choice.name is None
    marks = {**call_format.special, **(reasoning.special if reasoning else {})}
    lark = _Lark(callable_tools, marks, several)
    lark.write(call_format, choice.mode == "auto", reasoning is not None, starts_inside)
    written = lark.text()
    if len(written) > MAX_SOURCE:
        raise RequestError(
            f"the schemas of tools make a grammar of {len(written)} characters; allowed: at most "
            f"{MAX_SOURCE}; give fewer tools, or smaller schemas",
            "tools",
        )
    return written


class _Lark:
    """Rules by name, the grammar of one request. `special` are the marks that are special tokens."""

    def __init__(self, tools: Sequence[Tool], special: Mapping[str, int], several: bool) -> None:
        self._tools = tools
        self._special = special
        self._several = several
        self._rules: dict[str, str] = {}

    def text(self) -> str:
        """The grammar as Lark."""
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())

    def write(self, call_format: CallFormat, free: bool, thinks: bool, starts_inside: bool) -> None:
        """Write the rule `start`; an answer that is `free` may be text alone, or have text before calls."""
        self._rules["start"] = ""  # stands first
        match call_format.name:
            case "hermes":
                calls = self._hermes(free)
            case "llama3":
                calls = self._llama3(free)
            case "mistral":
                calls = self._mistral(free)
            case "mistral_args":
                calls = self._mistral_args(free, call_format.with_ids)
        self._rules["calls"] = calls
        self._rules["answer"] = f"calls | {self._any_text()}" if free else "calls"
        self._rules["start"] = self._start(free, thinks, starts_inside)

    def _start(self, free: bool, thinks: bool, starts_inside: bool) -> str:
        if not thinks:
            return "answer"
        closed = self._up_to("close", CLOSE)
        # A free answer has its line breaks already; and reasoning that is cut off is an answer, too.
        self._rules["thought"] = f"{closed} answer | {self._any_text()}" if free else f"{closed} gap? answer"
        if not free:
            self._rules["gap"] = r"/\n{1,4}/"
        if starts_inside:
            return "thought"
        return f"{self._first('open', OPEN)} thought | answer"

    def _hermes(self, free: bool) -> str:
        first = self._up_to("before", TOOL_CALL) if free else self._mark(TOOL_CALL)
        self._rules["call"] = f'"\\n" item "\\n" {self._mark(TOOL_CALL_END)}'
        self._rules["item"] = self._objects("arguments")
        return f"{first} call" + self._more(f'"\\n" {self._mark(TOOL_CALL)} call')

    def _llama3(self, free: bool) -> str:
        self._rules["item"] = self._objects("parameters")
        more = self._more('";" " "? item')
        if not free:
            return "item" + more
        # An answer that is JSON but no call must stay free: a call begins when its name is complete.
        options = []
        for index, tool in enumerate(self._tools):
            name = "".join(map(escaped, json.dumps(tool.name)))
            begin = rf'\s{{0,8}}\{{ ?("type": ?"function", ?)?"name": ?{name}, ?"parameters":'
            self._rules[f"begin{index}[lazy]"] = f"/{begin}/"
            options.append(f'begin{index} " "? {self._arguments(index)} "}}"')
        self._rules["first"] = " | ".join(options)
        tag = self._special.get(PYTHON_TAG)
        return (f"(first | <[{tag}]> item)" if tag is not None else "first") + more

    def _mistral(self, free: bool) -> str:
        first = self._up_to("before", TOOL_CALLS) if free else self._mark(TOOL_CALLS)
        self._rules["item"] = self._objects("arguments")
        return f'{first} " "? "[" item' + self._more('", " item') + ' "]"'

    def _mistral_args(self, free: bool, with_ids: bool) -> str:
        first = self._up_to("before", TOOL_CALLS) if free else self._mark(TOOL_CALLS)
        args = self._mark(ARGS)
        if with_ids:
            args = f"{self._mark(CALL_ID)} /[a-zA-Z0-9]{{9}}/ {args}"
        self._rules["item"] = " | ".join(
            f"{json.dumps(tool.name)} {args} {self._arguments(index)}"
            for index, tool in enumerate(self._tools)
        )
        return f"{first} item" + self._more(f"{self._mark(TOOL_CALLS)} item")

    def _more(self, call: str) -> str:
        return f" ({call})*" if self._several else ""

    def _objects(self, key: str) -> str:
        """Calls as objects, written as templates write them."""
        options = []
        for index, tool in enumerate(self._tools):
            begin = f'{{"name": {json.dumps(tool.name)}, "{key}": '
            options.append(f'{json.dumps(begin)} {self._arguments(index)} "}}"')
        return " | ".join(options)

    def _arguments(self, index: int) -> str:
        tool, name = self._tools[index], f"arguments{index}"
        self._rules[name] = json_rule(tool.parameters, strict=tool.strict)
        return name

    def _any_text(self) -> str:
        self._rules["TEXT"] = "/(?s:.*)/"
        return "TEXT"

    def _mark(self, mark: str) -> str:
        token = self._special.get(mark)
        return json.dumps(mark) if token is None else f"<[{token}]>"

    def _up_to(self, name: str, mark: str) -> str:
        """Any text and the first `mark` in it."""
        if mark in self._special:
            return f"{self._any_text()} {self._mark(mark)}"
        self._rules[f"{name}[lazy]"] = f"/(?s:.*){''.join(map(escaped, mark))}/"
        return name

    def _first(self, name: str, mark: str) -> str:
        """A `mark` with white space before it; where free text is possible too, it is the mark."""
        if mark in self._special:
            return self._mark(mark)
        self._rules[f"{name}[lazy]"] = rf"/\s{{0,8}}{''.join(map(escaped, mark))}/"
        return name
