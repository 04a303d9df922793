"""`specinfer chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from specinfer.cli.options import (
    Command,
    adapter_option,
    build_llm,
    model_options,
    sampling_fields,
    sampling_options,
    speculation_options,
)
from specinfer.errors import RequestError
from specinfer.request import FinishReason

if TYPE_CHECKING:
    from specinfer.llm import LLM
    from specinfer.request import RequestOutput
    from specinfer.sampling_params import SamplingParams

HELP = "/exit ends, /reset forgets the conversation, /stats shows figures"


@click.command(cls=Command)
@click.option("--system", help="System message.")
@click.option(
    "--reasoning-budget", type=click.IntRange(min=0), metavar="N", help="Maximum of tokens of thinking."
)
@model_options
@adapter_option
@speculation_options
@sampling_options
def chat(system: str | None, reasoning_budget: int | None, **options: Any) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D or /exit ends the conversation."""
    fields = sampling_fields(options)
    llm = build_llm(options)
    if not llm.tokenizer.has_chat_template:
        raise RequestError("this model has no chat template; use `specinfer generate --raw`")
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # arrow keys and history in input()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a stray byte must not end the conversation
    click.echo(f"{HELP}.", err=True)
    llm.loop.rest_when_idle()  # while the user reads and types
    params = replace(llm.default_params, **fields)
    ChatSession(llm, params, system, fills="max_tokens" not in fields, budget=reasoning_budget).run()


class ChatSession:
    """The messages so far and the loop that adds to them."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        system: str | None,
        *,
        fills: bool = False,
        budget: int | None = None,
    ) -> None:
        """With `fills` an answer may take the rest of the context; `max_tokens` of `params` is ignored.

        `budget` is the maximum of tokens of an answer's thinking.
        """
        from specinfer.serve.dialect.dialect import Dialect
        from specinfer.tokenizer.chat_encoder import ChatEncoder

        self._budget = budget
        self._reasoning = None if budget is None else Dialect.of(llm.tokenizer).reasoning
        if budget is not None and self._reasoning is None:
            click.echo("--reasoning-budget has no effect: the model does not reason", err=True)
        self._llm = llm
        self._params = params
        self._fills = fills
        self._encoder = ChatEncoder(llm.tokenizer)
        self._start = [{"role": "system", "content": system}] if system is not None else []
        self._messages = list(self._start)
        self._last: RequestOutput | None = None
        self._before = llm.statistics()  # the last answer

    def run(self) -> None:
        """Read lines and answer them until the end of input."""
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo()
                continue
            if line == "/exit":
                return
            if line.startswith("/"):
                click.echo(self._command(line), err=True)
            elif line:
                self._answer(line)

    def _command(self, line: str) -> str:
        from specinfer.cli.answering import streamed, summary

        if line == "/reset":
            self._messages = list(self._start)
            return "the conversation is forgotten"
        if line == "/stats":
            if self._last is None:
                return "no answer yet"
            done = self._llm.statistics().since(self._before)
            summaries = summary(self._last, self._params), streamed(done, len(self._last.token_ids))
            return "\n".join(filter(None, summaries))
        return HELP

    def _answer(self, question: str) -> None:
        self._messages.append({"role": "user", "content": question})
        text = ""
        self._before = self._llm.statistics()
        try:
            if self._fills:
                room = self._llm.intake.max_length - len(self._encoder.token_ids(self._messages))
                self._params = replace(self._params, max_tokens=max(1, room))
            if self._budget is not None and self._reasoning is not None:
                prompt = self._encoder.render(self._messages)
                bound = self._reasoning.bound(self._budget, prompt, self._llm.tokenizer)
                self._params = replace(self._params, thinking=bound)
            for output in self._llm.stream_chat(self._messages, self._params):
                self._last, text = output, output.text
                click.echo(output.new_text, nl=False)
        except KeyboardInterrupt:
            click.echo(" [stopped]", nl=False)
            if not text:  # an empty answer is not part of the conversation
                del self._messages[-1]
                click.echo()
                return
        except RequestError as error:
            del self._messages[-1]
            click.echo(f"{error}; or /reset to start over", err=True)
            return
        click.echo()
        self._messages.append({"role": "assistant", "content": text})
        if self._last is not None and self._last.finish_reason is FinishReason.LENGTH:
            click.echo(f"[{self._cut(self._last)}]", err=True)

    def _cut(self, output: RequestOutput) -> str:
        context = self._llm.intake.max_length
        if len(output.prompt_token_ids) + len(output.token_ids) >= context:
            return f"the context of {context} tokens is full; /reset starts anew"
        return f"cut at {self._params.max_tokens} tokens; --max-tokens allows more"
