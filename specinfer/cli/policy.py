"""`specinfer policy`: shows the learned acceptance rates."""

from __future__ import annotations

import json
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
    """Print the acceptance rates learned on this machine, for each target with its drafts.

    With --json also those of each temperature, and of guesses by their reported probability.
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
        click.echo(f"nothing is learned yet; the folder would be {policies_dir()}")
    for number, (file, stored, why) in enumerate(found):
        lines = [str(file), *([f"  cannot be used: {why}"] if stored is None else _lines(stored))]
        click.echo("\n".join(["", *lines] if number else lines))


def _lines(stored: StoredPolicy) -> list[str]:
    """The contents of one file, as text."""
    from specinfer.speculate.policy.acceptance import AcceptanceRates
    from specinfer.speculate.policy.memory import recall

    drafts, key = stored.learned["drafts"], stored.key
    acceptance = AcceptanceRates({name: len(levels["all"]) for name, levels in drafts.items()})
    recall(stored.learned, acceptance)
    return [
        f"  target     {key.get('target')}",
        *(f"  draft      {draft}" for draft in key.get("drafts") or ()),
        f"  device     {key.get('device')}",
        f"  learned of {acceptance.outcomes} guesses",
        *(
            f"  levels     {name}: accepted at level 1, 2, ... "
            + " ".join(f"{rate.any:.2f}" for rate in levels.usual_rates())
            for name, levels in acceptance.levels.items()
        ),
    ]
