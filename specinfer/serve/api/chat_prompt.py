"""ChatPrompt: token ids of a conversation, and the grammar and reader of its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from specinfer.engine.prefix_index import common_length
from specinfer.errors import RequestError, naming
from specinfer.grammar.lark import lark_of
from specinfer.grammar.library_vocabulary import fault_and_warnings
from specinfer.serve.api.service import Service
from specinfer.serve.dialect.call_format import Tool, for_template
from specinfer.serve.dialect.call_grammar import call_grammar
from specinfer.serve.dialect.dialect import AnswerReader
from specinfer.serve.dialect.reasoning import Reasoning
from specinfer.serve.fields.conversation import ConversationFields, read_tools
from specinfer.serve.http.api_error import ApiError, cut
from specinfer.structured_output import StructuredOutput
from specinfer.tokenizer import Rendered

Messages = Sequence[Mapping[str, Any]]
# Tokens of thinking by effort, for templates that do not read the effort; greater efforts have no bound.
_BUDGETS: Final = {"none": 0, "minimal": 512, "low": 1024, "medium": 8192}


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, ready for the model."""

    token_ids: tuple[int, ...]
    constraints: Mapping[str, Any]  # fields of SamplingParams that keep the answer parseable
    has_tools: bool  # some may be called
    reader: Callable[[], AnswerReader]  # creates the reader of one answer


def build_prompt(service: Service, fields: ConversationFields, messages: Messages) -> ChatPrompt:
    """Return the prompt of a request with these messages; raises ApiError and RequestError.

    Callers run it in a thread even for short conversations, because it compiles schemas and runs the chat
    template, a program of the model's author.
    """
    dialect, choice = service.dialect, fields.chosen
    reasoning = dialect.reasoning
    variables = _variables(service, fields)
    sizes = {"messages": len(str(messages)), "chat_template_kwargs": len(str(variables))}  # about
    service.check_sizes(sizes | {"tools": 0 if choice.mode == "none" else len(str(fields.tools or ""))})
    tools: tuple[Tool, ...] = ()
    if fields.tools:
        for kind in fields.left_out:
            service.field_policy.log_once(
                f"tools of type {cut(kind)!r} are left out: this server has only functions"
            )
        described = read_tools(fields.functions)
        tools = described if choice.among(described) else ()
    form = _form(fields, reasoning) if tools and choice.mode == "auto" else None
    calls = dialect.calls
    if tools and calls is None:
        raise ApiError(dialect.no_calls, param="tools")
    render = partial(
        service.chat.render,
        special_tokens=service.config.special_tokens_in_messages,
        rewrite=None if calls is None else lambda given: for_template(given, tools, calls),
        variables=variables,
    )
    rendered = render(
        messages,
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=fields.continue_final_message is True,
    )
    service.check_sizes({"messages": len(rendered.text)})  # a text that is too long is not tokenized
    starts_inside, closed, visible = False, False, list[int]()
    constraints: dict[str, Any] = {}
    if reasoning is not None:
        starts_inside, closed, constraints["preamble"] = _reasoning_state(reasoning, rendered, fields)
        visible += reasoning.special.values()
    if tools and calls is not None:
        visible = [*calls.special.values(), *visible]
        with naming("tools"):
            grammar = call_grammar(
                calls,
                tools,
                choice,
                parallel=fields.parallel,
                reasoning=None if closed and not starts_inside else reasoning,
                starts_inside=starts_inside,
                form=form,
                whitespace=fields.json_whitespace or "bounded",
            )
        constraints = {"grammar": grammar}
    encode = partial(service.chat.encode, add_special_tokens=fields.add_special_tokens is True)
    token_ids = tuple(encode(rendered))
    constraints |= {"visible_token_ids": visible or None}
    if reasoning is not None and (budget := _budget(service, fields, reasoning)) is not None:
        constraints["thinking"] = reasoning.bound(budget, rendered, service.tokenizer, calls=bool(tools))
    constraints["cache_pins"] = tuple(
        (common_length(token_ids, encode(_common(rendered, messages[:count], render))), seconds)
        for seconds, count in fields.cached_prefixes.items()
    )

    def bytes_of(token: int) -> bytes:
        hidden = token not in visible and service.tokenizer.is_special(token)
        return b"" if hidden else service.tokenizer.bytes_of(token)

    # A JSON object is a structured answer with a form, and else it may be a call.
    reader = partial(dialect.reader, tools, starts_inside, bytes_of, bare=form is None)
    return ChatPrompt(token_ids, constraints, bool(tools), reader)


