"""`specinfer serve`: an OpenAI-compatible server."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from specinfer.cli.every_option import configs, every_option, needs_serving
from specinfer.cli.options import engine_config
from specinfer.errors import ConfigError

_KEY_VARIABLE: Final = "SPECINFER_API_KEY"


@click.command()
@click.argument("model", required=False)
@click.option("--config", "file", type=Path, metavar="FILE", help="Options in YAML; flags go before it.")
@click.option("--speculative-config", metavar="JSON", help="vLLM's: method, model, num_speculative_tokens.")
@every_option
def serve(model: str | None, file: Path | None, **flags: Any) -> None:
    """Serve MODEL, the small default one when none is named, to any OpenAI client."""
    from specinfer.progress import ProgressBar
    from specinfer.serve.engine_child import EngineChild

    if not flags["api_key"] and (key := os.environ.get(_KEY_VARIABLE)) is not None:
        if not key:
            raise ConfigError(f"{_KEY_VARIABLE} is empty, which lets nobody in; give it a key, or unset it")
        flags["api_key"] = (key,)
    options, config = configs({"model": model, **flags}, file)
    engine = engine_config(options)
    # Its process loads torch while this one loads what serves.
    with EngineChild((config.log_level, config.log_format)) as child:
        with needs_serving():
            from specinfer.serve.server import serve as serve_forever
        serve_forever(config, engine, child, ProgressBar(), partial(_tell_ready, page=config.page))


def _tell_ready(url: str, *, page: bool) -> None:
    click.echo(f"specinfer serves {url}/v1 (Ctrl-C ends it)", err=True)
    if page:
        # Listening on every address, the server is at the loopback address, too, which a browser can open.
        local = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        click.echo(f"to chat with it, open {local}/", err=True)
