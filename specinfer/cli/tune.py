"""`specinfer tune`: train a draft head on what a target says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from specinfer.cli.options import engine_config, model_options
from specinfer.errors import TuneError

if TYPE_CHECKING:
    from specinfer.tune.prompts import Prompts

_LOSSES: Final = ("hybrid", "kl", "tv", "coupled")


@click.command()
@click.option("--out", type=Path, required=True, metavar="DIR", help="Where the head goes: --draft DIR.")
@click.option(
    "--prompts",
    "files",
    type=Path,
    multiple=True,
    metavar="FILE.jsonl",
    help='Rows with "prompt" or "turns"; repeatable.',
)
@click.option("--traffic", type=Path, metavar="LOG", help="What a server logged (--log-traffic), instead.")
@click.option("--minutes", type=float, default=30.0, show_default=True, metavar="M", help="In all.")
@click.option(
    "--collect-minutes", type=float, metavar="M", help="Of these, for collecting answers; default: a third."
)
@click.option("--resume", is_flag=True, help="Go on with the tuning in DIR.")
@click.option("--loss", type=click.Choice(_LOSSES), default="hybrid", show_default=True)
@click.option(
    "--kind",
    type=click.Choice(("block", "eagle")),
    default="block",
    show_default=True,
    help="Guesses all tokens in one pass, or a level of a tree in each.",
)
@click.option(
    "--init",
    metavar="target|random|DRAFT",
    help="What it begins as: layers of the target's, random numbers, or a trained head.",
)
@click.option(
    "--layout",
    type=click.Choice(("specinfer", "dspark")),
    default="specinfer",
    show_default=True,
    help="dspark is read by vLLM, too, and learns far more slowly.",
)
@click.option("--layers", type=click.IntRange(1, 8), default=1, show_default=True, help="Of the head.")
@click.option(
    "--depth",
    type=click.IntRange(2, 16),
    default=5,
    show_default=True,
    help="Tokens it guesses on end.",
)
@click.option(
    "--vocabulary",
    type=click.IntRange(16),
    default=8192,
    show_default=True,
    metavar="N",
    help="Tokens it can name: the likeliest of all answers.",
)
@click.option("--chat/--raw", default=None, help="Through the chat template, or as they stand.")
@click.option("--max-tokens", type=click.IntRange(2), default=256, show_default=True, help="Of each answer.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of first weights and of batches.")
@model_options
def tune(
    out: Path,
    files: tuple[Path, ...],
    traffic: Path | None,
    minutes: float,
    collect_minutes: float | None,
    resume: bool,
    loss: str,
    kind: str,
    init: str | None,
    layout: str,
    layers: int,
    depth: int,
    vocabulary: int,
    chat: bool | None,
    max_tokens: int,
    seed: int,
    **options: Any,
) -> None:
    """Train a draft head for a model on its own answers, and write it to DIR.

    First the model answers prompts, at temperatures 0, 0.7 and 1; then a head learns from what the model
    thought on the way. One of sixteen prompts is held out, and the
    head that guesses best along their answers is kept. Whoever stops it, with Ctrl-C too, loses two minutes
    at most: --resume goes on. Without --prompts or --traffic the built-in prompts are asked, which are few.
    """
    config = engine_config({**options, "ngram": False})
    if traffic is not None and files:
        raise TuneError("--prompts and --traffic are both given; give one of them")
    from typing import cast

    from specinfer.progress import ProgressBar
    from specinfer.tune.losses import Loss
    from specinfer.tune.new_head import HeadShape, Kind, Layout
    from specinfer.tune.trainer import TrainConfig
    from specinfer.tune.tuning import TuneConfig, Tuning

    tuning = Tuning(
        TuneConfig(
            target=config,
            out=out,
            minutes=minutes,
            collect_minutes=collect_minutes,
            resume=resume,
            chat=chat,
            max_tokens=max_tokens,
            init=init,
            head=HeadShape(
                kind=cast(Kind, kind),
                layout=cast(Layout, layout),
                layers=layers,
                depth=depth,
                vocabulary=vocabulary,
            ),
            training=TrainConfig(loss=cast(Loss, loss), seed=seed),
        ),
        progress=ProgressBar(),
        say=lambda line: click.echo(line, err=True),
    )
    prompts, sources = _prompts(files, traffic, tuning.vocab)
    figures = tuning.run(prompts, sources)
    click.echo(
        f"{out}: {figures.tokens_per_pass:.2f} tokens a pass on {figures.places} held-out places; "
        f"use it with --draft {out}"
    )


def _prompts(files: tuple[Path, ...], traffic: Path | None, vocab: int) -> tuple[Prompts, list[str]]:
    """What is asked, and the names of where it is from."""
    from specinfer.tune.prompts import built_in_prompts, read_prompts, read_traffic

    if traffic is not None:
        return read_traffic(traffic, vocab), [traffic.name]
    if files:
        return read_prompts(files), [file.name for file in files]
    return built_in_prompts(), ["prompts of specinfer"]
