"""The chat template of a model: Jinja, in a sandbox with bounds, with the helpers model authors count on.

The environment is the one transformers documents for chat templates, since the templates are written
against it: trimmed blocks, loop controls, raise_exception, strftime_now, a tojson that keeps Unicode,
and {% generation %} (which marks the assistant's text for training and here renders its body).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser

from specinfer.errors import ModelFileError, RequestError
from specinfer.tokenizer.bounded_environment import BoundedEnvironment
from specinfer.tokenizer.chat_messages import MessageStyle, messages_for_template
from specinfer.tokenizer.special_names import Rendered, SpecialNames

# `tool_call.id | length != 9` stands in Mistral's templates; those that write ids mean such ones, too.
_ID_LENGTH = re.compile(r"\bid\b[^%{}]{0,40}?\blength\b\s*\)?\s*[!=]=\s*(\d{1,2})\b")
_SHOWN_ID = "[CALL_ID]"
_SHOWN_ID_LENGTH = 9
_SINGLE_CALLS = "single tool-call"  # what Llama 3's say where a message has several
_PROBE = "8a7f3c"  # what no template writes itself
_GIVEN = ("messages", "add_generation_prompt", "tools", "documents")  # by us


class ChatTemplate:
    """A compiled chat template; compiling waits for the first use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)  # bos_token, eos_token, ... as the template names them

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of `prepare`."""
        return self.prepare(messages, add_generation_prompt, tools, variables).text

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        names: SpecialNames | None = None,
    ) -> Rendered:
        """The conversation as the model wants to read it; with `names`, those in messages are found.

        `tools` are what the assistant may call, in OpenAI's shape; `variables` are switches of the template's
        own (`enable_thinking`, say), none of which may have the name of what is given anyway. Raises
        RequestError when a message has no role, the template refuses the conversation or never looks at tools
        that there are, and ModelFileError when the template itself does not parse.
        """
        given = messages_for_template(messages, self._style)
        if tools and "tools" not in self._looked_at:
            raise RequestError(
                "the model's chat template knows no tools; drop them, or tell of them in a message", "tools"
            )
        shown, switches = [dict(tool) for tool in tools], variables or {}

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            return self._render(messages, add_generation_prompt, shown, switches)

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
        self._environment.budget.begin([messages, tools, variables])
        try:
            return template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools or None,
                documents=None,
                **self._special_tokens,
                **variables,
            )
        # A template is the model author's program: given messages it does not expect (content that is
        # None, say) it fails with the plain Python errors of its expressions.
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            LookupError,
            AttributeError,
            RecursionError,  # a call's arguments may nest as deep as their JSON can be read
            MemoryError,
        ) as error:
            raise RequestError(f"the model's chat template refuses the messages: {error}") from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names of variables that it looks at and a caller may give, such as enable_thinking."""
        return self._looked_at - set(self._environment.globals) - set(_GIVEN) - set(self._special_tokens)

    @cached_property
    def _style(self) -> MessageStyle:
        """What the template asks of messages, as its source and a try or two show."""
        length = _ID_LENGTH.search(self.source)
        id_length = _SHOWN_ID_LENGTH if _SHOWN_ID in self.source else None
        return MessageStyle(
            parts=not self._reads(_PROBE) and self._reads([{"type": "text", "text": _PROBE}]),
            id_length=int(length[1]) if length else id_length,
            single_calls=_SINGLE_CALLS in self.source,
        )

    def _reads(self, content: object) -> bool:
        """Whether content of that form gets into the prompt."""
        try:
            return _PROBE in self._render([{"role": "user", "content": content}], True, (), {})
        except RequestError:
            return False

    @cached_property
    def _looked_at(self) -> frozenset[str]:
        _ = self._compiled  # which says what is wrong with it
        return frozenset(meta.find_undeclared_variables(self._environment.parse(self.source)))

    @cached_property
    def _compiled(self) -> jinja2.Template:
        try:
            return self._environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {error.message}"
        except (RecursionError, MemoryError, SyntaxError, ValueError) as error:  # of Python's compiler
            reason = str(error) or type(error).__name__
        raise ModelFileError(
            f"the model's chat template does not parse ({reason}); "
            "use generate with a prompt you format yourself"
        )

    @cached_property
    def _environment(self) -> BoundedEnvironment:
        environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationExtension]
        )
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment


class _GenerationExtension(Extension):
    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
