"""`specinfer generate`: answer one prompt."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from specinfer.cli.options import (
    FILE,
    Command,
    adapter_option,
    build_llm,
    model_options,
    sampling_fields,
    sampling_options,
    speculation_options,
    template_option,
)
from specinfer.errors import ConfigError, RequestError
from specinfer.files import check_writable

if TYPE_CHECKING:
    from specinfer.engine.steps import TreeEvent
    from specinfer.request import RequestOutput
    from specinfer.tokenizer import Tokenizer

_MAX_TOKENS: Final = 256  # a model without a chat template may never end


@click.command(cls=Command)
@model_options
@click.argument("prompt", required=False)
@click.option(
    "--file", "-f", "file", type=FILE, metavar="FILE", help="Read the prompt from a file; -: stdin."
)
@template_option
@click.option("--system", help="System message; needs a chat template.")
@click.option("--show-trees", is_flag=True, help="Draw the token tree of each step.")
@click.option("--trace", type=FILE, metavar="FILE", help="Write each step's tree to a file, as a JSON line.")
@click.option("--explain", is_flag=True, help="Print each step's speculators and its decision.")
@click.option("--n", type=int, default=1, help="Number of independent answers, printed at the end.")
@click.option(
    "--logprobs",
    type=int,
    metavar="K",
    help="With --json: also the K likeliest tokens.",
)
@click.option("--json", "json_output", is_flag=True, help="Print one JSON object instead of the text.")
@adapter_option
@speculation_options
@sampling_options
def generate(
    prompt: str | None,
    file: Path | None,
    templated: bool | None,
    system: str | None,
    show_trees: bool,
    trace: Path | None,
    explain: bool,
    n: int,
    logprobs: int | None,
    json_output: bool,
    **options: Any,
) -> None:
    """Answer PROMPT on standard output, with figures on standard error.

    A single word is the PROMPT if --model is given or if it names no model. Without PROMPT and --file the
    prompt is read from standard input. A model with a chat template uses it; --raw sends the bare prompt.
    """
    if show_trees and json_output:
        raise click.UsageError("--show-trees and --json are given; give one of them")
    if logprobs is not None and not json_output:
        raise click.UsageError("--logprobs needs --json; add it")
    text = _prompt(prompt, file)
    if trace is not None:
        check_writable(trace)
    fields = {"max_tokens": _MAX_TOKENS, **sampling_fields(options, n=n, logprobs=logprobs)}
    llm = build_llm(options)
    params = replace(llm.default_params, **fields)
    from specinfer.cli.answering import as_json, streamed, summary
    from specinfer.cli.tree_view import print_steps, show_tree, steps_as_json

    chat = llm.tokenizer.has_chat_template if templated is None else templated
    if system is not None and not chat:
        raise RequestError("--system needs a chat template: leave --raw out, or use a model that has one")
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": text})
    before = llm.statistics()
    answers: list[RequestOutput] = []
    new: deque[TreeEvent] = deque()  # events that are neither drawn nor written
    events: list[TreeEvent] = []  # all, if they are explained at the end
    if show_trees or explain or trace is not None:
        llm.on_tree, llm.explains = new.append, explain or trace is not None
    echo = n == 1 and not json_output and not show_trees
    with _trace_file(trace) as write:
        for output in llm.stream_chat(messages, params) if chat else llm.stream(text, params):
            if echo:
                click.echo(output.new_text, nl=False)
            while new:
                event = new.popleft()
                write(event, llm.tokenizer)
                if show_trees:
                    show_tree(event, llm.tokenizer.text_of)
                if explain:
                    events.append(event)
            if output.finished:
                answers.append(output)
    answers.sort(key=lambda output: output.index)
    if json_output:
        objects = [as_json(answer) for answer in answers]
        if explain:
            for answer, fields in zip(answers, objects, strict=True):
                fields["steps"] = steps_as_json(events, answer)
        click.echo(json.dumps(objects[0] if n == 1 else objects))
    else:
        for answer in answers:
            if n > 1:
                click.echo(f"--- {answer.index + 1} of {n}")
            click.echo("" if echo else answer.text)
            if explain:
                print_steps(events, answer)
            click.echo(f"[{summary(answer, params)}]", err=True)
        tokens = sum(len(answer.token_ids) for answer in answers)
        if figures := streamed(llm.statistics().since(before), tokens):
            click.echo(f"[{figures}]", err=True)
    failed = next((answer.error for answer in answers if answer.error is not None), None)
    if failed is not None:
        raise RequestError(failed)


def _prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from argument, file or standard input; raises RequestError if it is empty or not UTF-8."""
    if argument is not None and file is not None:
        raise click.UsageError("a prompt and --file are given; give one of them")
    if argument is not None:
        # Python decodes invalid UTF-8 on the command line to lone surrogates; this restores the bytes.
        data, where = argument.encode("utf-8", "surrogateescape"), "the prompt"
    elif file is not None and str(file) != "-":
        try:
            data, where = file.read_bytes(), str(file)
        except OSError as error:
            raise RequestError(f"cannot read the prompt from {file}: {error.strerror}") from None
    elif file is None and sys.stdin.isatty():
        raise click.UsageError("no prompt: give it as an argument, with --file, or on standard input")
    else:
        data, where = sys.stdin.buffer.read(), "standard input"
    try:
        text = data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise RequestError(f"{where} is not UTF-8 text at byte {error.start}; convert it to UTF-8") from None
    if not text.strip():
        raise RequestError(f"{where} is empty; give at least one word")
    return text


@contextmanager
def _trace_file(path: Path | None) -> Iterator[Callable[[TreeEvent, Tokenizer], None]]:
    """Open a trace, and give the function that writes an event to it; raises ConfigError if it fails."""
    try:
        file = None if path is None else path.open("wb", buffering=0)
    except OSError as error:
        raise ConfigError(f"cannot write the trace to {path}: {error.strerror}") from None

    def write(event: TreeEvent, tokenizer: Tokenizer) -> None:
        try:
            if file is not None:
                file.write(json.dumps(event.to_json(tokenizer)).encode() + b"\n")
        except OSError as error:
            raise ConfigError(f"cannot write the trace to {path}: {error.strerror}") from None

    with nullcontext() if file is None else file:
        yield write
