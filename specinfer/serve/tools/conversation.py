"""What a model's chat template is given of tools, of earlier calls and of their results.

A template that knows the format gets tools as they are. For any other one the conversation is written anew:
a system message tells of the tools, earlier calls become text of their answers, in the format, and results
become messages of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specinfer.errors import RequestError
from specinfer.serve.tools.call_format import (
    ARGS,
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
    TOOL_CALL,
    TOOL_CALL_END,
    TOOL_CALLS,
    CallFormat,
    FormatName,
)
from specinfer.serve.tools.tool import Tool
from specinfer.tokenizer.chat_messages import messages_for_template

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


def for_template(
    messages: Sequence[Message], tools: Sequence[Tool], call_format: CallFormat
) -> tuple[list[Message], list[dict[str, Any]]]:
    """Messages and tools for `Tokenizer.encode_chat`; no tools where a message tells of them.

    Raises RequestError, as the template would, on messages and earlier calls of the wrong shape.
    """
    try:
        return _for_template(messages, tools, call_format)
    except RecursionError:
        raise RequestError("arguments of a call nest too deep; send flatter ones", "messages") from None


def _for_template(
    messages: Sequence[Message], tools: Sequence[Tool], call_format: CallFormat
) -> tuple[list[Message], list[dict[str, Any]]]:
    if call_format.native:
        return list(messages), [tool.described() for tool in tools]
    written: list[Message] = []
    for message in messages_for_template(messages):
        if message["role"] == "tool":
            _add_result(written, message)
        elif "tool_calls" in message:
            written.append(_as_text(message, call_format.name))
        else:
            written.append(message)
    return (_told(written, tools, call_format.name) if tools else written), []


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
