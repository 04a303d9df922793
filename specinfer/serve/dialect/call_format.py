"""CallFormat: how a model writes the calls it makes.

    hermes        <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>, one below the other; text may
                  come before (Hermes, Qwen2.5, Qwen3)
    qwen3_coder   <tool_call>\n<function=f>\n<parameter=name>\nvalue\n</parameter>\n</function>\n</tool_call>,
                  where hermes has its calls; a value is a text as it is, or JSON (Qwen3-Coder, Qwen3.5)
    llama3        {"name": "f", "parameters": {...}} as the whole answer, several with ";" between them
    mistral       [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...] at the end of the answer
    mistral_args  [TOOL_CALLS]f[ARGS]{...}, one after the other, at the end of the answer

A chat template that writes calls shows which of them the model was trained on.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from specinfer.errors import RequestError
from specinfer.serve.dialect.tool import Tool
from specinfer.tokenizer import Tokenizer
from specinfer.tokenizer.chat_template import messages_for_template

FormatName = Literal["hermes", "qwen3_coder", "llama3", "mistral", "mistral_args"]
FORMAT_NAMES: tuple[FormatName, ...] = get_args(FormatName)
ALIASES: Mapping[str, FormatName] = {"qwen": "hermes"}

TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MARKS: Mapping[FormatName, tuple[str, ...]] = {
    "hermes": (TOOL_CALL, TOOL_CALL_END),
    "qwen3_coder": (TOOL_CALL, TOOL_CALL_END),
    "llama3": (PYTHON_TAG,),
    "mistral": (TOOL_CALLS,),
    "mistral_args": (TOOL_CALLS, CALL_ID, ARGS),
}

_KNOWS_TOOLS = re.compile(r"(?<![\w.])tools\b")
_PARAMETERS = re.compile(r'\\?"parameters\\?": ')  # in a template, its quotes escaped or not
_LETTERS = string.ascii_letters + string.digits

Message = Mapping[str, Any]
_EXAMPLE = ("function_name", {"argument": "value"})
_TELLS = """\
You may call functions to answer the user. Here they are, one a line, with JSON schemas of their arguments:
<tools>
{tools}
</tools>
{how}:
{example}
What a function returns is then given to you between <tool_response> and </tool_response>."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The form of the calls of one model, and what of it the model's own template takes part in.

    `native`: the template tells the model of tools in this form; otherwise a system message has to
    (conversation.py). `single`: it writes earlier answers with one call only, so that an answer may not have
    more. `with_ids`: it puts a call's id before its arguments. `special` are the ids of those marks that are
    special tokens of the model, and have to stand in a text for its calls to be found; the others are text.
    """

    name: FormatName
    native: bool
    single: bool
    with_ids: bool
    special: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, name: str = "auto") -> CallFormat:
        """The form the model's chat template writes calls in ("auto"), or the one of that name.

        Raises RequestError when there is no form of that name, or the template shows none that is known here.
        """
        template = tokenizer.tool_template or ""
        found = format_in(template)
        chosen = ALIASES.get(name, name)
        if chosen == "auto":
            if found is None:
                raise RequestError(_why_none(template), "tools")
            chosen = found
        if chosen not in FORMAT_NAMES:
            names = ", ".join(("auto", *FORMAT_NAMES, *ALIASES))
            raise RequestError(f"the tool format is {name!r}; allowed: {names}", "tools")
        native = chosen == found
        marks = ((mark, tokenizer.special_id(mark)) for mark in _MARKS[chosen])
        return cls(
            name=chosen,
            native=native,
            single=native and "single tool-call" in template,
            with_ids=native and CALL_ID in template,
            special={mark: token for mark, token in marks if token is not None},
        )

    def new_id(self) -> str:
        """A random id for a call, such as the model's template accepts."""
        if self.name in ("mistral", "mistral_args"):  # nine letters and digits, or the template refuses it
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def format_in(template: str) -> FormatName | None:
    """The form in which a chat template writes calls; None when it knows no tools, or another form."""
    if not _KNOWS_TOOLS.search(template):
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


