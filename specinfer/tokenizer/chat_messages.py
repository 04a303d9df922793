"""Messages of a conversation as chat templates want to read them.

Clients of OpenAI's API give the arguments of earlier tool calls as JSON text; templates write them with
`tojson`, which would make a string of the text. So they become objects here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specinfer.errors import RequestError


def messages_for_template(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages, with the arguments of tool calls as objects.

    The content of a message that only calls is "" where the caller left it out, since templates add to it.
    Raises RequestError on a message without a role, and on tool calls of the wrong shape.
    """
    if not messages:
        raise RequestError("messages is empty; give at least one message with a role and content")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{name} is {message!r}; allowed: a mapping with 'role' (a string) and 'content'")
    copied = dict(message)
    calls = copied.get("tool_calls")
    if not calls:  # a template may take a list without calls, or None, for calls
        copied.pop("tool_calls", None)
        return copied
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{name}.tool_calls is {_short(calls)}; allowed: a list of calls")
    copied["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    if copied.get("content") is None:
        copied["content"] = ""
    return copied


def _call(name: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(
            f'{name} is {_short(call)}; allowed: {{"function": {{"name": ..., "arguments": ...}}}}'
        )
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{name}.function.name is {_short(function.get('name'))}; allowed: a string")
    arguments = _arguments(function.get("arguments"))
    if arguments is None:
        raise RequestError(
            f"{name}.function.arguments is {_short(function.get('arguments'))}; "
            "allowed: a JSON object, as text or as it is"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(given: object) -> Mapping[str, Any] | None:
    """The arguments as an object; None when they are none."""
    if given is None or given == "":  # a call without arguments
        return {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    return given if isinstance(given, Mapping) else None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
