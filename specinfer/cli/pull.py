"""`specinfer pull`: fetches a model."""

from __future__ import annotations

import click

from specinfer.cli.command import Command
from specinfer.cli.options import complete_model


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=complete_model)
@click.option("--list", "list_names", is_flag=True, help="Show the catalogue.")
def pull(name: str | None, list_names: bool) -> None:
    """Fetch the model NAME and print its path.

    NAME is a catalogue name, or a hub name: org/name, org/name@revision, org/name:Q4_K_M,
    org/name:file.gguf.
    """
    from specinfer.hub import CATALOGUE, resolve
    from specinfer.progress import ProgressBar, format_bytes

    if list_names:
        click.echo("name\tsize\tlicence\tfile")
        for entry in CATALOGUE.values():
            click.echo(f"{entry.name}\t{format_bytes(entry.size)}\t{entry.licence}\t{entry.file}")
        return
    if name is None:
        raise click.UsageError("no model named; give a name, or --list to see the catalogue")
    click.echo(resolve(name, progress=ProgressBar()).path)