def _why_none(template: str) -> str:
    if not template:
        return "the model has no chat template, by which it could learn of tools; leave tools out"
    shown = (
        "writes tool calls in a form that is not supported"
        if _KNOWS_TOOLS.search(template)
        else "knows no tools"
    )
    return (
        f"the model's chat template {shown}; leave tools out, or serve with --call-format and one of "
        f"{', '.join(FORMAT_NAMES)}: a system message then tells the model of tools"
    )


def for_template(
    messages: Sequence[Message], tools: Sequence[Tool], call_format: CallFormat
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Messages and tools for `ChatEncoder.render`; no tools where a message tells of them.

    Raises RequestError, as the template would, on messages and earlier calls of the wrong shape.
    """
    if call_format.native:
        return list(messages), [tool.described() for tool in tools]
    written: list[Message] = []
    try:
        for message in messages_for_template(messages):
            if message["role"] == "tool":
                _add_result(written, message)
            elif "tool_calls" in message:
                written.append(_as_text(message, call_format.name))
            else:
                written.append(message)
        return (_told(written, tools, call_format.name) if tools else written), []
    except RecursionError:
        raise RequestError("arguments of a call nest too deep; send flatter ones", "messages") from None


def _told(messages: list[Message], tools: Sequence[Tool], name: FormatName) -> list[Message]:
    """The conversation with a system message that tells of tools, or with one that tells of them as well."""
    how = "To call one, answer with nothing but this, its name and its arguments as JSON"
    if name == "qwen3_coder":
        how = "To call one, write its name and its arguments in this form, at the end of your answer"
    elif name != "llama3":
        how = "To call one, write its name and its arguments as JSON, in this form, at the end of your answer"
    tells = _TELLS.format(
        tools="\n".join(json.dumps(tool.described(), ensure_ascii=False) for tool in tools),
        how=how,
        example=_calls([_EXAMPLE], name),
    )
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": tells}, *messages]
    return [{**first, "content": _joined(first["content"], "\n\n", tells)}, *messages[1:]]


def _as_text(message: Message, name: FormatName) -> Message:
    """An assistant's message whose calls are part of its text."""
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    others = {key: value for key, value in message.items() if key != "tool_calls"}
    return others | {"content": _joined(message["content"], "\n", _calls(calls, name))}


def _joined(content: str, between: str, text: str) -> str:
    """A message's content with more text behind it."""
    return f"{content}{between}{text}" if content else text


def _add_result(messages: list[Message], message: Message) -> None:
    """Add what a tool returned; results one after the other are one message of the user."""
    text = f"<tool_response>\n{message['content']}\n</tool_response>"
    last = messages[-1] if messages else {}
    if last.get("role") == "user" and last["content"].startswith("<tool_response>"):
        messages[-1] = {**last, "content": f"{last['content']}\n{text}"}
    else:
        messages.append({"role": "user", "content": text})


def _calls(calls: Sequence[tuple[str, Mapping[str, Any]]], name: FormatName) -> str:
    """Calls as a model writes them."""
    key = "parameters" if name == "llama3" else "arguments"
    objects = [json.dumps({"name": called, key: given}, ensure_ascii=False) for called, given in calls]
    match name:
        case "hermes":
            return "\n".join(f"{TOOL_CALL}\n{written}\n{TOOL_CALL_END}" for written in objects)
        case "qwen3_coder":
            return "\n".join(_function(called, given) for called, given in calls)
        case "llama3":
            return "; ".join(objects)
        case "mistral":
            return f"{TOOL_CALLS} [{', '.join(objects)}]"
        case "mistral_args":
            pairs = [(called, json.dumps(given, ensure_ascii=False)) for called, given in calls]
            return "".join(f"{TOOL_CALLS}{called}{ARGS}{given}" for called, given in pairs)


def _function(called: str, given: Mapping[str, Any]) -> str:
    """A call with its arguments between tags: texts as they are, other values as JSON."""
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in given.items()
    }
    tags = [f"{PARAMETER}{name}>\n{text}\n{PARAMETER_END}\n" for name, text in texts.items()]
    return f"{TOOL_CALL}\n{FUNCTION}{called}>\n{''.join(tags)}{FUNCTION_END}\n{TOOL_CALL_END}"
