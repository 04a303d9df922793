"""Tools of a request, and formats in which models write calls of them.

    hermes        <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>, one below the other; text may
                  precede them (Hermes, Qwen2.5, Qwen3)
    qwen3_coder   <tool_call>\n<function=f>\n<parameter=name>\nvalue\n</parameter>\n</function>\n</tool_call>,
                  at the same positions as hermes; a value is plain text or JSON (Qwen3-Coder, Qwen3.5)
    llama3        {"name": "f", "parameters": {...}} as the whole answer, several with ";" between them
    mistral       [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...] at the end of the answer
    mistral_args  [TOOL_CALLS]f[ARGS]{...}, one after the other, at the end of the answer

The format in a chat template is the one that the model was trained on.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specinfer.errors import RequestError
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.chat_template import messages_for_template

FormatName = Literal["hermes", "qwen3_coder", "llama3", "mistral", "mistral_args"]

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
# The first delimiter of a format starts its calls.
DELIMITERS: Mapping[FormatName, tuple[str, ...]] = {
    "hermes": (TOOL_CALL, TOOL_CALL_END),
    "qwen3_coder": (TOOL_CALL, TOOL_CALL_END),
    "llama3": (PYTHON_TAG,),
    "mistral": (TOOL_CALLS,),
    "mistral_args": (TOOL_CALLS, CALL_ID, ARGS),
}

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
{example}
What a function returns is then given to you between <tool_response> and </tool_response>."""
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

    `native`: the chat template describes tools in this format; otherwise it is hermes, and `for_template`
    adds a message. `single`: the template accepts one call per answer. `with_ids`: it writes ids of calls
    before arguments. `special` has the ids of delimiters that are special tokens. The tokenizer must render
    these in the text, or calls are not found. Other delimiters are plain text.
    """

    name: FormatName
    native: bool
    single: bool
    with_ids: bool
    special: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str = "auto") -> CallFormat:
        """Return the format of the model's chat template ("auto"), or "hermes" for any template.

        Raises RequestError for another name, or if the template has no supported format.
        """
        template = tokenizer.tool_template or ""
        found = format_in(template)
        if name == "auto" and found is None:
            raise RequestError(_no_format(template), "tools")
        if name not in ("auto", "hermes", found):
            raise RequestError(
                f"the tool format is {name!r}; allowed: auto, or hermes, which a system message describes",
                "tools",
            )
        chosen = found if found is not None and name in ("auto", found) else "hermes"
        native = chosen == found
        found_ids = ((text, tokenizer.special_id(text)) for text in DELIMITERS[chosen])
        return cls(
            name=chosen,
            native=native,
            single=native and "single tool-call" in template,
            with_ids=native and CALL_ID in template,
            special={text: token for text, token in found_ids if token is not None},
        )

    def new_id(self) -> str:
        """Return a random call id that the model's template accepts."""
        if self.name in ("mistral", "mistral_args"):  # the template requires nine letters and digits
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def format_in(template: str) -> FormatName | None:
    """Return the call format of a chat template; None if it has no tools or an unsupported format."""
    if not _USES_TOOLS.search(template):
        return None
    if TOOL_CALLS in template:
        return "mistral_args" if ARGS in template else "mistral"
    if TOOL_CALL in template and "arguments" in template:
        if FUNCTION in template:
            return "qwen3_coder" if PARAMETER in template else None
        return None if "<arg_key>" in template else "hermes"
    if "<|start_header_id|>" in template and _PARAMETERS.search(template):
        return "llama3"
    return None


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
    if call_format.native:
        return list(messages), [tool.described() for tool in tools]
    written: list[Message] = []
    try:
        for message in messages_for_template(messages):
            if message["role"] == "tool":
                _add_result(written, message)
            elif "tool_calls" in message:
                written.append(_as_text(message))
            else:
                written.append(message)
        return (_with_instructions(written, tools) if tools else written), []
    except RecursionError:
        raise RequestError("call arguments are nested too deeply; send flatter ones", "messages") from None


def _with_instructions(messages: list[Message], tools: Sequence[Tool]) -> list[Message]:
    """Add a description of the tools to the system message, or a system message if there is none."""
    described = "\n".join(json.dumps(tool.described(), ensure_ascii=False) for tool in tools)
    instructions = _INSTRUCTIONS.format(
        tools=described, example=_call("function_name", {"argument": "value"})
    )
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": instructions}, *messages]
    return [{**first, "content": _joined(first["content"], "\n\n", instructions)}, *messages[1:]]


def _as_text(message: Message) -> Message:
    """Return an assistant's message with its calls written into its text."""
    functions = [call["function"] for call in message["tool_calls"]]
    calls = "\n".join(_call(function["name"], function["arguments"]) for function in functions)
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return others | {"content": _joined(message["content"], "\n", calls)}


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    """Write a call as Hermes does."""
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{TOOL_CALL}\n{written}\n{TOOL_CALL_END}"


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
