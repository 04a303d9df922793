"""ChatPrompt: what a model reads of a conversation, and how its answer is held and read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specinfer.errors import naming
from specinfer.grammar.lark import lark_of
from specinfer.grammar.library_vocabulary import fault_of, in_one_line, without_places
from specinfer.serve.api.service import Service
from specinfer.serve.dialect.call_format import for_template
from specinfer.serve.dialect.call_grammar import call_grammar
from specinfer.serve.dialect.dialect import CLOSE, OPEN, AnswerReader, Dialect, Reasoning, ReasoningSplitter
from specinfer.serve.dialect.tagged_calls import call_parser
from specinfer.serve.dialect.tool import Tool
from specinfer.serve.fields.conversation import ConversationFields
from specinfer.serve.fields.functions import read_tools
from specinfer.serve.http.api_error import ApiError, cut
from specinfer.structured_output import StructuredOutput
from specinfer.tokenizer import Rendered

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, ready for the model."""

    token_ids: tuple[int, ...]
    held: Mapping[str, Any]  # fields of SamplingParams that hold the answer to what can be read of it
    dialect: Dialect
    tools: Sequence[Tool]  # that may be called
    starts_inside: bool  # the template opens the reasoning, and the answer may close it

    @classmethod
    async def of(cls, service: Service, fields: ConversationFields, messages: Messages) -> ChatPrompt:
        """The prompt of a request whose messages are these; raises ApiError.

        All of it is made in a thread, however short it is: schemas are compiled, and what a template does
        with a conversation is the model author's program.
        """
        return await service.in_thread("messages", lambda: _prepare(service, fields, messages))

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """ApiErrors that are raised meanwhile name the field at fault: the grammar of calls is the tools'."""
        try:
            yield
        except ApiError as error:
            told = error.body["error"]
            if self.tools and told["param"] == "grammar":
                told["param"] = "tools"
            raise

    def reader(self) -> AnswerReader:
        """A reader of one answer."""
        calls, reasoning = self.dialect.calls, self.dialect.reasoning
        splitter = None if reasoning is None else ReasoningSplitter(self.starts_inside)
        parser = None
        if calls is not None and self.tools:
            parser = call_parser(calls, self.tools)
        return AnswerReader(splitter, parser)


async def chat_token_ids(
    service: Service, messages: Messages, *, prompted: bool, continued: bool, add_special: bool
) -> tuple[int, ...]:
    """The token ids of a conversation without tools; raises ApiError.

    It ends with the beginning of the assistant's turn if it is `prompted`, and if it is `continued` where the
    content of its last message does.
    """

    def make() -> tuple[int, ...]:
        service.check_sizes({"messages": _size(messages)})
        rendered = _render(
            service, messages, add_generation_prompt=prompted, continue_final_message=continued
        )
        return tuple(service.chat.encode(rendered, add_special_tokens=add_special))

    return await service.in_thread("messages", make)


def _prepare(service: Service, fields: ConversationFields, messages: Messages) -> ChatPrompt:
    dialect, choice, functions = service.dialect, fields.chosen, fields.functions
    variables = _variables(service, fields)
    sizes = {"messages": _size(messages), "chat_template_kwargs": _size(variables.values())}
    service.check_sizes(sizes | {"tools": 0 if choice.mode == "none" else _size(functions)})
    tools = read_tools(functions)
    callable_tools = choice.among(tools)
    tools = tools if callable_tools else ()
    form = _form(fields, dialect.reasoning) if tools and choice.mode == "auto" else None
    if tools and dialect.calls is None:
        raise ApiError(dialect.no_calls, param="tools")
    rendered = _render(
        service,
        messages,
        tools,
        variables=variables,
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=fields.continue_final_message is True,
    )
    starts_inside, closed, preamble = _thoughts(dialect.reasoning, rendered, fields)
    visible = () if dialect.reasoning is None else tuple(dialect.reasoning.special.values())
    held: dict[str, Any] = {"preamble": preamble}
    if tools and dialect.calls is not None:
        visible = (*dialect.calls.special.values(), *visible)
        with naming("tools"):
            grammar = call_grammar(
                dialect.calls,
                tools,
                choice,
                parallel=fields.parallel,
                reasoning=None if closed else dialect.reasoning,
                starts_inside=starts_inside,
                form=form,
                whitespace=fields.json_whitespace or "bounded",
            )
        held = {"grammar": grammar}
    token_ids = tuple(service.chat.encode(rendered, add_special_tokens=fields.add_special_tokens is True))
    return ChatPrompt(token_ids, held | {"visible_token_ids": visible or None}, dialect, tools, starts_inside)


def _size(parts: Iterable[object]) -> int:
    """How many characters parts of a conversation have, about."""
    return sum(len(str(one)) for one in parts)


def _render(service: Service, messages: Messages, tools: Sequence[Tool] = (), **more: Any) -> Rendered:
    """A conversation as the model reads it; raises ApiError where it is too long to be tokenized."""
    calls = service.dialect.calls
    rendered = service.chat.render(
        messages,
        special_tokens=service.config.special_tokens_in_messages,
        rewrite=None if calls is None else lambda given: for_template(given, tools, calls),
        **more,
    )
    service.check_sizes({"messages": len(rendered.text)})
    return rendered


def _form(fields: ConversationFields, reasoning: Reasoning | None) -> StructuredOutput | None:
    """The form of an answer without calls; raises ApiError where it cannot be followed beside them."""
    form = fields.form
    if form is not None and reasoning is not None and _thinks_itself(fields):
        raise ApiError(
            f"{form.parameter} has {CLOSE} in it beside tools; the model may think before calls and the "
            "form: write the form of what comes after",
            param=form.parameter,
        )
    if form is not None:
        name = form.parameter
        with naming(name):
            said = fault_of(lark_of(form))
        if said:
            said = without_places(in_one_line(said))
            raise ApiError(f"{name} cannot be used: {said}; change it", param=name)
    return form


def _thoughts(
    reasoning: Reasoning | None, prompt: Rendered, fields: ConversationFields
) -> tuple[bool, bool, str | None]:
    """Whether an answer begins inside of reasoning, whether there is no more, and what may be before a form.

    A rule that has the mark in it covers the reasoning, too.
    """
    if reasoning is None:
        return False, False, None
    begun = prompt.continued
    opened = reasoning.opened_by(prompt.text) or begun.rfind(OPEN) > begun.rfind(CLOSE)
    closed = reasoning.closed_by(prompt.text) or (bool(begun.strip()) and not opened)
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
    param, effort = fields.effort_field, fields.effort
    if not given and effort is None:
        return given
    known = service.chat.variables
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
