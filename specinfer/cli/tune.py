"""`specinfer tune`: trains drafts on a target's answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from specinfer.cli.options import FILE, Command, engine_config, model_options
from specinfer.errors import TuneError
from specinfer.hub.model_files import MAX_MEMBERS

if TYPE_CHECKING:
    from specinfer.tune.draft import Kind
    from specinfer.tune.prompts import Prompts

_SSM_LAYERS: Final = 4
_TUNE_FIELDS: Final = (  # options that are fields of TuneConfig
    *("minutes", "collect_minutes", "resume", "chat", "max_tokens", "init", "members"),
)


@click.command(cls=Command)
@click.option("--out", type=FILE, required=True, metavar="DIR", help="Folder of the draft, for --draft DIR.")
@click.option(
    "--prompts",
    "files",
    type=FILE,
    multiple=True,
    metavar="FILE.jsonl",
    help='Rows with "prompt" or "turns"; repeatable.',
)
@click.option("--traffic", type=FILE, metavar="LOG", help="Log of a server (--log-traffic), as prompts.")
@click.option("--minutes", type=float, default=30.0, metavar="M", help="Total time.")
@click.option(
    "--collect-minutes",
    type=float,
    metavar="M",
    show_default="a third",
    help="Time for collecting answers.",
)
@click.option("--resume", is_flag=True, help="Continue the tuning in DIR.")
@click.option(
    "--kind",
    type=click.Choice(("block", "eagle", "mtp", "ssm")),
    default="block",
    help="block: a head with one pass for all levels; eagle, mtp: one pass a level; ssm: a small model.",
)
@click.option(
    "--init",
    metavar="target|random|DRAFT",
    show_default="target; eagle, mtp: random",
    help="Initial weights: layers of the target, random numbers, or a trained draft.",
)
@click.option("--layers", type=click.IntRange(1, 8), show_default="1, small models: 2", help="Layers.")
@click.option(
    "--depth",
    type=click.IntRange(2, 16),
    default=5,
    help="Levels that it guesses.",
)
@click.option(
    "--vocabulary",
    type=click.IntRange(16),
    show_default="8192, or that of --init",
    metavar="N",
    help="Tokens that a head can guess: the most frequent.",
)
@click.option(
    "--members",
    type=click.IntRange(1, MAX_MEMBERS),
    default=1,
    help="Drafts of a pool, which share the time.",
)
@click.option(
    "--chat/--raw",
    default=None,
    show_default="--chat, if there is a template",
    help="Use the chat template, or the bare prompt.",
)
@click.option("--max-tokens", type=click.IntRange(2), default=256, help="Longest answer.")
@click.option(
    "--seed",
    type=int,
    default=0,
    help="Seed of prompts, answers, weights and batches.",
)
@model_options
def tune(
    out: Path,
    files: tuple[Path, ...],
    traffic: Path | None,
    kind: str,
    layers: int | None,
    depth: int,
    vocabulary: int | None,
    seed: int,
    **options: Any,
) -> None:
    """Train a draft, or a pool of drafts, on a model's own answers and write it to DIR.

    First the model answers prompts at temperatures 0, 0.7 and 1; then drafts learn from its hidden states.
    One of sixteen prompts is held out: the checkpoint that guesses their answers best is kept, and of a pool
    the members that pay. After Ctrl-C or a kill, --resume continues; about two minutes of work are lost, or
    the answers under way if they take longer. Without --prompts and --traffic the few built-in prompts are
    used.
    """
    fields = {name: options.pop(name) for name in _TUNE_FIELDS}
    config = engine_config({**options, "lookup": False})
    if traffic is not None and files:
        raise TuneError("--prompts and --traffic are both given; give one of them")
    from specinfer.progress import ProgressBar
    from specinfer.tune.trainer import TrainConfig
    from specinfer.tune.tuning import TuneConfig, Tuning

    tuning = Tuning(
        TuneConfig(
            target=config,
            out=out,
            kind=_kind(kind, layers, depth, vocabulary),
            training=TrainConfig(seed=seed),
            **fields,
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
        else f"--resume with more --minutes continues the training; --draft {out} uses it as it is"
    )
    click.echo(
        f"{out}: {figures.tokens_per_pass:.2f} tokens per pass at {figures.places} held-out positions; "
        f"it {selection.verdict()}; {advice}"
    )


def _kind(kind: str, layers: int | None, depth: int, vocabulary: int | None) -> Kind:
    """The kind of draft; raises TuneError for an option that does not apply to it."""
    from specinfer.tune.head_draft import BlockKind, EagleKind, MtpKind
    from specinfer.tune.small_model import SsmKind

    if kind == "ssm":
        if vocabulary is not None:
            raise TuneError(
                f"vocabulary is {vocabulary} with kind ssm, which guesses any token; leave it out"
            )
        if layers is not None and layers > _SSM_LAYERS:
            raise TuneError(f"layers is {layers} with kind ssm; allowed: 1 to {_SSM_LAYERS}")
        return SsmKind(layers=layers or 2, depth=depth)
    made = {"eagle": EagleKind, "mtp": MtpKind, "block": BlockKind}[kind]
    return made(layers=layers or 1, depth=depth, vocabulary=vocabulary)


def _prompts(files: tuple[Path, ...], traffic: Path | None, vocab: int) -> tuple[Prompts, list[str]]:
    """The prompts, and the names of their sources."""
    from specinfer.tune.prompts import built_in_prompts, read_prompts, read_traffic

    if traffic is not None:
        return read_traffic(traffic, vocab), [traffic.name]
    if files:
        return read_prompts(files), [file.name for file in files]
    return built_in_prompts(), ["prompts of specinfer"]
