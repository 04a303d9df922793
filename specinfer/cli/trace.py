"""`specinfer trace`: records texts, with the drafts' proposals at every position."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from specinfer.cli.help import FILE, Command
from specinfer.cli.options import (
    SHORT_MODEL,
    SHORT_SPECULATION,
    build_llm,
    model_options,
    speculation_options,
    template_option,
)

if TYPE_CHECKING:
    from specinfer.tree.expansion import Expansion


_SHORT: Final = (
    *("prompts", "limit", "out", "templated", "temperature", "max_tokens", "seed", "shapes"),
    *(*SHORT_MODEL, *SHORT_SPECULATION),
)


@click.group()
def trace() -> None:
    """Record the traces on which speculation policies are compared."""


@trace.command(cls=Command, short=_SHORT)
@click.option("--prompts", type=FILE, metavar="FILE.jsonl", help='Rows with "prompt" or "turns".')
@click.option("--limit", type=int, metavar="N", help="Use the first N rows.")
@click.option("--out", type=FILE, required=True, metavar="TRACE", help="File to write.")
@template_option
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Sample from the k most likely tokens; 0: all.")
@click.option("--top-p", type=float, default=1.0, help="Sample from the likeliest tokens of this mass.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Longest answer, in tokens.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the first request; then + 1 each."
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="K1,K2,...|learned",
    show_default="--expansion, 8 levels deep, and another",
    help="Shape of the drafts' trees: children at each level, or learned; repeatable.",
)
@model_options
@speculation_options
def record(
    prompts: Path | None,
    limit: int | None,
    out: Path,
    templated: bool | None,
    temperature: float,
    top_k: int,
    top_p: float,
    max_tokens: int,
    seed: int,
    shapes: tuple[str, ...],
    **options: Any,
) -> None:
    """Answer prompts and record each draft's proposals at every position of the answers.

    Only the first turn of each conversation is used. Under the coupled rule the answers do not depend on the
    proposals, so `specinfer policy replay TRACE` computes without a model how fast a policy would have been.
    The file holds the token ids of prompts and answers. Without --prompts the built-in prompts are used.
    """
    from specinfer.report.dataset import built_in, read_dataset
    from specinfer.report.files import check_writable
    from specinfer.sampling_params import SamplingParams
    from specinfer.speculate.drafts.growth import Shape

    dataset = (built_in() if prompts is None else read_dataset(prompts)).head(limit)
    questions = [conversation.turns[0] for conversation in dataset.conversations]
    params = [
        SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_tokens, seed=seed + number
        )
        for number in range(len(questions))
    ]
    widths = [None if shape == "learned" else _plan(shape) for shape in shapes]
    check_writable(out)
    with build_llm(options) as llm:
        from specinfer.progress import ProgressBar
        from specinfer.replay.recorder import learned_shape
        from specinfer.replay.recorder import record as record_trace
        from specinfer.replay.trace import write_trace

        chat = llm.tokenizer.has_chat_template if templated is None else templated
        if chat:
            groups = llm.intake.conversations(
                [[{"role": "user", "content": text}] for text in questions], params
            )
        else:
            groups = llm.intake.prompts(questions, params)
        speculation = llm.config.speculation
        recorded = record_trace(
            llm,
            [one.request for [one] in groups],
            shapes=[
                learned_shape(speculation) if plan is None else Shape(plan, speculation.draw_rule)
                for plan in widths
            ],
            progress=ProgressBar(),
        )
    write_trace(out, recorded)
    click.echo(
        f"{out}: {len(recorded.texts)} texts of {recorded.places} tokens, "
        f"{len(recorded.drafts)} drafts, {out.stat().st_size / (1 << 20):.1f} MiB"
    )


def _plan(shape: str) -> Expansion:
    """Parse an expansion; raises ConfigError."""
    from specinfer.errors import ConfigError
    from specinfer.tree.expansion import Expansion

    try:
        return Expansion.parse(shape)
    except ConfigError as error:
        raise ConfigError(f"{error}; or learned") from None
