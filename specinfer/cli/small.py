"""`specinfer pull`, which fetches a model, and `specinfer view`, which shows a trace file in a browser."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path

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


@click.command(cls=Command)
@click.argument("trace", type=Path)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the page; 0: any free one.")
@click.option("--browser/--no-browser", default=True, help="Open a browser, or only print the address.")
def view(trace: Path, port: int, browser: bool) -> None:
    """Show the trees of TRACE on a local page, until Ctrl-C.

    `specinfer generate --trace TRACE` and the page of `specinfer serve` write such files. The page is served
    on the loopback address and loads nothing from other machines.
    """
    from specinfer.engine.trace import read_trace
    from specinfer.serve.http.page_server import TraceServer

    with TraceServer(read_trace(trace), trace.name, port) as server:
        click.echo(f"{trace}: {server.url}  (Ctrl-C ends)")
        with contextlib.suppress(KeyboardInterrupt):
            if browser:
                webbrowser.open(server.url)
            server.serve_forever()
