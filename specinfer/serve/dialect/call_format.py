"""Tools of a request, and the format in which a model writes calls of them."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specinfer.errors import RequestError
from specinfer.serve.dialect.call_form import FORMS, CallForm
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.chat_template import messages_for_template

_USES_TOOLS = re.compile(r"(?<![\w.])tools\b")
_PARAMETERS = re.compile(r'\\?"parameters\\?": ')  # in a template, where quotes may be escaped
_LETTERS = string.ascii_letters + string.digits

Message = Mapping[str, Any]
_INSTRUCTIONS = """\
You may call functions to answer the user. Here they are, one a line, with JSON schemas of their arguments:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON, in this form, at the end of your answer:
{example}"""
_RESULTS = "\nWhat a function returns is then given to you between <tool_response> and </tool_response>."
_MAY_NAME_OTHERS = frozenset(  # keywords besides `properties` that may allow other names
    [
        *("anyOf", "oneOf", "allOf", "$ref", "$dynamicRef", "$recursiveRef", "if", "patternProperties"),
        *("dependentSchemas", "dependencies", "unevaluatedProperties"),
    ]
)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call, with a JSON schema of its arguments.

    Generated arguments follow the schema. Unsupported parts of it are ignored, or refused if `strict`.
    """

    name: str
    parameters: Mapping[str, Any]  # always the schema of an object
    description: str | None = None
    strict: bool = False

    @property
    def takes_others(self) -> bool:
        """True if arguments may have names other than those of `properties`.

        JSON Schema allows any name unless `additionalProperties` forbids it. Here a schema must mention other
        names, because functions take only declared parameters; vLLM, SGLang and llama.cpp do the same.
        """
        given = self.parameters
        properties = given.get("properties") or {}
        others = given.get("additionalProperties", not properties)
        unnamed = not set(given.get("required", ())) <= set(properties)
        return others is not False or unnamed or not _MAY_NAME_OTHERS.isdisjoint(given)

    @property
    def constrained_parameters(self) -> Mapping[str, Any]:
        """The schema that generated arguments follow, with `additionalProperties` set."""
        return self.parameters if self.takes_others else {**self.parameters, "additionalProperties": False}

    def described(self) -> dict[str, Any]:
        """Return the tool in OpenAI's format, which chat templates read."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether a model may call tools, must call one, or must call a given one."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None  # the only tool it may call

    def among(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return the tools that may be called; raises RequestError if the given one is missing."""
        if self.mode == "none":
            return ()
        found = tuple(tool for tool in tools if self.name in (None, tool.name))
        if self.name is not None and not found:
            names = ", ".join(tool.name for tool in tools)
            raise RequestError(
                f"tool_choice is {self.name!r}; allowed: a name in tools: {names}", "tool_choice"
            )
        return found


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The call format of a model.

    `native`: the chat template describes tools in this format; otherwise `for_template` adds a message.
    `shows_calls`: it writes earlier calls; otherwise `for_template` writes them into the text. `single`: an
    answer has one call at most. `special` has the ids of delimiters that are special tokens. The tokenizer
    must render these in the text, or calls are not found. Other delimiters are plain text.
    """

    name: str  # of a row of FORMS
    native: bool
    shows_calls: bool
    single: bool
    special: Mapping[str, int]

    @property
    def form(self) -> CallForm:
        """How calls are written."""
        return FORMS[self.name]

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str = "auto") -> CallFormat:
        """Return the format of the model's chat template ("auto"), or "hermes" for any template.

        Raises RequestError for another name, or if the template has no supported format.
        """
        template = tokenizer.tool_template or ""
        found = format_in(template)
        has_tools = _USES_TOOLS.search(template) is not None
        if found is None and has_tools and tokenizer.special_id("<|tool_call_start|>") is not None:
            found = "lfm2"  # its own template has the tools alone
        if found == "harmony" and channel_ids(tokenizer) is None:
            found = None
        if name == "auto" and found is None:
            raise RequestError(_no_format(template), "tools")
        allowed = ["auto", *(["hermes"] if found != "harmony" else []), *(filter(None, [found]))]
        if name not in allowed:
            raise RequestError(
                f"the tool format is {name!r}; allowed: {', '.join(dict.fromkeys(allowed))}; auto is "
                "the chat template's own, and a system message describes hermes to any other",
                "tools",
            )
        chosen = found if found is not None and name in ("auto", found) else "hermes"
        is_own = chosen == found
        return cls(
            name=chosen,
            native=is_own and has_tools and chosen != "phi4_list",
            shows_calls=is_own and "tool_calls" in template,
            single=is_own and ("single tool-call" in template or chosen == "harmony"),
            special=_special_ids(FORMS[chosen], tokenizer),
        )

    def new_id(self) -> str:
        """Return a random call id that the model's template accepts."""
        if self.name.startswith("mistral"):  # the template requires nine letters and digits
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def channel_ids(tokenizer: Tokenizer) -> Mapping[str, int] | None:
    """Return the ids of Harmony's marks; None if a model has another form, or does not write them as tokens.

    All but that of a call's end must be special tokens that do not end texts.
    """
    form = FORMS["harmony"]
    ids = _special_ids(form, tokenizer)
    is_whole = {*form.marks} - {*ids} <= {"<|call|>"}
    return ids if is_whole and _first_shown(tokenizer.tool_template or "") == "harmony" else None


