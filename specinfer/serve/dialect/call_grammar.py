"""Grammars that constrain answers to a call format: calls are complete, and arguments follow their schemas.

An answer is free text until the start of a call is complete. If the start is a special token, that token ends
the free text; otherwise a lazy rule ends at its first occurrence. An answer may also begin as a JSON object
with a tool's name, which is then a call in every format. Reasoning comes first and may contain any text,
including the start of a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from specinfer.errors import RequestError
from specinfer.grammar.lark import escaped, json_rule, lark_of
from specinfer.serve.dialect.call_form import (
    BARE_BEGIN,
    BARE_NAMED,
    BLANKS,
    ID,
    NAME,
    PYTHON_TAG,
    CallForm,
    Notation,
    Tags,
    lark_text,
)
from specinfer.serve.dialect.call_format import CallFormat, Tool, ToolChoice
from specinfer.serve.dialect.channels import Channels
from specinfer.serve.dialect.reasoning import Reasoning
from specinfer.serve.dialect.tagged_calls import given_values, has_types_only, schemas_of, types_of
from specinfer.serve.dialect.written_values import ValueRules
from specinfer.structured_output import MAX_SOURCE, JsonWhitespace, OutputKind, StructuredOutput

_MAX_EXCLUDED: Final = 400  # characters of names; another text may diverge from them at each


def call_grammar(
    call_format: CallFormat,
    tools: Sequence[Tool],
    choice: ToolChoice,
    *,
    parallel: bool = True,
    reasoning: Reasoning | None = None,
    starts_inside: bool = False,
    form: StructuredOutput | None = None,
    whitespace: JsonWhitespace = "bounded",
) -> str:
    """Return a Lark grammar for answers that may, or must, call tools; `choice` allows one of them at least.

    `parallel`: an answer may have several calls. `reasoning` has the model's delimiters, None if it does not
    reason; `starts_inside` is True if its answer starts within the reasoning. `form` constrains answers
    without calls: an answer is then either calls or the form, without further text. `whitespace` is allowed
    between the parts of arguments. Raises RequestError if the schemas are too long.
    """
    several = parallel and not call_format.single and choice.name is None
    lark = _Lark(choice.among(tools), call_format, several, whitespace)
    written = lark.written(choice.mode == "auto", reasoning, starts_inside, form)
    _check_size(len(written))
    return written


def _check_size(size: int) -> None:
    if size > MAX_SOURCE:
        raise RequestError(
            f"the schemas of tools make a grammar of {size} characters or more; allowed: at most "
            f"{MAX_SOURCE}; give fewer tools, or smaller schemas",
            "tools",
        )


class _Rules(dict[str, str]):
    """Rules by name; raises RequestError as soon as those that are set make too long a grammar."""

    _size = 0

    def __setitem__(self, name: str, body: str) -> None:
        self._size += len(body) - len(self.get(name, ""))
        _check_size(self._size)
        super().__setitem__(name, body)


class _Lark:
    """Rules of one request's grammar, by name."""

    def __init__(
        self, tools: Sequence[Tool], call_format: CallFormat, several: bool, whitespace: JsonWhitespace
    ) -> None:
        self._whitespace = whitespace
        self._tools = tools
        self._form: CallForm = call_format.form
        self._special = call_format.special
        self._several = several
        self._rules = _Rules()

    def written(
        self,
        optional: bool,
        reasoning: Reasoning | None,
        starts_inside: bool,
        form: StructuredOutput | None,
    ) -> str:
        """Return the grammar in Lark; if calls are `optional`, an answer may be the form, or any text.

        Without a form, text may also precede calls.
        """
        free = optional and form is None
        self._rules["start"] = ""  # the first rule
        if isinstance(reasoning, Channels):
            self._channels(reasoning, optional, form, starts_inside)
        else:
            self._rules["calls"] = self._calls(free, form if optional else None)
            self._rules["answer"] = "calls"
            if free:
                begun = f"begin ({'calls | ' if self._form.mark else ''}TEXT)"
                begun += " | first TEXT" if "first[lazy]" in self._rules else ""
                self._rules["answer"] = f"calls | {self._any_text()} | {self._bare()} | {begun}"
            self._rules["start"] = self._start(free, reasoning, starts_inside)
        if optional and form is not None:
            if not self._form.mark and self._form.arguments is None and form.is_json:
                form = self._without_calls(form)
            self._rules["form"] = f"%lark {{\n{lark_of(form)}\n}}"  # its rule names are separate
            if not isinstance(reasoning, Channels):
                self._rules["answer"] += " | form"
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())

    def _channels(
        self, channels: Channels, optional: bool, form: StructuredOutput | None, starts_inside: bool
    ) -> None:
        """Messages in channels; the last one is a call, or the final message."""
        options = [
            channels.call_rule(tool.name, self._arguments(index)) for index, tool in enumerate(self._tools)
        ]
        self._rules |= channels.message_rules() | {"calls": " | ".join(options)}
        if optional and form is not None:
            start = "form | TEXT next calls" if starts_inside else "(analysis next)* (calls | final form)"
        elif optional:
            last = "(analysis next | note next)* (analysis | note | final TEXT | calls)"
            start = f"TEXT (next {last})?" if starts_inside else last
        else:
            start = f"{'TEXT next ' if starts_inside else ''}(analysis next)* calls"
        self._rules["start"] = start

    def _start(self, free: bool, reasoning: Reasoning | None, starts_inside: bool) -> str:
        if reasoning is None:
            return "answer"
        if not free:
            self._rules |= reasoning.preamble_rules(starts_inside)
            return "preamble answer"
        # Free text includes the line breaks, and an answer may end within its reasoning.
        self._rules |= reasoning.delimiter_rules()
        self._rules["reasoning"] = f"close answer | {self._any_text()}"
        return "reasoning" if starts_inside else "open reasoning | answer"

    def _calls(self, free: bool, form: StructuredOutput | None) -> str:
        """The calls of a form, with the text before them if `free`."""
        this = self._form
        if not this.mark and this.arguments is None and form is not None and form.is_json:
            self._rules["item"] = self._json_objects()
        else:
            self._rules["item"] = self._items()
        between, close = self._text(this.between, blanks=True), self._text(this.close, blanks=True)
        more = (f" ({between} item)*" if self._several else "") + (f" {close}" if close else "")
        if this.mark:
            first = self._up_to("before", this.mark) if free else self._text(this.mark)
            return f"{first} {self._text(this.open, blanks=True)} item{more}"
        if not free:
            return f"{self._text(this.open, blanks=True)} item{more}"
        if this.arguments is None:
            tag = self._special.get(PYTHON_TAG)
            return (f"({self._bare()} | <[{tag}]> item)" if tag is not None else f"({self._bare()})") + more
        # The text stays free until a name is complete.
        options = []
        for index, tool in enumerate(self._tools):
            self._rules[f"called{index}[lazy]"] = f"/{escaped(this.head.replace(NAME, tool.name))}/"
            options.append(f"called{index} {self._arguments(index)} {self._text(this.tail)}")
        self._rules["first[lazy]"] = rf"/\s{{0,8}}{escaped(this.open)}/"
        return f"first ({' | '.join(options)}){more}"

    def _items(self) -> str:
        """Calls without what is between them."""
        options = []
        for index, tool in enumerate(self._tools):
            before, with_id, after = self._form.head.replace(NAME, tool.name).partition(ID)
            head = self._text(before) + (f" /[a-zA-Z0-9]{{9}}/ {self._text(after)}" if with_id else "")
            tail = self._text(self._form.tail, blanks=True)
            options.append(f"{head} {self._arguments(index)} {tail}")
        return " | ".join(options)

    def _bare(self) -> str:
        """One call as a JSON object, in a fence or without; the text is free until its name is complete.

        One rule begins the objects of all tools: the lexer would be too large with one for each.
        """
        options = []
        for index, tool in enumerate(self._tools):
            self._rules[f"name{index}[lazy]"] = f"/{escaped(tool.name)}{BARE_NAMED}/"
            options.append(f'name{index} " "? {self._json_arguments(index)}')
        self._rules["begin[lazy]"] = f"/{BARE_BEGIN}/"
        self._rules["bare_end"] = rf"/{BLANKS}\}}(\n{{1,2}}```)?/"
        self._rules["bare"] = f"({' | '.join(options)}) bare_end"
        return "begin bare"

    def _json_objects(self) -> str:
        """Calls as objects, with any JSON formatting."""
        options = []
        for index, tool in enumerate(self._tools):
            call = {"name": {"const": tool.name}, "parameters": tool.constrained_parameters}
            name = f"call{index}"
            self._rules[name] = json_rule(
                {"type": "object", "properties": call, "required": list(call), "additionalProperties": False},
                strict=tool.strict,
                whitespace=self._whitespace,
            )
            options.append(name)
        return " | ".join(options)

    def _without_calls(self, form: StructuredOutput) -> StructuredOutput:
        """Exclude from a JSON form the objects that would be read as calls, unless the names are too long."""
        schema = json.loads(form.source) if form.kind is OutputKind.JSON_SCHEMA else {"type": "object"}
        names = [tool.name for tool in self._tools]
        if sum(map(len, names)) > _MAX_EXCLUDED:
            return form
        other: list[Mapping[str, Any]] = [{"type": ["null", "boolean", "number", "array", "object"]}]
        other.append({"type": "string", "pattern": _other_texts(names)})
        no_call = [{"properties": {"name": {"anyOf": other}}}, {"properties": {"parameters": False}}]
        schema["allOf"] = [*schema.get("allOf", ()), {"anyOf": no_call}]
        return replace(form, kind=OutputKind.JSON_SCHEMA, source=json.dumps(schema))

    def _arguments(self, index: int) -> str:
        """The name of a rule for the arguments of a tool."""
        tool, name = self._tools[index], f"arguments{index}"
        match self._form.arguments:
            case Tags() as tags:
                self._rules[name] = self._tagged(tool, tags, name)
            case Notation() as notation:
                values = ValueRules(notation, self._rules, self._special, self._whitespace)
                self._rules[name] = values.arguments(tool, name)
            case None:
                return self._json_arguments(index)
        return name

    def _json_arguments(self, index: int) -> str:
        tool, name = self._tools[index], f"json{index}"
        self._rules[name] = json_rule(
            tool.constrained_parameters, strict=tool.strict, whitespace=self._whitespace
        )
        return name

    def _tagged(self, tool: Tool, tags: Tags, name: str) -> str:
        """Arguments between tags."""
        before, after = (self._text(text, blanks=True) for text in (tags.before, tags.after))
        required = tool.parameters.get("required", ())
        parts = []
        for number, (key, schema) in enumerate(schemas_of(tool).items()):
            value = self._value(tool, tags, f"{name}_{number}", schema)
            part = f"{before} {self._text(key)} {after} {value}"
            parts.append(part if key in required else f"({part})?")
        if tool.takes_others:
            parts.append(f"({before} /[^<>\\n]+/ {after} {self._value(tool, tags, '', {'not': {}})})*")
        return " ".join(parts) or '""'

    def _value(self, tool: Tool, tags: Tags, name: str, schema: Mapping[str, Any]) -> str:
        """A value and its closing tag: one of given texts, JSON, or any text."""
        types, texts = types_of(schema), given_values(schema)
        if types == {"string"} and texts:
            self._rules[name] = f"/{'|'.join(map(escaped, texts))}/"
        elif "string" not in types:
            self._rules[name] = json_rule(schema, strict=tool.strict, whitespace=self._whitespace)
        elif tool.strict and not has_types_only(schema):
            raise RequestError(
                f"the function {tool.name} is strict, but this model writes strings without quotes, so their "
                "schemas cannot be enforced; allowed: type, enum and const of strings; or leave strict out",
                "tools",
            )
        else:
            end = tags.end.rstrip()
            return f"{self._up_to('text', end)} {self._text(tags.end.removeprefix(end))}"
        return f"{name} {self._text(tags.end)}"

    def _any_text(self) -> str:
        self._rules["TEXT"] = "/(?s:.*)/"
        return "TEXT"

    def _text(self, text: str, *, blanks: bool = False) -> str:
        return lark_text(text, self._special, blanks=blanks)

    def _up_to(self, name: str, delimiter: str) -> str:
        """Any text up to and including the first delimiter."""
        if delimiter in self._special:
            return f"{self._any_text()} {self._text(delimiter)}"
        self._rules[f"{name}[lazy]"] = f"/(?s:.*){escaped(delimiter)}/"
        return name


def _other_texts(names: Sequence[str]) -> str:
    """An expression for all texts but the names: each option diverges from them, or stops short."""
    following: dict[str, set[str]] = {}  # for each beginning of a name, the characters that continue it
    for name in names:
        for length in range(len(name) + 1):
            following.setdefault(name[:length], set()).update(name[length : length + 1])
    options = [escaped(beginning) for beginning in following if beginning not in names]
    for beginning, characters in following.items():
        others = f"[^{escaped(''.join(sorted(characters)))}]"
        options.append(f"{escaped(beginning)}{others}[^]*")
    return f"^(?:{'|'.join(options)})$"
