"""Grammars that constrain answers to a call format: calls are complete, and arguments follow their schemas.

An answer is free text until the start of a call is complete. If the start is a special token, that token ends
the free text; otherwise a lazy rule ends at its first occurrence. Reasoning comes first and may contain any
text, including the start of a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from specinfer.errors import RequestError
from specinfer.grammar.lark import escaped, json_rule, lark_of
from specinfer.serve.dialect.call_format import (
    ARGS,
    CALL_ID,
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    PYTHON_TAG,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
    CallFormat,
    Tool,
    ToolChoice,
)
from specinfer.serve.dialect.dialect import Reasoning
from specinfer.serve.dialect.tagged_calls import given_values, has_types_only, schemas_of, types_of
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
    lark = _Lark(choice.among(tools), call_format.special, several, whitespace)
    written = lark.written(call_format, choice.mode == "auto", reasoning, starts_inside, form)
    if len(written) > MAX_SOURCE:
        raise RequestError(
            f"the schemas of tools make a grammar of {len(written)} characters; allowed: at most "
            f"{MAX_SOURCE}; give fewer tools, or smaller schemas",
            "tools",
        )
    return written


class _Lark:
    """Rules of one request's grammar, by name. `special` has the ids of the special delimiters."""

    def __init__(
        self, tools: Sequence[Tool], special: Mapping[str, int], several: bool, whitespace: JsonWhitespace
    ) -> None:
        self._whitespace = whitespace
        self._tools = tools
        self._special = special
        self._several = several
        self._rules: dict[str, str] = {}

    def written(
        self,
        call_format: CallFormat,
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
        match call_format.name:
            case "hermes":
                calls = self._delimited(free, self._objects("arguments"))
            case "qwen3_coder":
                calls = self._delimited(free, self._functions())
            case "llama3":
                calls = self._llama3(free, as_json=optional and form is not None and form.is_json)
            case "mistral":
                calls = self._mistral(free)
            case "mistral_args":
                calls = self._mistral_args(free, call_format.with_ids)
        self._rules["calls"] = calls
        self._rules["answer"] = f"calls | {self._any_text()}" if free else "calls"
        self._rules["start"] = self._start(free, reasoning, starts_inside)
        if optional and form is not None:
            if call_format.name == "llama3" and form.is_json:
                form = self._without_calls(form)
            self._rules["form"] = f"%lark {{\n{lark_of(form)}\n}}"  # its rule names are separate
            self._rules["answer"] += " | form"
        return "\n".join(f"{name}: {body}" for name, body in self._rules.items())

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

    def _delimited(self, free: bool, item: str) -> str:
        first = self._up_to("before", TOOL_CALL) if free else self._delimiter(TOOL_CALL)
        self._rules["call"] = f'"\\n" item "\\n" {self._delimiter(TOOL_CALL_END)}'
        self._rules["item"] = item
        return f"{first} call" + self._more(f'"\\n" {self._delimiter(TOOL_CALL)} call')

    def _llama3(self, free: bool, *, as_json: bool) -> str:
        """Calls that are JSON objects; with `as_json`, answers may be other objects, too."""
        self._rules["item"] = self._json_objects() if as_json else self._objects("parameters")
        more = self._more('";" " "? item')
        if not free:
            return "item" + more
        # Answers in other JSON must stay free: a call starts when its name is complete.
        options = []
        for index, tool in enumerate(self._tools):
            name = escaped(json.dumps(tool.name))
            begin = rf'\s{{0,8}}\{{ ?("type": ?"function", ?)?"name": ?{name}, ?"parameters":'
            self._rules[f"begin{index}[lazy]"] = f"/{begin}/"
            options.append(f'begin{index} " "? {self._arguments(index)} "}}"')
        self._rules["first"] = " | ".join(options)
        tag = self._special.get(PYTHON_TAG)
        return (f"(first | <[{tag}]> item)" if tag is not None else "first") + more

    def _mistral(self, free: bool) -> str:
        first = self._up_to("before", TOOL_CALLS) if free else self._delimiter(TOOL_CALLS)
        self._rules["item"] = self._objects("arguments")
        return f'{first} " "? "[" item' + self._more('", " item') + ' "]"'

    def _mistral_args(self, free: bool, with_ids: bool) -> str:
        first = self._up_to("before", TOOL_CALLS) if free else self._delimiter(TOOL_CALLS)
        args = self._delimiter(ARGS)
        if with_ids:
            args = f"{self._delimiter(CALL_ID)} /[a-zA-Z0-9]{{9}}/ {args}"
        self._rules["item"] = " | ".join(
            f"{json.dumps(tool.name)} {args} {self._arguments(index)}"
            for index, tool in enumerate(self._tools)
        )
        return f"{first} item" + self._more(f"{self._delimiter(TOOL_CALLS)} item")

    def _more(self, call: str) -> str:
        return f" ({call})*" if self._several else ""

    def _objects(self, key: str) -> str:
        """Calls as objects, with the white space of templates."""
        options = []
        for index, tool in enumerate(self._tools):
            begin = f'{{"name": {json.dumps(tool.name)}, "{key}": '
            options.append(f'{json.dumps(begin)} {self._arguments(index)} "}}"')
        return " | ".join(options)

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

    def _functions(self) -> str:
        """Calls whose arguments are between tags."""
        options = []
        for index, tool in enumerate(self._tools):
            required = tool.parameters.get("required", ())
            parts = [_quoted(f"{FUNCTION}{tool.name}>\n")]
            for number, (name, schema) in enumerate(schemas_of(tool).items()):
                value = self._value(tool, f"value{index}_{number}", schema)
                part = f"{_quoted(f'{PARAMETER}{name}>')} {value}"
                parts.append(part if name in required else f"({part})?")
            if tool.takes_others:
                parts.append(f'({_quoted(PARAMETER)} /[^>\\n]+/ ">" {self._value(tool, "", {"not": {}})})*')
            options.append(" ".join([*parts, _quoted(FUNCTION_END)]))
        return " | ".join(options)

    def _value(self, tool: Tool, name: str, schema: Mapping[str, Any]) -> str:
        """A value and its closing tag: one of given texts, JSON, or any text."""
        types, end = types_of(schema), _quoted(f"\n{PARAMETER_END}\n")
        texts = given_values(schema)
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
            self._rules["text[lazy]"] = f"/\\n(?s:.*)\\n{escaped(PARAMETER_END)}/"
            return 'text "\\n"'
        return f'"\\n" {name} {end}'

    def _arguments(self, index: int) -> str:
        tool, name = self._tools[index], f"arguments{index}"
        self._rules[name] = json_rule(
            tool.constrained_parameters, strict=tool.strict, whitespace=self._whitespace
        )
        return name

    def _any_text(self) -> str:
        self._rules["TEXT"] = "/(?s:.*)/"
        return "TEXT"

    def _delimiter(self, text: str) -> str:
        token = self._special.get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"

    def _up_to(self, name: str, delimiter: str) -> str:
        """Any text up to and including the first delimiter."""
        if delimiter in self._special:
            return f"{self._any_text()} {self._delimiter(delimiter)}"
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


def _quoted(text: str) -> str:
    """Quote a text for Lark."""
    return json.dumps(text, ensure_ascii=False)
