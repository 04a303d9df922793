"""Chat templates: Jinja in its sandbox, with the helpers that template authors expect.

The environment is that of transformers: trimmed blocks, loop controls,
raise_exception, strftime_now, a tojson that keeps Unicode, and {% generation %} (which marks the assistant's
text for training; here it renders its body). The sandbox keeps a template from Python and from its arguments,
but not from taking long: it is rendered in threads that no step waits for.

Clients write messages in more forms than templates handle: content as parts or null, arguments of earlier
calls as JSON text, call ids of any length. A template prints its input, so a list would appear in the prompt
as Python writes it, and null as "None". So messages are normalized first; a list of parts stays one where the
template reads the parts.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specinfer.errors import ModelFileError, RequestError, shown, unread
from specinfer.tokenizer.chat_encoder import Rendered, SpecialNames

# Fields of clients and of OpenAI's answers that templates do not read.
_DROPPED: Final = frozenset({"refusal", "audio", "annotations", "function_call", "cache_control"})
_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_LETTERS: Final = string.digits + string.ascii_letters
# `tool_call.id | length != 9` is in Mistral's templates; templates that print ids have the same limit.
_ID_LENGTH = re.compile(r"\bid\b[^%{}]{0,40}?\blength\b\s*\)?\s*[!=]=\s*(\d{1,2})\b")
_SHOWN_ID = "[CALL_ID]"
_SHOWN_ID_LENGTH = 9
# parts of Llama 3's and gpt-oss's templates, about messages with several calls
_SINGLE_CALLS = ("single tool-call", "max 1 tool call per message")
_PROBE = "8a7f3c"  # a text that no template contains
_ARGUMENTS = json.dumps({"a": _PROBE})
_ASKS = {"role": "user", "content": "a"}
_CALLS = {"role": "assistant", "content": "", "tool_calls": [{"id": "a" * 9, "function": {"name": "f"}}]}
# Role -> the messages around one of that role, in a conversation that templates accept.
_AROUND: Final[Mapping[str, tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]]] = {
    "user": ([], []),
    "system": ([], [_ASKS]),
    "assistant": ([_ASKS], [_ASKS]),
    "tool": ([_ASKS, _CALLS], []),
}
_PRINTED = re.compile(r"""['"]type['"]: ?['"]text""")  # a part as Python or JSON writes it
_GIVEN = ("messages", "add_generation_prompt", "tools")  # variables set by specinfer


@dataclass(frozen=True, slots=True)
class MessageStyle:
    """Requirements of a template on messages."""

    parts: Collection[str] = ()  # roles whose content must be a list of parts; a text would be ignored
    lists: Collection[str] = ()  # roles whose content may be a list of parts
    id_length: int | None = None  # required length of a call's id in letters and digits; None: any
    single_calls: bool = False  # an assistant message has at most one call
    text_arguments: bool = False  # arguments of calls are JSON texts, not objects


def messages_for_template(
    messages: Sequence[Mapping[str, Any]], style: MessageStyle = MessageStyle()
) -> list[dict[str, Any]]:
    """Copies of the messages in the form that templates expect.

    Content becomes a text, or parts where `style` has them: "" for an assistant's null, or its refusal.
    Results of tools are texts wherever the template takes texts. `developer` becomes `system`. Arguments of
    tool calls become objects. Fields that are None are dropped. Raises RequestError, naming the place, for a
    message without a role, content other than text, and malformed calls.
    """
    if not messages:
        raise RequestError("messages is empty; give at least one message with a role and content")
    read = [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]
    if style.single_calls:
        read = list(_one_call_each(read))
    if style.id_length is not None:
        _fit_ids(read, style.id_length)
    for message in read:
        # The style of other roles, such as ipython, is that of tools.
        role, content = message["role"] if message["role"] in _AROUND else "tool", message["content"]
        listed = isinstance(content, list) and role in style.lists and (role != "tool" or role in style.parts)
        if role in style.parts or listed:
            parts = content if isinstance(content, list) else [content]
            message["content"] = [{"type": "text", "text": part} for part in parts]
        elif isinstance(content, list):
            message["content"] = "".join(content)
        for call in message.get("tool_calls", ()) if style.text_arguments else ():
            text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            call["function"] = {**call["function"], "arguments": text}
    return read


def _message(name: str, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"{name} is {shown(message, 80)}; allowed: a mapping with 'role' (a string) and 'content'"
        )
    read = {key: value for key, value in message.items() if value is not None and key not in _DROPPED}
    if read["role"] == "developer":
        read["role"] = "system"
    if isinstance(read.get("reasoning"), str):  # vLLM's name
        read.setdefault("reasoning_content", read["reasoning"])
    read["content"] = _content(f"{name}.content", message)
    if read.get("reasoning_content") and not read["content"]:
        read.setdefault("thinking", read["reasoning_content"])  # the name in gpt-oss's and LFM2.5's templates
    calls = read.pop("tool_calls", None)  # a template may treat an empty list, or None, as calls
    if calls:
        if not isinstance(calls, Sequence) or isinstance(calls, str):
            raise RequestError(f"{name}.tool_calls is {shown(calls, 80)}; allowed: a list of calls")
        read["tool_calls"] = [_call(f"{name}.tool_calls[{i}]", call) for i, call in enumerate(calls)]
    return read


def _content(name: str, message: Mapping[str, Any]) -> str | list[str]:
    """The content: a text, or the texts of its parts."""
    content = message.get("content")
    if content is None:
        if message["role"] == "assistant":  # with tool calls or a refusal
            return message.get("refusal") or ""
    elif isinstance(content, str):
        return content or message.get("refusal") or ""
    elif isinstance(content, Sequence) and not isinstance(content, (bytes, bytearray)):
        return [_part(f"{name}[{i}]", part) for i, part in enumerate(content)]
    raise RequestError(
        f'{name} is {shown(content, 80)}; allowed: a text, or a list of {{"type": "text", "text": ...}}'
    )


def _part(name: str, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str) or kind not in _TEXT_PARTS:
        what = name if not isinstance(part, Mapping) else f"{name}.type"
        raise RequestError(
            f"{what} is {shown(part if kind is None else kind, 80)}; allowed: {', '.join(_TEXT_PARTS)}: "
            f"{unread(kind) or 'only text is supported'}"
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise RequestError(f"{name}.{_TEXT_PARTS[kind]} is {shown(text, 80)}; allowed: a text")
    return text


def _call(name: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RequestError(
            f'{name} is {shown(call, 80)}; allowed: {{"function": {{"name": ..., "arguments": ...}}}}'
        )
    if not isinstance(function.get("name"), str):
        raise RequestError(f"{name}.function.name is {shown(function.get('name'), 80)}; allowed: a string")
    arguments = _arguments(function.get("arguments"))
    if arguments is None:
        raise RequestError(
            f"{name}.function.arguments is {shown(function.get('arguments'), 80)}; "
            "allowed: a JSON object, or its text"
        )
    # Streams number calls, and clients send the numbers back.
    kept = {key: value for key, value in call.items() if key != "index" and value is not None}
    return {**kept, "function": {**function, "arguments": arguments}}


def _arguments(given: object) -> Mapping[str, Any] | None:
    """The arguments as an object; None if they are malformed."""
    if given is None or given == "":  # a call without arguments
        return {}
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            return None
    return given if isinstance(given, Mapping) else None


def _one_call_each(messages: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Turn parallel calls into consecutive ones.

    Each is followed by its own result, matched by id, or by position if the result has no id.
    """
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            yield message
            continue
        results = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        for number, call in enumerate(calls):
            yield {**message, "content": "" if number else message["content"], "tool_calls": [call]}
            named = [one for one in results if one.get("tool_call_id") == call.get("id") is not None]
            nameless = [one for one in results if "tool_call_id" not in one]
            if found := named or nameless[:1]:
                yield found[0]
                results.remove(found[0])
        yield from results


