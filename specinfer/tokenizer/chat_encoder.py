"""ChatEncoder: turns messages, tools and template variables into the tokens of a prompt.

`LLM.chat` and the server's endpoints encode conversations here, so that both read messages alike.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from specinfer.config import SpecialTokens
from specinfer.errors import RequestError
from specinfer.tokenizer.special_names import Rendered, SpecialNames
from specinfer.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from specinfer.tokenizer.chat_template import ChatTemplate

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
Tool = Mapping[str, Any]  # {"type": "function", "function": {"name": ..., "parameters": ...}}


class ChatEncoder:
    """Encodes conversations with a model's chat templates. Immutable and safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: dict[str, ChatTemplate] = {}  # a template that two threads compile is the same

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
        rendered = self._template(name).prepare(
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

    @property
    def variables(self) -> frozenset[str]:
        """Variables that the chat templates read and a caller of `render` may give."""
        if not self._tokenizer.has_chat_template:
            return frozenset()
        return frozenset().union(*(self._template(name).variables for name in self._tokenizer.templates))

    def _template(self, name: str) -> ChatTemplate:
        """The template of that name, else the default one."""
        name = name if name in self._tokenizer.templates else "default"
        if (found := self._compiled.get(name)) is None:
            from specinfer.tokenizer.chat_template import ChatTemplate  # loads Jinja

            found = ChatTemplate(self._tokenizer.templates.get(name, ""), self._tokenizer.special_tokens)
            self._compiled[name] = found
        return found

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
