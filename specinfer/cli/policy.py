"""`specinfer policy`: shows the learned acceptance rates."""

from __future__ import annotations

import json
from itertools import pairwise
from math import log
from typing import TYPE_CHECKING

import click

from specinfer.cli.options import Command

if TYPE_CHECKING:
    from specinfer.speculate.policy.memory import StoredPolicy


@click.group()
def policy() -> None:
    """Show the learned acceptance rates, by which trees are sized; `cache clear policies` removes them."""


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


def _lines(stored: StoredPolicy) -> list[str]:
    """The contents of one file, as text."""
    from specinfer.speculate.policy.acceptance import CONFIDENCES, TEMPERATURES, AcceptanceRates
    from specinfer.speculate.policy.memory import recall

    drafts, key = stored.learned["drafts"], stored.key
    acceptance = AcceptanceRates({name: len(levels["all"]) for name, levels in drafts.items()})
    recall(stored.learned, acceptance)
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
            if not temperature or any(map(any, counts.counts))
        ]
    for name, curves in acceptance.curves.items():
        for kind, curve in zip(("others", "first choices"), curves, strict=True):
            rates = [f"{p:.2f}->{curve.rate(log(p / (1 - p))):.2f}" for p in CONFIDENCES]
            lines.append(f"  {name}: {kind}, reported->accepted: {' '.join(rates)}")
    return lines
