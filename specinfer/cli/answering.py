"""Answers at the terminal: streamed text, token trees and figures."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from specinfer.cli.tree_view import draw_tree
from specinfer.errors import ConfigError
from specinfer.kernels.disk import gigabytes

if TYPE_CHECKING:
    from specinfer.engine.steps import Statistics, TreeEvent
    from specinfer.llm import LLM
    from specinfer.request import RequestOutput
    from specinfer.sampling_params import SamplingParams


class Listener:
    """Receives each step's tree and draws it, writes it to a trace file, or keeps it in `events`."""

    def __init__(self, llm: LLM, *, show: bool, trace: Path | None, explain: bool = False) -> None:
        self._tokenizer = llm.tokenizer
        self._explain = explain
        self.events: list[TreeEvent] = []  # with `explain`
        self.show = show
        self._colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        self._trace = trace
        self._file: TextIO | None = None
        self._failure: Exception | None = None  # of a step, whose request ends
        if trace is not None:
            with self._writing():
                self._file = trace.open("w", encoding="utf-8")
        llm.on_tree = self._receive
        llm.explains = explain or trace is not None

    def close(self) -> None:
        """Finish the trace file; raises ConfigError when it cannot be written, or the error of a step."""
        if self._file is not None:
            with self._writing():
                self._file.close()
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"cannot write the trace to {self._trace}: {error.strerror}") from None

    def _receive(self, event: TreeEvent) -> None:
        try:
            self._show(event)
        except Exception as error:
            self._failure = self._failure or error
            raise

    def _show(self, event: TreeEvent) -> None:
        if self._explain:
            self.events.append(event)
        if self._file is not None:
            with self._writing():
                self._file.write(json.dumps(event.to_json(self._tokenizer)) + "\n")
        if self.show:
            for line in draw_tree(event, self._tokenizer.text_of):
                click.echo(line.coloured() if self._colour else line.plain())
            click.echo()


def stream(outputs: Iterator[RequestOutput], *, echo: bool = True) -> list[RequestOutput]:
    """Print text as it arrives; returns the finished completions in order."""
    finished: list[RequestOutput] = []
    for output in outputs:
        if echo and output.new_text:
            click.echo(output.new_text, nl=False)
            sys.stdout.flush()
        if output.finished:
            finished.append(output)
    return sorted(finished, key=lambda output: output.index)


def summary(output: RequestOutput, params: SamplingParams) -> str:
    """One line of figures about an answer; tokens per second include the prefill."""
    figures, timing = output.figures, output.timing
    end = timing.finished if timing.finished is not None else time.perf_counter()
    rate = len(output.token_ids) / (end - timing.arrived)
    parts = [f"{len(output.token_ids)} tokens", f"{rate:.1f} tokens/s"]
    if figures.drafted_tokens:
        parts.append(f"{figures.tokens_per_step:.2f} tokens per step")
        accepted_by = ", ".join(
            f"{name} {figures.accepted_by.get(name, 0)} of {n}" for name, n in figures.proposed_by.items()
        )
        parts.append(f"accepted: {accepted_by}")
    if not params.greedy:
        parts.append(f"seed {output.seed}")
    if output.finish_reason is not None:
        parts.append(f"ended by {output.finish_reason.value}")
    return " | ".join(parts)


def streamed(done: Statistics, tokens: int) -> str:
    """One line of figures about streamed weights over `tokens` tokens; "" if no weights were streamed."""
    if not done.streamed_bytes:
        return ""
    parts = [
        f"{done.steps} passes, {tokens / max(done.steps, 1):.2f} tokens per pass",
        f"{gigabytes(done.streamed_bytes)} streamed",
        f"{done.stream_wait_seconds:.1f} s waited for the disk",
    ]
    return " | ".join(parts)


def as_json(output: RequestOutput) -> dict[str, Any]:
    """An answer as plain JSON values."""
    figures, timing = output.figures, output.timing
    assert timing.finished is not None, "the answer is finished"
    return {
        "text": output.text,
        "token_ids": list(output.token_ids),
        "prompt_tokens": len(output.prompt_token_ids),
        "finish_reason": output.finish_reason.value if output.finish_reason else None,
        "error": output.error,
        "seed": output.seed,
        "cached_tokens": output.cached_tokens,
        **_logprobs(output),
        "seconds": timing.finished - timing.arrived,
        "ttft": timing.ttft,
        "speculation": {
            "steps": figures.steps,
            "tokens_per_step": figures.tokens_per_step,
            "drafted_tokens": figures.drafted_tokens,
            "accepted_tokens": figures.accepted_tokens,
            "accepted_per_depth": figures.accepted_per_depth,
            "drafted_per_depth": figures.drafted_per_depth,
            "credit": figures.accepted_by,
            "drafted": figures.proposed_by,
        },
    }


def _logprobs(output: RequestOutput) -> dict[str, Any]:
    if output.logprobs is None:
        return {}
    return {
        "logprobs": [
            [
                # JSON has no infinity, the log probability of an excluded token.
                {"id": i, "text": t.text, "logprob": t.logprob if t.logprob > -inf else None, "rank": t.rank}
                for i, t in position.items()
            ]
            for position in output.logprobs
        ]
    }