def _special_ids(form: CallForm, tokenizer: Tokenizer) -> Mapping[str, int]:
    found = ((mark, tokenizer.special_id(mark)) for mark in form.marks)
    return {mark: i for mark, i in found if i is not None and i not in tokenizer.eos_token_ids}


def format_in(template: str) -> str | None:
    """Return the call format of a chat template; None if it has no tools or an unsupported format.

    DeepSeek's own templates write calls and no tools.
    """
    found = _first_shown(template)
    if not _USES_TOOLS.search(template):
        return found if found is not None and found.startswith("deepseek") else None
    return found if found != "llama3" or _PARAMETERS.search(template) else None


def _first_shown(template: str) -> str | None:
    return next((name for name, form in FORMS.items() if form.is_shown_in(template)), None)


def _no_format(template: str) -> str:
    if not template:
        return "the model has no chat template to describe tools in; leave tools out"
    shown = "writes tool calls in an unsupported format" if _USES_TOOLS.search(template) else "has no tools"
    return (
        f"the model's chat template {shown}; leave tools out, or serve with --call-format hermes: "
        "a system message then describes the tools"
    )


def for_template(
    messages: Sequence[Message], tools: Sequence[Tool], call_format: CallFormat
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Return messages and tools for `ChatEncoder.render`; no tools if a message describes them.

    Raises RequestError, like the template, for malformed messages and earlier calls.
    """
    described = [tool.described() for tool in tools]
    if call_format.native and call_format.shows_calls:
        return list(messages), described
    written: list[Message] = []
    try:
        for message in messages_for_template(messages):
            if message["role"] == "tool" and call_format.name == "hermes":
                _add_result(written, message)
            elif "tool_calls" in message and not call_format.shows_calls:
                written.append(_as_text(message, call_format.form))
            else:
                written.append(message)
        if call_format.native:
            return written, described
        return (_with_instructions(written, described, call_format) if tools else written), []
    except RecursionError:
        raise RequestError("call arguments are nested too deeply; send flatter ones", "messages") from None


def _with_instructions(
    messages: list[Message], tools: Sequence[Mapping[str, Any]], call_format: CallFormat
) -> list[Message]:
    """Add a description of the tools to the system message, or a system message if there is none."""
    first, rest = {"role": "system", "content": ""}, messages
    if messages[0]["role"] == "system":
        first, rest = {**messages[0]}, messages[1:]
    if call_format.name == "phi4_list":  # its template describes the tools of a system message
        functions = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        return [{**first, "tools": functions}, *rest]
    described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    example = call_format.form.written([("function_name", {"argument": "value"})])
    instructions = _INSTRUCTIONS.format(tools=described, example=example)
    if call_format.name == "hermes":
        instructions += _RESULTS
    return [{**first, "content": _joined(first["content"], "\n\n", instructions)}, *rest]


def _as_text(message: Message, form: CallForm) -> Message:
    """Return an assistant's message with its calls written into its text."""
    functions = [call["function"] for call in message["tool_calls"]]
    calls = form.written([(function["name"], function["arguments"]) for function in functions])
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return others | {"content": _joined(message["content"], "\n", calls)}


def _joined(content: str, between: str, text: str) -> str:
    """Append text to a message's content."""
    return f"{content}{between}{text}" if content else text


def _add_result(messages: list[Message], message: Message) -> None:
    """Add a tool's result; consecutive results form one user message."""
    text = f"<tool_response>\n{message['content']}\n</tool_response>"
    last = messages[-1] if messages else {}
    if last.get("role") == "user" and last["content"].startswith("<tool_response>"):
        messages[-1] = {**last, "content": f"{last['content']}\n{text}"}
    else:
        messages.append({"role": "user", "content": text})
