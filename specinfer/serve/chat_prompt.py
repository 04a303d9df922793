"""ChatPrompt: what a model reads of a conversation, and how its answer is held and read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specinfer.errors import RequestError
from specinfer.grammar.complaint import in_one_line, without_places
from specinfer.grammar.lark import lark_of
from specinfer.grammar.library_vocabulary import fault_of
from specinfer.serve.api_error import ApiError, cut
from specinfer.serve.conversation_fields import ConversationFields
from specinfer.serve.dialect import AnswerReader, Dialect
from specinfer.serve.reasoning import CLOSE, OPEN, Reasoning, ReasoningSplitter
from specinfer.serve.service import Service
from specinfer.serve.tools.call_grammar import call_grammar
from specinfer.serve.tools.tagged_parser import call_parser
from specinfer.serve.tools.tool import Tool, ToolChoice, read_tool_choice, read_tools
from specinfer.structured_output import JsonWhitespace, StructuredOutput
from specinfer.tokenizer.chat_messages import messages_for_template


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, ready for the model."""

    token_ids: tuple[int, ...]
    dialect: Dialect
    tools: Sequence[Tool]
    choice: ToolChoice
    form: StructuredOutput | None  # of an answer without calls, where there are tools
    whitespace: JsonWhitespace
    parallel: bool  # whether an answer may call several tools
    starts_inside: bool  # the template opens the reasoning, and the answer may close it
    preamble: str | None  # what may be thought before a form begins, as Lark rules
    may_think: bool  # before calls; not where the template or the begun message has closed the reasoning

    @classmethod
    async def of(
        cls,
        service: Service,
        fields: ConversationFields,
        messages: Sequence[Mapping[str, Any]],
    ) -> ChatPrompt:
        """The prompt of a request whose messages are these; raises ApiError."""
        dialect = service.dialect
        # Schemas are compiled to see whether they can be followed, and others are answered meanwhile.
        tools, choice = await asyncio.to_thread(_tools, fields) if fields.described_tools else _tools(fields)
        form = None
        if tools and choice.mode == "auto":
            form = await asyncio.to_thread(_form, fields, dialect.reasoning)
        if tools and dialect.calls is None:
            raise ApiError(dialect.no_calls, param="tools")
        begun = ""
        if fields.continue_final_message:
            messages, begun = _with_text(messages)
        rendered = await service.render(
            messages,
            tools=tools,
            variables=_variables(service, fields),
            add_generation_prompt=fields.add_generation_prompt is not False,
            continue_final_message=fields.continue_final_message is True,
        )
        starts_inside, closed, preamble = _thoughts(dialect.reasoning, rendered.text, begun, fields)
        return cls(
            await service.encode_rendered(rendered, add_special=fields.add_special_tokens is True),
            dialect,
            tools,
            choice,
            form,
            whitespace=fields.json_whitespace or "bounded",
            parallel=fields.parallel,
            starts_inside=starts_inside,
            preamble=preamble,
            may_think=not closed,
        )

    @property
    def held(self) -> dict[str, Any]:
        """Fields of SamplingParams that hold the answer to what can be read of it; raises ApiError."""
        calls, reasoning = self.dialect.calls, self.dialect.reasoning
        visible: tuple[int, ...] = () if reasoning is None else reasoning.visible_token_ids
        if calls is None or not self.tools:
            return {"preamble": self.preamble, "visible_token_ids": visible or None}
        try:
            grammar = call_grammar(
                calls,
                self.tools,
                self.choice,
                parallel=self.parallel,
                reasoning=reasoning if self.may_think else None,
                starts_inside=self.starts_inside,
                form=self.form,
                whitespace=self.whitespace,
            )
        except RequestError as error:
            raise ApiError.of(error) from None
        return {"grammar": grammar, "visible_token_ids": (calls.visible_token_ids + visible) or None}

    def blamed(self, error: ApiError) -> ApiError:
        """The same complaint, about the field of the request that is at fault."""
        told = error.body["error"]
        if self.tools and told["param"] == "grammar":  # which is ours, made of the tools
            told["param"] = "tools"
        return error

    def reader(self) -> AnswerReader:
        """A reader of one answer."""
        calls, reasoning = self.dialect.calls, self.dialect.reasoning
        splitter = None if reasoning is None else ReasoningSplitter(self.starts_inside)
        parser = None
        if calls is not None and self.tools:
            parser = call_parser(calls, self.tools)
        return AnswerReader(splitter, parser)