def _fit_ids(messages: Sequence[dict[str, Any]], length: int) -> None:
    """Give calls and their results ids of `length` characters, the same ones in every request.

    An id that fits is kept. Another id is replaced by its hash; a missing one by a hash of the call's
    position. A result without an id belongs to the next call without a result.
    """
    unanswered: list[str] = []
    for place, message in enumerate(messages):
        if "tool_calls" in message:
            for number, call in enumerate(message["tool_calls"]):
                call["id"] = _fitting(call.get("id") or f"{place}:{number}", length)
            unanswered = [call["id"] for call in message["tool_calls"]]
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            if given:
                message["tool_call_id"] = _fitting(given, length)
            elif unanswered:
                message["tool_call_id"] = unanswered[0]
            if message.get("tool_call_id") in unanswered:
                unanswered.remove(message["tool_call_id"])


def _fitting(given: object, length: int) -> str:
    text = str(given)
    if len(text) == length and text.isascii() and text.isalnum():
        return text
    number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest(), "big")
    letters = []
    for _ in range(length):
        number, letter = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(letters)


class ChatTemplate:
    """A chat template, compiled on first use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)  # by the template's names: bos_token, eos_token, ...

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        names: SpecialNames | None = None,
    ) -> Rendered:
        """Render a conversation; with `names`, names of special tokens in messages are located.

        `tools` are the tools the assistant may call, in OpenAI's format. `variables` are variables of the
        template (such as `enable_thinking`); they must not shadow the standard ones. Raises RequestError if a
        message has no role, the template rejects the conversation, or it does not support the given tools,
        and ModelFileError if the template does not parse.
        """
        given = messages_for_template(messages, self._style)
        if tools and "tools" not in self._looked_at:
            raise RequestError(
                "the model's chat template does not support tools; describe them in a message", "tools"
            )
        shown, switches = [dict(tool) for tool in tools], variables or {}
        render = partial(
            self._render, add_generation_prompt=add_generation_prompt, tools=shown, variables=switches
        )
        if names is None:
            return Rendered(render(given))
        return names.render(given, render, [shown, switches, self.source])

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> str:
        template = self._compiled
        try:
            return template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools or None,
                **{"documents": None, **self._special_tokens, **variables},
            )
        # Given messages that its author did not expect (content that is None, say), a template fails with any
        # Python error of its expressions and filters.
        except Exception as error:
            raise RequestError(f"the model's chat template rejects the messages: {error}") from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables that the template reads and a caller may set, such as enable_thinking."""
        return self._looked_at - set(self._environment.globals) - set(_GIVEN) - set(self._special_tokens)

    @cached_property
    def _style(self) -> MessageStyle:
        """The template's requirements on messages, found in its source and by rendering probes."""
        length = _ID_LENGTH.search(self.source)
        id_length = _SHOWN_ID_LENGTH if _SHOWN_ID in self.source else None
        texts = {role for role in _AROUND if self._reads(role, _PROBE)}
        lists = {role for role in _AROUND if self._reads(role, [{"type": "text", "text": _PROBE}])}
        parts = lists - texts
        if "user" in parts:  # a role that it refuses is as the user's
            parts |= set(_AROUND) - texts
        return MessageStyle(
            parts=parts,
            lists=lists,
            id_length=int(length[1]) if length else id_length,
            single_calls=any(text in self.source for text in _SINGLE_CALLS),
            text_arguments=not self._shows_arguments({"a": _PROBE}) and self._shows_arguments(_ARGUMENTS),
        )

    def _shows_arguments(self, given: object) -> bool:
        """True if the template shows arguments of calls in that form as JSON."""
        function = {"name": "f", "arguments": given}
        calling = {**_CALLS, "tool_calls": [{"id": "a" * 9, "type": "function", "function": function}]}
        try:
            text = self._render([_ASKS, calling], False, (), {})
        except RequestError:
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text

    def _reads(self, role: str, content: object) -> bool:
        """True if the text of content in that form appears in the prompt, and not the form."""
        before, behind = _AROUND[role]
        try:
            text = self._render([*before, {"role": role, "content": content}, *behind], True, (), {})
        except RequestError:
            return False
        return _PROBE in text and not _PRINTED.search(text)

    @cached_property
    def _looked_at(self) -> frozenset[str]:
        _ = self._compiled  # raises if it does not parse
        return frozenset(meta.find_undeclared_variables(self._environment.parse(self.source)))

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return self._environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {error.message}"
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:  # from Python's compiler
            reason = str(error) or type(error).__name__
        raise ModelFileError(
            f"the model's chat template does not parse ({reason}); "
            "use generate with a prompt you format yourself"
        )

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationExtension]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment


class _GenerationExtension(Extension):
    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes for HTML, which would show in the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
