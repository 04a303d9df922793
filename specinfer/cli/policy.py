"""`specinfer policy`: shows and resets the learned acceptance rates, and replays traces under policies."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from itertools import pairwise
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from specinfer.cli.help import FILE, Command

if TYPE_CHECKING:
    from specinfer.replay.replay import Phase, Played
    from specinfer.speculate.policy.memory import StoredPolicy
    from specinfer.speculation_config import SpeculationConfig

_NAMES: Final = ("off", "fixed", "cost", "best-fixed", "oracle")


@click.group()
def policy() -> None:
    """Show, reset and compare the policies that size trees."""


@policy.command(cls=Command)
@click.option("--json", "json_output", is_flag=True, help="Print one JSON object.")
def show(json_output: bool) -> None:
    """Print the acceptance rates learned on this machine, for each target with its drafts."""
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
        click.echo(f"nothing is learned yet; the folder would be {policies_dir()}")
    for number, (file, stored, why) in enumerate(found):
        lines = [f"{file}", f"  cannot be used: {why}"] if stored is None else _lines(stored)
        click.echo("\n".join(["", *lines] if number else lines))


@policy.command(cls=Command)
@click.argument("target", required=False, metavar="[TARGET]")
def reset(target: str | None) -> None:
    """Remove learned acceptance rates of all targets, or of those with TARGET in their names.

    Unreadable files are removed as well. A running process keeps its rates and may write them again.
    """
    from specinfer.speculate.policy.memory import stored_policies

    removed = 0
    for file, stored, _ in stored_policies():
        if target is None or stored is None or target in str(stored.key.get("target")):
            file.unlink(missing_ok=True)
            removed += 1
            click.echo(f"removed {file}")
    if not removed:
        click.echo("nothing to remove")


def _lines(stored: StoredPolicy) -> list[str]:
    """The contents of one file, as text."""
    from specinfer.speculate.policy.acceptance import CONFIDENCES, TEMPERATURES, AcceptanceRates
    from specinfer.speculate.policy.memory import recall

    drafts, key = stored.learned.get("drafts"), stored.key
    acceptance = AcceptanceRates(
        {str(name): _depth(levels) for name, levels in drafts.items()} if isinstance(drafts, dict) else {}
    )
    try:
        recall(stored.learned, acceptance)
    except (ValueError, KeyError, TypeError) as error:
        return [f"{stored.file}", f"  cannot be used: {error}"]
    temperatures = [
        " at temperature 0",
        *(f" at temperatures over {round(low, 2):g} to {high:g}" for low, high in pairwise(TEMPERATURES)),
        f" at temperatures over {TEMPERATURES[-1]:g}",
    ]
    lines = [
        f"{stored.file}",
        f"  target     {key.get('target')}",
        *(f"  draft      {draft}" for draft in key.get("drafts") or ()),
        f"  device     {key.get('device')}",
        f"  learned of {acceptance.outcomes} guesses",
    ]
    for name, levels in acceptance.levels.items():
        counted = zip(("", *temperatures), (levels.all, *levels.alike), strict=True)
        lines += [
            f"  levels     {name}{temperature}: accepted at level 1, 2, ... "
            + " ".join(f"{rate.any:.2f}" for rate in counts.rates())
            for temperature, counts in counted
            if not temperature or any(counts.tries)
        ]
    for name, curves in acceptance.curves.items():
        for kind, curve in zip(("others", "first choices"), curves, strict=True):
            rates = [f"{p:.2f}->{curve.rate(log(p / (1 - p))):.2f}" for p in CONFIDENCES]
            lines.append(f"  {name}: {kind}, reported->accepted: {' '.join(rates)}")
    return lines


def _depth(levels: object) -> int:
    """Number of levels with counts in a file."""
    of_all = levels.get("all") if isinstance(levels, dict) else None
    return len(of_all) if isinstance(of_all, list) else 0


@policy.command(cls=Command)
@click.argument("traces", nargs=-1, required=True, type=FILE, metavar="TRACE...")
@click.option(
    "--policy",
    "names",
    multiple=True,
    type=click.Choice(_NAMES),
    show_default="off, fixed and cost",
    help="Policy to replay; repeatable.",
)
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Largest tree of one request, in nodes.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Texts in a batch.")
@click.option("--mixed", is_flag=True, help="Take texts of several traces in turns.")
@click.option(
    "--plot",
    type=FILE,
    metavar="FILE",
    help="Plot the choices of cost over time (.png, .svg, .pdf).",
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
    """Replay the texts of each TRACE under policies, without a model.

    Times are computed from the cost curves in the trace, so they are the same at every run and on every
    machine. The policy `off` has no speculation. `fixed` verifies whole configured trees. `cost` is the
    engine's policy, with nothing learned at the start. `best-fixed` is the fastest policy that does the same
    in every step, found by trying all. `oracle` has the texts. The ratio to off has a 95% interval.
    `partly_read` is the number of trees from heads that had missed the beginning of a text. The replay treats
    them as if the heads had read it.
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
        gain = speedup(plain.of_texts, played.of_texts)
        if played.partly_read:
            notes = {**notes, "partly_read": played.partly_read}
        click.echo(
            f"{name:12}{played.tokens:9}{played.steps:9}{played.tokens_per_step:13.3f}{played.seconds:10.2f}"
            f"{gain.ratio:11.3f}  {gain.low:.3f}-{gain.high:.3f}"
            f"{'  ' if notes else ''}{' '.join(f'{k}={v}' for k, v in notes.items())}"
        )


def _play(name: str, parts: list[Phase], speculation: SpeculationConfig) -> tuple[Played, dict[str, Any]]:
    """Replay the parts under a policy; returns the result and the policy's choice, if it has one."""
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
    """Plot the choices of the policy `cost`; `kinds` has the kind of each trace by its id()."""
    from specinfer.replay.choices import Choices, draw_choices
    from specinfer.replay.replay import POLICIES, play, speculation_of

    speculation = speculation_of("cost", speculation)
    choices = Choices()
    texts = [trace for part in parts for trace, _ in part.texts]
    play(parts, POLICIES["cost"](texts[0], speculation), speculation=speculation, on_step=choices)
    draw_choices(choices.steps, [kinds[id(trace)] for trace in texts], path)


def _kind(path: Path) -> str:
    """Kind of a trace by its file name: "code" for code-00.npz and code-01.npz."""
    return re.sub(r"-\d+$", "", path.stem)


def _as_json(played: Played, plain: Played, notes: dict[str, Any]) -> dict[str, Any]:
    from specinfer.replay.replay import speedup

    gain = speedup(plain.of_texts, played.of_texts)
    return {
        **asdict(played),
        "tokens_per_step": played.tokens_per_step,
        "tokens_per_second": played.tokens_per_second,
        "over_none": gain.ratio,
        "over_none_interval": [gain.low, gain.high],
        **notes,
    }
