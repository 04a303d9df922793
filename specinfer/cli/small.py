"""Two small commands: `specinfer pull` fetches a model, `specinfer view` shows the trees of a trace file."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path

import click


@click.command()
@click.argument("name", required=False)
@click.option("--list", "list_names", is_flag=True, help="Show the catalogue.")
def pull(name: str | None, list_names: bool) -> None:
    """Fetch the model NAME and print where it lies.

    NAME is a catalogue name, or a hub name: org/name, org/name@revision, org/name:file.gguf.
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


@click.command()
@click.argument("trace", type=Path)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="On which the page is; 0: any.")
@click.option("--browser/--no-browser", default=True, help="Open it, or print its address alone.")
def view(trace: Path, port: int, browser: bool) -> None:
    """Show the trees of TRACE on a page of this machine, until Ctrl-C.

    TRACE is what `specinfer generate --trace TRACE` wrote, or what the page of `specinfer serve` saved. No
    other machine reaches the page, and it asks for nothing from anywhere else.
    """
    from specinfer.engine.trace import read_trace
    from specinfer.serve.http.page_server import TraceServer

    with TraceServer(read_trace(trace), trace.name, port) as server:
        click.echo(f"{trace}: {server.url}  (Ctrl-C ends)")
        with contextlib.suppress(KeyboardInterrupt):
            if browser:
                webbrowser.open(server.url)
            server.serve_forever()
