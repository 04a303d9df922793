"""ChatEncoder: turns messages, tools and template variables into the tokens of a prompt.

`LLM.chat` and the server's endpoints encode conversations here, so that both read messages alike.

SpecialNames keeps names of special tokens in untrusted messages from being read as special tokens. A user's
message or a fetched page may contain "<|im_end|>". In a prompt this is a special token unless its origin is
known. So a conversation with such a name is rendered twice: unchanged, and with a mark in each of these
names. The marks show where the names are in the prompt. The prompt is then encoded with the template's own
special tokens renamed, so that those from messages are plain text.
"""

from __future__ import annotations

import json
import re
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import AddedToken

from specinfer.config import SpecialTokens
from specinfer.errors import RequestError
from specinfer.tokenizer.tokenizer import Tokenizer
from specinfer.tokenizer.vocabulary import library_panics

if TYPE_CHECKING:
    from specinfer.tokenizer.chat_template import ChatTemplate

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": ...}}
_PRIVATE: Final = range(0xE000, 0xF900)  # Unicode's private use area
_TRUSTED: Final = ("system", "assistant")  # roles that may write special tokens


class ChatEncoder:
    """Encodes conversations with a model's chat templates. Immutable and safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        special_tokens: SpecialTokens = "text",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        rewrite: Callable[[Sequence[Message]], tuple[Sequence[Message], Sequence[Tool]]] | None = None,
    ) -> Rendered:
        """The conversation as text, for `encode`.

        `tools` are the functions that the assistant may call, in OpenAI's shape; `variables` are variables of
        the template's own, such as enable_thinking. If the model has a template tool_use, tools choose it;
        likewise the variable `documents` and the template rag. Names of special tokens in messages of users
        and tools are text, or with "special" the tokens. With `continue_final_message` the text ends where
        the content of the last message ends, and has no generation prompt. `rewrite` returns other messages
        and tools, for a template that cannot show tools or calls.

        Raises RequestError if the model has no chat template, the template refuses the messages, or the last
        message cannot be continued.
        """
        tokenizer = self._tokenizer
        if not tokenizer.has_chat_template:
            raise RequestError("the model has no chat template; use generate with a plain prompt")
        mark = continued = ""
        if continue_final_message:
            mark = f"mark{uuid.uuid4().hex}"
            messages, continued = _marked(messages, mark)
        if rewrite is not None:
            messages, tools = rewrite(messages)
        given = variables or {}
        name = "tool_use" if tools else "rag" if given.get("documents") else "default"
        template = self._templates.get(name, self._templates["default"])
        rendered = template.prepare(
            messages,
            add_generation_prompt and not continue_final_message,
            tools,
            variables,
            self._special_names if special_tokens == "text" else None,
        )
        return rendered if not continue_final_message else _cut(rendered, mark, continued)

    def encode(self, rendered: Rendered, *, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a conversation; the begin-of-text token only where the template writes it.

        With `add_special_tokens` the begin-of-text token of plain texts always comes first. Raises
        RequestError as `Tokenizer.encode`, and on names of special tokens that cannot be encoded as text.
        """
        begin = self._tokenizer.beginning if add_special_tokens else []
        ids = self._tokenizer.encode(rendered.text, add_special=False)
        if rendered.plain:
            ids = self._special_names.encode(rendered)
        return begin + ids

    def token_ids(self, messages: Sequence[Message], **more: Any) -> list[int]:
        """The token ids of a conversation that `render` renders; `more` are its parameters."""
        return self.encode(self.render(messages, **more))

    @cached_property
    def variables(self) -> frozenset[str]:
        """Variables that the chat templates read and a caller of `render` may give."""
        if not self._tokenizer.has_chat_template:
            return frozenset()
        return frozenset().union(*(template.variables for template in self._templates.values()))

    @cached_property
    def _templates(self) -> dict[str, ChatTemplate]:
        """The model's templates by name; each compiles itself when it is first used."""
        from specinfer.tokenizer.chat_template import ChatTemplate  # loads Jinja

        sources, special_tokens = self._tokenizer.templates, self._tokenizer.special_tokens
        return {name: ChatTemplate(source, special_tokens) for name, source in sources.items()}

    @cached_property
    def _special_names(self) -> SpecialNames:
        return SpecialNames(self._tokenizer.backend)


def _marked(messages: Sequence[Message], mark: str) -> tuple[Sequence[Message], str]:
    """The messages with a mark behind the content of the last one, and that content."""
    from specinfer.tokenizer.chat_template import messages_for_template

    messages = messages_for_template(messages)
    last: Mapping[str, Any] = messages[-1] if messages else {}
    content = last.get("content")
    if not isinstance(content, str) or last.get("tool_calls"):
        raise RequestError(
            "continue_final_message is true, and the last message is no text; drop it, or give one",
            "continue_final_message",
        )
    return [*messages[:-1], {**last, "content": content + mark}], content


