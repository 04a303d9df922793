"""`specinfer tune`: train drafts on what a target says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from specinfer.cli.options import engine_config, model_options
from specinfer.errors import TuneError
from specinfer.hub.pool import MOST_MEMBERS

if TYPE_CHECKING:
    from specinfer.tune.draft import Kind
    from specinfer.tune.prompts import Prompts

_LOSSES: Final = ("hybrid", "kl")
_FORMS: Final = ("discount", "sequence", "none")
_SSM_LAYERS: Final = 4
_AS_GIVEN: Final = (  # options that are fields of TuneConfig
    *("minutes", "collect_minutes", "resume", "replace", "chat", "max_tokens", "init", "members"),
)


@click.command()
@click.option("--out", type=Path, required=True, metavar="DIR", help="Where the draft goes: --draft DIR.")
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
@click.option(
    "--replace",
    type=Path,
    metavar="DIR",
    help="A head or pool that the new one takes the place of, where it is better beyond doubt.",
)
@click.option("--resume", is_flag=True, help="Go on with the tuning in DIR.")
@click.option("--loss", type=click.Choice(_LOSSES), default="hybrid", show_default=True)
@click.option(
    "--kind",
    type=click.Choice(("block", "eagle", "ssm")),
    default="block",
    show_default=True,
    help="A head that guesses all tokens in one pass, or one that guesses a level in each; a small model.",
)
@click.option(
    "--init",
    metavar="target|random|DRAFT",
    help="What it begins as: layers of the target's, random numbers, or a trained draft.",
)
@click.option(
    "--layout",
    type=click.Choice(("specinfer", "dspark")),
    show_default="specinfer",
    help="Of block heads: dspark is what other engines read, and learns far more slowly.",
)
@click.option("--layers", type=click.IntRange(1, 8), show_default="1, small models: 2", help="Of the draft.")
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
    show_default="8192, or those of the head to go on from",
    metavar="N",
    help="Tokens a head can name: the likeliest of all answers, of a head to go on from its own first.",
)
@click.option(
    "--members",
    type=click.IntRange(1, MOST_MEMBERS),
    default=1,
    show_default=True,
    help="Drafts that share the time, as a pool.",
)
@click.option(
    "--boost",
    type=click.Choice(_FORMS),
    show_default="discount",
    help="How later members learn what the pool does not guess: other laws, other texts; or not at all.",
)
@click.option(
    "--warm/--cold",
    default=None,
    show_default="warm",
    help="Later members begin as the one before them, or as the first one did.",
)
@click.option("--chat/--raw", default=None, help="Through the chat template, or as they stand.")
@click.option("--max-tokens", type=click.IntRange(2), default=256, show_default=True, help="Of each answer.")
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Of what is asked first, of answers, first weights and batches.",
)
@model_options
def tune(
    out: Path,
    files: tuple[Path, ...],
    traffic: Path | None,
    loss: str,
    kind: str,
    layout: str | None,
    layers: int | None,
    depth: int,
    vocabulary: int | None,
    boost: str | None,
    warm: bool | None,
    seed: int,
    **options: Any,
) -> None:
    """Train a draft for a model on its own answers, or a pool of them, and write it to DIR.

    First the model answers prompts, at temperatures 0, 0.7 and 1; then drafts learn from what the model
    thought on the way. One of sixteen prompts is held out, and the draft that guesses best along their
    answers is kept, of a pool the members that pay. Whoever stops it, with Ctrl-C too, loses about two
    minutes, or the answers under way where one takes longer than that: --resume goes on. Without --prompts
    or --traffic the built-in prompts are asked, which are few.
    """
    as_given = {name: options.pop(name) for name in _AS_GIVEN}
    config = engine_config({**options, "lookup": False})
    if traffic is not None and files:
        raise TuneError("--prompts and --traffic are both given; give one of them")
    from typing import cast

    from specinfer.progress import ProgressBar
    from specinfer.tune.boosting import BoostConfig
    from specinfer.tune.losses import Loss
    from specinfer.tune.trainer import TrainConfig
    from specinfer.tune.tuning import TuneConfig, Tuning

    given: dict[str, Any] = {"form": boost, "warm": warm}
    boosting = {name: value for name, value in given.items() if value is not None}
    tuning = Tuning(
        TuneConfig(
            target=config,
            out=out,
            kind=_kind(kind, layout, layers, depth, vocabulary),
            boost=BoostConfig(**boosting) if boosting else None,
            training=TrainConfig(loss=cast(Loss, loss), seed=seed),
            **as_given,
        ),
        progress=ProgressBar(),
        say=lambda line: click.echo(line, err=True),
    )
    prompts, sources = _prompts(files, traffic, tuning.vocab)
    outcome = tuning.run(prompts, sources)
    figures, selection = outcome.figures, outcome.selection
    advice = (
        f"use it with --draft {out}"
        if selection.pays
        else f"--resume with more --minutes trains it on, and --draft {out} uses it all the same"
    )
    click.echo(
        f"{out}: {figures.tokens_per_pass:.2f} tokens a pass on {figures.places} held-out places; "
        f"it {selection.verdict()}; {advice}"
    )


def _kind(
    kind: str,
    layout: str | None,
    layers: int | None,
    depth: int,
    vocabulary: int | None,
) -> Kind:
    """The kind that is asked for; raises TuneError for an option of another kind."""
    from typing import cast

    from specinfer.tune.head_kinds import BlockKind, EagleKind, Layout
    from specinfer.tune.small_model import SsmKind

    if kind != "block" and layout is not None:
        raise TuneError(f"layout is {layout}, and kind {kind}; it is for block heads: leave it out")
    if kind == "ssm":
        if vocabulary is not None:
            raise TuneError(
                f"vocabulary is {vocabulary}, and kind ssm, which can name every token; leave it out"
            )
        if layers is not None and layers > _SSM_LAYERS:
            raise TuneError(f"layers is {layers}, and kind ssm; allowed: 1 to {_SSM_LAYERS}")
        return SsmKind(layers=layers or 2, depth=depth)
    if kind == "eagle":
        return EagleKind(layers=layers or 1, depth=depth, vocabulary=vocabulary)
    usual = cast(Layout, layout or "specinfer")
    return BlockKind(layout=usual, layers=layers or 1, depth=depth, vocabulary=vocabulary)


def _prompts(files: tuple[Path, ...], traffic: Path | None, vocab: int) -> tuple[Prompts, list[str]]:
    """What is asked, and the names of where it is from."""
    from specinfer.tune.prompts import built_in_prompts, read_prompts, read_traffic

    if traffic is not None:
        return read_traffic(traffic, vocab), [traffic.name]
    if files:
        return read_prompts(files), [file.name for file in files]
    return built_in_prompts(), ["prompts of specinfer"]
