"""`specinfer trace`: record texts with everything that drafts would have guessed along them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specinfer.cli.options import build_llm, model_options, speculation_options

if TYPE_CHECKING:
    from specinfer.tree.expansion import Expansion


@click.group()
def trace() -> None:
    """Record what policies of speculation are compared on."""


@trace.command()
@click.option("--prompts", type=Path, metavar="FILE.jsonl", help='Rows with "prompt" or "turns".')
@click.option("--limit", type=int, metavar="N", help="The first N of them.")
@click.option("--out", type=Path, required=True, metavar="TRACE", help="Where the trace goes.")
@click.option("--chat/--raw", "templated", default=None, help="Through the chat template, or as they stand.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Keep the k most likely tokens; 0: all.")
@click.option("--top-p", type=float, default=1.0, help="Keep the likeliest with this mass.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Of each answer.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the first request; the next: + 1.")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="K1,K2,...|learned",
    help="An expansion in which drafts guess below every root, or all likely paths; repeatable. Default: "
    "--expansion, 8 levels deep, and another.",
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
    """Answer prompts, and write to TRACE what each draft would have guessed at every place of the answers.

    Of a conversation the first turn is asked. Under the coupled rule the answers do not depend on what is
    guessed, so `specinfer policy replay TRACE` tells without a model what any policy would have made of them.
    The file holds token ids of prompts and answers. Without --prompts the built-in ones are asked.
    """
    from specinfer.report.dataset import built_in, read_dataset
    from specinfer.report.files import check_writable
    from specinfer.sampling_params import SamplingParams
    from specinfer.speculate.drafts.growth import Shape

    dataset = (built_in() if prompts is None else read_dataset(prompts)).head(limit)
    asked = [conversation.turns[0] for conversation in dataset.conversations]
    params = [
        SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_tokens, seed=seed + number
        )
        for number in range(len(asked))
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
            groups = llm.intake.conversations([[{"role": "user", "content": text}] for text in asked], params)
        else:
            groups = llm.intake.prompts(asked, params)
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
    """A plan as it is written; raises ConfigError where it is none."""
    from specinfer.errors import ConfigError
    from specinfer.tree.expansion import Expansion

    try:
        return Expansion.parse(shape)
    except ConfigError as error:
        raise ConfigError(f"{error}; or learned") from None
