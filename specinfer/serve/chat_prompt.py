"""ChatPrompt: what a model reads of a conversation, and how its answer is held and read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specinfer.errors import RequestError
from specinfer.serve.api_error import ApiError
from specinfer.serve.chat_fields import ChatFields
from specinfer.serve.dialect import AnswerReader, Dialect
from specinfer.serve.reasoning import CLOSE, ReasoningSplitter
from specinfer.serve.service import Service
from specinfer.serve.tools.call_grammar import call_grammar
from specinfer.serve.tools.call_parser import CallParser
from specinfer.serve.tools.conversation import for_template
from specinfer.serve.tools.tool import Tool, ToolChoice, read_tool_choice, read_tools


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, ready for the model."""

    token_ids: tuple[int, ...]
    dialect: Dialect
    tools: Sequence[Tool]
    choice: ToolChoice
    parallel: bool  # whether an answer may call several tools
    starts_inside: bool  # the template opens the reasoning, and the answer may close it

    @classmethod
    async def of(cls, service: Service, fields: ChatFields) -> ChatPrompt:
        """The prompt of a request; raises ApiError."""
        dialect = service.dialect
        messages: list[Any] = [message.rendered() for message in fields.messages]
        # Schemas are compiled to see whether they can be followed, and others are answered meanwhile.
        tools, choice = await asyncio.to_thread(_tools, fields) if fields.tools else _tools(fields)
        shown: list[dict[str, Any]] = []
        if tools and dialect.calls is None:
            raise ApiError(dialect.no_calls, param="tools")
        try:
            if dialect.calls is not None:
                messages, shown = for_template(messages, tools, dialect.calls)
        except RequestError as error:
            raise ApiError.of(error) from None
        except RecursionError:
            raise ApiError("arguments of a call nest too deep; send flatter ones", param="messages") from None
        text = await service.render(messages, tools=shown, variables=_variables(service, fields))
        return cls(
            await service.encode(text, "messages", add_special=False),
            dialect,
            tools,
            choice,
            parallel=fields.parallel_tool_calls is not False,
            starts_inside=(
                dialect.reasoning is not None and dialect.reasoning.opened_by(text) and not _is_held(fields)
            ),
        )

    @property
    def grammar(self) -> str | None:
        """What holds the answer to calls that tools can take; raises ApiError."""
        calls = self.dialect.calls
        if calls is None or not self.tools:
            return None
        try:
            return call_grammar(
                calls,
                self.tools,
                self.choice,
                parallel=self.parallel,
                reasoning=self.dialect.reasoning,
                starts_inside=self.starts_inside,
            )
        except RequestError as error:
            raise ApiError.of(error) from None

    @property
    def visible_token_ids(self) -> tuple[int, ...] | None:
        """The special tokens that have to stand in the answer's text for it to be read; None for none."""
        calls, reasoning = self.dialect.calls, self.dialect.reasoning
        visible = (calls.visible_token_ids if calls is not None and self.tools else ()) + (
            reasoning.visible_token_ids if reasoning is not None else ()
        )
        return visible or None

    def reader(self) -> AnswerReader:
        """A reader of one answer."""
        calls, reasoning = self.dialect.calls, self.dialect.reasoning
        splitter = None if reasoning is None else ReasoningSplitter(self.starts_inside)
        parser = None
        if calls is not None and self.tools:
            parser = CallParser(calls, [tool.name for tool in self.tools])
        return AnswerReader(splitter, parser)


def _tools(fields: ChatFields) -> tuple[Sequence[Tool], ToolChoice]:
    """The tools that may be called; none where the request says that none is to be."""
    try:
        given = [tool.model_dump(exclude_none=True) for tool in fields.tools or ()]
        tools = read_tools(given or None)
        wanted = fields.tool_choice
        choice = read_tool_choice(
            wanted if wanted is None or isinstance(wanted, str) else wanted.model_dump(), tools
        )
    except RequestError as error:
        raise ApiError.of(error) from None
    return (() if choice.mode == "none" else tools), choice


def _is_held(fields: ChatFields) -> bool:
    """Whether the answer has a form from its first token on, in which no reasoning can be closed."""
    rules = [rule for rule in (fields.regex, fields.grammar) if rule is not None]
    formed = fields.response_format not in (None, {"type": "text"}) or fields.choice is not None
    return formed or any(CLOSE not in rule for rule in rules)


def _variables(service: Service, fields: ChatFields) -> dict[str, Any]:
    """Variables of the chat template; raises ApiError for one that it never looks at."""
    given = dict(fields.chat_template_kwargs or {})
    names = dict.fromkeys(given, "chat_template_kwargs")
    if fields.reasoning_effort is not None:
        given["reasoning_effort"] = fields.reasoning_effort
        names["reasoning_effort"] = "reasoning_effort"
    known = service.tokenizer.template_variables if names else frozenset[str]()
    for name, param in names.items():
        if name not in known:
            allowed = f"; allowed: {', '.join(sorted(known))}" if known else ""
            raise ApiError(f"the model's chat template knows no {name}{allowed}", param=param)
    return given
