"""`specinfer view`: look at the token trees of a trace file."""

from __future__ import annotations

import contextlib
import webbrowser
from pathlib import Path

import click


@click.command()
@click.argument("trace", type=Path)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="On which the page is; 0: any.")
@click.option("--browser/--no-browser", default=True, help="Open it, or print its address alone.")
def view(trace: Path, port: int, browser: bool) -> None:
    """Show the trees of TRACE on a page of this machine, until Ctrl-C.

    TRACE is what `specinfer generate --trace TRACE` wrote, or what the page of `specinfer serve` saved. No
    other machine reaches the page, and it asks for nothing from anywhere else.
    """
    from specinfer.engine.trace_file import read_trace
    from specinfer.serve.page_server import TraceServer

    with TraceServer(read_trace(trace), trace.name, port) as server:
        click.echo(f"{trace}: {server.url}  (Ctrl-C ends)")
        with contextlib.suppress(KeyboardInterrupt):
            if browser:
                webbrowser.open(server.url)
            server.serve_forever()
