"""`specinfer policy`: what decides how much is guessed, what it has learnt, what others would have done."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from itertools import pairwise
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from specinfer.replay.replay import Phase, Played
    from specinfer.speculate.policy.memory import StoredPolicy
    from specinfer.speculation_config import SpeculationConfig

_NAMES: Final = ("off", "fixed", "cost", "best-fixed", "oracle")


@click.group()
def policy() -> None:
    """Look at how speculation is decided."""


@policy.command()
@click.option("--json", "json_output", is_flag=True, help="Print one JSON object.")
def show(json_output: bool) -> None:
    """Print what speculation has learnt on this machine, of each target with its drafts: where it is, how
    much it is, and how often guesses became text.
    """
    from specinfer.speculate.policy.memory import policies_dir, stored_policies

    found = stored_policies()
    if json_output:
        files = [
            {"file": str(file), "error": why}
            if stored is None
            else {"file": str(file), "key": stored.key, "learned": stored.learned}
            for file, stored, why in found
        ]
        click.echo(json.dumps({"folder": str(policies_dir()), "policies": files}))
        return
    if not found:
        click.echo(f"nothing was learnt so far; it would be in {policies_dir()}")
    for number, (file, stored, why) in enumerate(found):
        lines = [f"{file}", f"  cannot be used: {why}"] if stored is None else _lines(stored)
        click.echo("\n".join(["", *lines] if number else lines))


@policy.command()
@click.argument("target", required=False, metavar="[TARGET]")
def reset(target: str | None) -> None:
    """Forget what speculation has learnt: of all targets, or of those with TARGET in their names.

    Files that cannot be used go as well. A process that runs keeps what it knows, and may write it again.
    """
    from specinfer.speculate.policy.memory import stored_policies

    removed = 0
    for file, stored, _ in stored_policies():
        if target is None or stored is None or target in str(stored.key.get("target")):
            file.unlink(missing_ok=True)
            removed += 1
            click.echo(f"removed {file}")
    if not removed:
        click.echo("there is nothing to forget")


def _lines(stored: StoredPolicy) -> list[str]:
    """The contents of one file, as text."""
    from specinfer.speculate.policy.chances import BELIEVED, HEATS, Chances
    from specinfer.speculate.policy.memory import recall

    drafts, key = stored.learned.get("drafts"), stored.key
    chances = Chances(
        {str(name): _depth(levels) for name, levels in drafts.items()} if isinstance(drafts, dict) else {}
    )
    try:
        recall(stored.learned, chances)
    except (ValueError, KeyError, TypeError) as error:
        return [f"{stored.file}", f"  cannot be used: {error}"]
    alike = [
        " at temperature 0",
        *(f" at temperatures over {round(low, 2):g} to {high:g}" for low, high in pairwise(HEATS)),
        f" at temperatures over {HEATS[-1]:g}",
    ]
    lines = [
        f"{stored.file}",
        f"  target     {key.get('target')}",
        *(f"  draft      {draft}" for draft in key.get("drafts") or ()),
        f"  device     {key.get('device')}",
        f"  learnt of  {chances.outcomes} guesses",
    ]
    for name, levels in chances.levels.items():
        counted = zip(("", *alike), (levels.all, *levels.alike), strict=True)
        lines += [
            f"  levels     {name}{whose}: right at level 1, 2, ... "
            + " ".join(f"{rate.any:.2f}" for rate in counts.rates())
            for whose, counts in counted
            if not whose or any(counts.tries)
        ]
    for name, curves in chances.curves.items():
        for kind, curve in zip(("others", "first choices"), curves, strict=True):
            told = [f"{said:.2f}->{curve.rate(log(said / (1 - said))):.2f}" for said in BELIEVED]
            lines.append(f"  {name}: {kind}, said->became: {' '.join(told)}")
    return lines


def _depth(levels: object) -> int:
    """The levels that a file has counts of."""
    of_all = levels.get("all") if isinstance(levels, dict) else None
    return len(of_all) if isinstance(of_all, list) else 0


@policy.command()
@click.argument("traces", nargs=-1, required=True, type=Path, metavar="TRACE...")
@click.option(
    "--policy",
    "names",
    multiple=True,
    type=click.Choice(_NAMES),
    help="Who decides; repeatable. Default: off, fixed and cost.",
)
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Of one request's tree, root included.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Texts played at once.")
@click.option("--mixed", is_flag=True, help="Texts of several traces in turns, and not one after the other.")
@click.option(
    "--plot",
    type=Path,
    metavar="FILE",
    help="A picture (.png, .svg, .pdf) of what cost has chosen over time.",
)
@click.option("--json", "json_output", is_flag=True, help="Print one JSON object.")
def replay(
    traces: tuple[Path, ...],
    names: tuple[str, ...],
    nodes: int | None,
    batch: int,
    mixed: bool,
    plot: Path | None,
    json_output: bool,
) -> None:
    """Play the texts of each TRACE under policies, without a model and on one clock.

    Seconds are those of the cost curves in the trace: the same at every run and on every machine. off is no
    speculation, fixed all of the configured trees, cost the engine's own policy, which begins with nothing
    learnt; best-fixed is the quickest of the policies that do the same in
    every step, found by trying them, and oracle knows the texts. Of the ratio to off there is a 95% interval:
    what other texts of the same kind would show. partly_read, where it is not 0, counts trees of heads that
    had missed the beginning of a text, and are played as if they had read it.
    """
    from specinfer.replay.replay import mixed as in_turns
    from specinfer.replay.replay import speedup, whole, with_nodes
    from specinfer.replay.trace import read_trace

    if plot is not None:
        from specinfer.report.files import check_plot

        check_plot(plot)
    read = [read_trace(path) for path in traces]
    parts = in_turns(read, batch) if mixed else whole(read, batch)
    speculation = with_nodes(read[0], nodes)
    rows = {name: _play(name, parts, speculation) for name in names or ("off", "fixed", "cost")}
    plain = rows["off"][0] if "off" in rows else _play("off", parts, speculation)[0]
    if plot is not None:
        kinds = {id(trace): _kind(path) for trace, path in zip(read, traces, strict=True)}
        _draw(parts, speculation, kinds, plot)
    if json_output:
        policies = {name: _as_json(played, plain, notes) for name, (played, notes) in rows.items()}
        click.echo(
            json.dumps({"traces": [str(path) for path in traces], "batch": batch, "policies": policies})
        )
        return
    click.echo(
        f"{'policy':12}{'tokens':>9}{'steps':>9}{'tokens/step':>13}{'seconds':>10}{'over none':>11}  interval"
    )
    for name, (played, notes) in rows.items():
        over = speedup(plain.of_texts, played.of_texts)
        if played.partly_read:
            notes = {**notes, "partly_read": played.partly_read}
        click.echo(
            f"{name:12}{played.tokens:9}{played.steps:9}{played.tokens_per_step:13.3f}{played.seconds:10.2f}"
            f"{over.ratio:11.3f}  {over.low:.3f}-{over.high:.3f}"
            f"{'  ' if notes else ''}{' '.join(f'{k}={v}' for k, v in notes.items())}"
        )


def _play(name: str, parts: list[Phase], speculation: SpeculationConfig) -> tuple[Played, dict[str, Any]]:
    """What a policy makes of the parts, and what was found out on the way."""
    from specinfer.replay.baselines import best_fixed
    from specinfer.replay.oracle import play_oracle
    from specinfer.replay.replay import POLICIES, play, play_without, speculation_of

    if name == "off":
        return play_without(parts), {}
    if name == "oracle":
        return play_oracle(parts, speculation), {}
    if name == "best-fixed":
        choice, played = best_fixed(parts, speculation)
        if choice is None or played is None:
            return play_without(parts), {}
        return played, {
            "speculators": "+".join(choice.speculators),
            "depth": choice.depth,
            "nodes": choice.nodes,
        }
    speculation = speculation_of(name, speculation)
    return play(parts, POLICIES[name](parts[0].texts[0][0], speculation), speculation=speculation), {}


def _draw(parts: list[Phase], speculation: SpeculationConfig, kinds: dict[int, str], path: Path) -> None:
    """Draw what the engine's own policy chooses over the parts; `kinds` names each trace, by its id()."""
    from specinfer.replay.choices import Choices, draw_choices
    from specinfer.replay.replay import POLICIES, play, speculation_of

    speculation = speculation_of("cost", speculation)
    choices = Choices()
    texts = [trace for part in parts for trace, _ in part.texts]
    play(parts, POLICIES["cost"](texts[0], speculation), speculation=speculation, on_step=choices)
    draw_choices(choices.steps, [kinds[id(trace)] for trace in texts], path)


def _kind(path: Path) -> str:
    """What a trace's texts are, by its file's name: "code" of code-00.npz and of code-01.npz."""
    return re.sub(r"-\d+$", "", path.stem)


def _as_json(played: Played, plain: Played, notes: dict[str, Any]) -> dict[str, Any]:
    from specinfer.replay.replay import speedup

    over = speedup(plain.of_texts, played.of_texts)
    return {
        **asdict(played),
        "tokens_per_step": played.tokens_per_step,
        "tokens_per_second": played.tokens_per_second,
        "over_none": over.ratio,
        "over_none_interval": [over.low, over.high],
        **notes,
    }