def _cut(rendered: Rendered, mark: str, continued: str) -> Rendered:
    """The text in front of the mark, which the answer continues."""
    if rendered.text.count(mark) != 1:
        raise RequestError(
            "continue_final_message is true, but the model's chat template changes the last message; leave "
            "it out, or use /v1/completions",
            "continue_final_message",
        )
    return replace(rendered.cut(rendered.text.index(mark)), continued=continued)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A rendered conversation; `plain` holds offsets of special-token names that are plain text."""

    text: str
    plain: tuple[int, ...] = ()
    continued: str = ""  # the end of the text: content of a last message that the answer continues

    def cut(self, length: int) -> Rendered:
        """Its first `length` characters."""
        return replace(self, text=self.text[:length], plain=tuple(at for at in self.plain if at < length))


class SpecialNames:
    """The names of a tokenizer's special tokens. Immutable and safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._added: dict[int, AddedToken] = backend.get_added_tokens_decoder()
        # A single character has no room for a mark.
        self._special = {i for i, token in self._added.items() if token.special and len(token.content) > 1}
        names = {self._added[i].content for i in self._special}
        # Longest match first, as in the library.
        ordered = sorted(names, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        render: Callable[[Sequence[dict[str, Any]]], str],
        others: object,
    ) -> Rendered:
        """Render a conversation with `render`, and locate the names that users and tools wrote.

        `others` holds the template's other inputs. Raises RequestError if the template changes a marked name.
        """
        text = render(messages)
        # A mark in any name makes other messages.
        if self._names is None or [self._marked(one, chr(_PRIVATE[0])) for one in messages] == [*messages]:
            return Rendered(text)
        known = text + json.dumps([messages, others], ensure_ascii=False, default=str)
        mark = next((chr(code) for code in _PRIVATE if chr(code) not in known), "")
        pieces = render([self._marked(message, mark) for message in messages]).split(mark or None)
        ends, end = set(), 0
        for piece in pieces[:-1]:
            end += len(piece)
            ends.add(end + 1)  # the mark precedes the name's last character
        plain = tuple(name.start() for name in self._names.finditer(text) if name.end() in ends)
        if not mark or "".join(pieces) != text or len(plain) < len(ends):
            raise RequestError(
                "the messages contain names of special tokens where the model's chat template changes "
                "them; drop them, or set special_tokens_in_messages to special"
            )
        return Rendered(text, plain)

    def encode(self, rendered: Rendered) -> list[int]:
        """Token ids of a conversation; the names at `rendered.plain` are encoded as text.

        Raises RequestError if the tokenizer cannot separate them.
        """
        assert self._names is not None
        text, plain = rendered.text, set(rendered.plain)
        prefix, backend, ids = self._renamed
        pieces, end, special = [], 0, 0
        for name in self._names.finditer(text):
            pieces.append(text[end : name.start()])
            if name.start() in plain:
                plain.discard(name.start())
            else:
                pieces.append(prefix)
                special += 1
            end = name.start()
        with library_panics():
            encoded = backend.encode("".join([*pieces, text[end:]]), add_special_tokens=False).ids
        found = [ids.get(token, token) for token in encoded]
        of_special = sum(token in self._special for token in found)
        if plain or of_special != special:
            raise RequestError(
                "the messages contain names of special tokens that the tokenizer cannot encode as text; drop "
                "them, or set special_tokens_in_messages to special"
            )
        return found

    def _marked(self, message: dict[str, Any], mark: str) -> dict[str, Any]:
        """The message with a mark before the last character of each name, unless its role is trusted."""
        assert self._names is not None
        if message["role"] in _TRUSTED:
            return message

        def all_marked(value: Any, names: re.Pattern[str] = self._names) -> Any:
            if isinstance(value, str):
                return names.sub(lambda name: name[0][:-1] + mark + name[0][-1], value)
            if isinstance(value, Mapping):
                return {key: all_marked(one) for key, one in value.items()}
            return [*map(all_marked, value)] if isinstance(value, list) else value

        return {key: one if key == "role" else all_marked(one) for key, one in message.items()}

    @cached_property
    def _renamed(self) -> tuple[str, tokenizers.Tokenizer, Mapping[int, int]]:
        """Name prefix, a tokenizer with prefixed special tokens, and a map of its ids to the usual ones.

        The prefix is random, so that a message cannot contain it. The model behind it is shared and takes no
        memory.
        """
        prefix = "".join(chr(secrets.choice(_PRIVATE)) for _ in range(8))
        renamed = tokenizers.Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            renamed.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            renamed.pre_tokenizer = self._backend.pre_tokenizer
        ids: dict[int, int] = {}
        for token_id, token in sorted(self._added.items()):
            name = prefix + token.content if token_id in self._special else token.content
            new = AddedToken(**{**token.__getstate__(), "content": name})
            renamed.add_tokens([new])
            its_id = renamed.token_to_id(new.content)
            # If a vocabulary has gaps, the library assigns ids that other tokens have already.
            if its_id is not None and self._backend.model.id_to_token(its_id) in (None, new.content):
                ids[its_id] = token_id
        return prefix, renamed, ids