def _tools(fields: ConversationFields) -> tuple[Sequence[Tool], ToolChoice]:
    """The tools that may be called; none where the request says that none is to be."""
    try:
        tools = read_tools(fields.described_tools or None)
        choice = read_tool_choice(fields.chosen_tool, tools)
    except RequestError as error:
        raise ApiError.of(error) from None
    return (() if choice.mode == "none" else tools), choice


def _with_text(messages: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with texts as contents, and the last one's text; raises ApiError."""
    try:
        read = messages_for_template(messages)
    except RequestError as error:
        raise ApiError.of(error) from None
    return read, str(read[-1]["content"])


def _form(fields: ConversationFields, reasoning: Reasoning | None) -> StructuredOutput | None:
    """The form of an answer without calls; raises ApiError where it cannot be followed beside them."""
    form = fields.form
    if form is not None and reasoning is not None and _thinks_itself(fields):
        raise ApiError(
            f"{form.parameter} has {CLOSE} in it beside tools; the model may think before calls and the "
            "form: write the form of what comes after",
            param=form.parameter,
        )
    try:
        said = "" if form is None else fault_of(lark_of(form))
    except RequestError as error:
        raise ApiError.of(error) from None
    if form is not None and said:
        name = form.parameter
        raise ApiError(f"{name} cannot be used: {without_places(in_one_line(said))}; change it", param=name)
    return form


def _thoughts(
    reasoning: Reasoning | None, prompt: str, begun: str, fields: ConversationFields
) -> tuple[bool, bool, str | None]:
    """Whether an answer begins inside of reasoning, whether there is no more, and what may be before a form.

    `begun` is the message that it goes on with, if it does. A rule that speaks of the mark has the reasoning
    in it.
    """
    if reasoning is None:
        return False, False, None
    opened = reasoning.opened_by(prompt) or begun.rfind(OPEN) > begun.rfind(CLOSE)
    closed = reasoning.closed_by(prompt) or (bool(begun.strip()) and not opened)
    if not fields.forms or _thinks_itself(fields) or closed:
        return opened, closed, None
    rules = [f"{name}: {body}" for name, body in reasoning.preamble(opened).items()]
    return opened, closed, "\n".join(rules)


def _thinks_itself(fields: ConversationFields) -> bool:
    return any(CLOSE in rule for rule in (fields.regex, fields.grammar) if rule is not None)


def _variables(service: Service, fields: ConversationFields) -> dict[str, Any]:
    """Variables of the chat template; raises ApiError for one that it never looks at.

    A template that knows no amounts of reasoning may know a switch, `enable_thinking` or `thinking`; one that
    knows neither is asked for nothing where its model does anyway what is wanted.
    """
    given = {name: one for name, one in (fields.chat_template_kwargs or {}).items() if one is not None}
    names = dict.fromkeys(given, "chat_template_kwargs")
    param, effort = fields.effort
    if not given and effort is None:
        return given
    known = service.tokenizer.template_variables
    reasons = service.dialect.reasoning is not None
    if effort is not None and "reasoning_effort" in known:
        given["reasoning_effort"] = effort
        names["reasoning_effort"] = param
    elif effort is not None and "enable_thinking" not in given and (reasons or effort != "medium"):
        given["enable_thinking"] = effort != "none"
        names["enable_thinking"] = param
    if (thinks := given.get("enable_thinking")) is not None and "enable_thinking" not in known:
        if "thinking" in known:
            names.setdefault("thinking", names["enable_thinking"])
            given.setdefault("thinking", given.pop("enable_thinking"))
        elif thinks is reasons:  # by itself
            del given["enable_thinking"]
        elif names["enable_thinking"] == param:
            raise ApiError(
                f"{param} is {cut(repr(effort))}, and the model's chat template knows no reasoning; drop it",
                param=param,
            )
    for name in given:
        if name not in known:
            allowed = f"; allowed: {', '.join(sorted(known))}" if known else ""
            raise ApiError(f"the model's chat template knows no {cut(name)}{allowed}", param=names[name])
    return given