def _common(whole: Rendered, first: Messages, render: Callable[..., Rendered]) -> Rendered:
    """Return the beginning of a conversation up to the end of its `first` messages.

    It is empty if the template refuses to end there.
    """
    try:
        text = render(first, add_generation_prompt=False).text
    except RequestError:
        return whole.cut(0)
    return whole.cut(common_length(whole.text, text))


def _form(fields: ConversationFields, reasoning: Reasoning | None) -> StructuredOutput | None:
    """Return the form of an answer without calls; raises ApiError if tools exclude it."""
    form = fields.form
    if form is not None and reasoning is not None and _covers_reasoning(fields, reasoning):
        raise ApiError(
            f"{form.parameter} contains {reasoning.close}, but with tools the server adds the reasoning; "
            "write only the form after the reasoning",
            param=form.parameter,
        )
    if form is not None:
        name = form.parameter
        with naming(name):
            fault, _ = fault_and_warnings(lark_of(form))
        if fault:
            raise ApiError(f"{name} cannot be used: {fault}; change it", param=name)
    return form


def _reasoning_state(
    reasoning: Reasoning, prompt: Rendered, fields: ConversationFields
) -> tuple[bool, bool, str | None]:
    """Return (starts inside reasoning, has no more reasoning, rules before a form).

    There are no such rules if the form itself contains the closing delimiter.
    """
    opened, closed = reasoning.state(prompt)
    if not fields.forms or _covers_reasoning(fields, reasoning) or closed:
        return opened, closed, None
    rules = [f"{name}: {body}" for name, body in reasoning.preamble_rules(opened).items()]
    return opened, closed, "\n".join(rules)


def _covers_reasoning(fields: ConversationFields, reasoning: Reasoning) -> bool:
    return any(reasoning.close in rule for rule in (fields.regex, fields.grammar) if rule is not None)


def _budget(service: Service, fields: ConversationFields, reasoning: Reasoning) -> int | None:
    """Return the maximum of tokens of thinking: the request's, the one of its effort, or the server's.

    A form that contains the reasoning has none; raises ApiError if the request gives both.
    """
    given = None if fields.budget is None or fields.budget < 0 else fields.budget
    if _covers_reasoning(fields, reasoning):
        if given is not None:
            raise ApiError(
                f"the form contains {reasoning.close}, and {fields.budget_field} bounds the reasoning before "
                "a form; remove one of them",
                param=fields.budget_field,
            )
        return None
    if fields.budget is not None:
        return given
    if fields.effort in _BUDGETS and "reasoning_effort" not in service.chat.variables:
        return _BUDGETS[fields.effort]
    return service.config.reasoning_budget


def _variables(service: Service, fields: ConversationFields) -> dict[str, Any]:
    """Return the variables of the chat template; raises ApiError for a variable that it does not read.

    Without `reasoning_effort` a template may have a switch, `enable_thinking` or `thinking`, which an effort
    sets. Without both a switch must agree with the model's fixed behaviour.
    """
    if service.dialect.reasoning is None and fields.budget is not None and fields.budget >= 0:
        service.field_policy.log_once("the budget of thinking has no effect: the model does not reason")
    given = {name: one for name, one in (fields.chat_template_kwargs or {}).items() if one is not None}
    known, effort = service.chat.variables, fields.effort
    switch = next((name for name in ("enable_thinking", "thinking") if name in known), None)
    if effort is not None and "reasoning_effort" in known:
        given["reasoning_effort"] = effort
    elif effort is not None and switch is not None:
        given.setdefault("enable_thinking", effort != "none")
    elif effort is not None and service.dialect.reasoning is None:
        service.field_policy.log_once(f"{fields.effort_field} has no effect: the model does not reason")
    if switch == "thinking" and "enable_thinking" in given:
        given.setdefault("thinking", given.pop("enable_thinking"))
    elif switch is None and given.get("enable_thinking") is (service.dialect.reasoning is not None):
        del given["enable_thinking"]
    for name in given:
        if name not in known:
            allowed = f"; allowed: {', '.join(sorted(known))}" if known else ""
            raise ApiError(
                f"the model's chat template does not read {cut(name)}{allowed}", param="chat_template_kwargs"
            )
    return given
