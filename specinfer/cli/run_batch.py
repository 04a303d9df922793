"""`specinfer run-batch`: a file of requests, answered as a server would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from specinfer.cli.every_option import batch_options, configs, needs_serving, read_options
from specinfer.cli.options import engine_config
from specinfer.errors import ConfigError


@click.command()
@click.argument("model", required=False)
@click.option(
    "-i", "--input-file", "source", type=Path, required=True, metavar="FILE", help="Requests, a line each."
)
@click.option(
    "-o", "--output-file", "target", type=Path, required=True, metavar="FILE", help="Answers, a line each."
)
@click.option("--model", "-m", "named", metavar="MODEL", help="As the argument MODEL; vLLM's name for it.")
@click.option(
    "--config", "file", type=Path, metavar="FILE", help="Options in YAML, a server's too; flags go first."
)
@click.option("--speculative-config", metavar="JSON", help="vLLM's: method, model, num_speculative_tokens.")
@batch_options
def run_batch(
    model: str | None, named: str | None, source: Path, target: Path, file: Path | None, **flags: Any
) -> None:
    """Answer the requests of a file with MODEL, the small default one when none is named.

    A line of the input is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}};
    the other urls are /v1/completions, /v1/responses and /v1/messages. Each gets a line in the output when it
    is answered. Run again to go on: what is answered there already is not asked again.
    """
    if model and named:
        raise ConfigError(f"MODEL is {model!r} and --model {named!r}; give one of them")
    if source.resolve() == target.resolve():
        raise ConfigError(f"the requests and the answers are both {source}; give two files")
    from specinfer.progress import ProgressBar
    from specinfer.serve.engine_child import EngineChild

    options, config = configs({"model": model or named, **flags}, file)
    if flags["log_level"] is None and "log_level" not in (read_options(file) if file else {}):
        config = replace(config, log_level="warning")  # no log line for each request
    engine = engine_config(options)
    with needs_serving():
        from specinfer.serve.batch_run import BatchAnswers, BatchInput
        from specinfer.serve.batch_run import run_batch as run
        from specinfer.serve.config import configure

    configure(config.log_format, config.log_level, "batch")
    requests = BatchInput(source, config.max_body)
    with BatchAnswers(target) as answers:
        earlier = len(answers)
        try:
            if requests.any_left(answers):
                with EngineChild((config.log_level, config.log_format)) as child:
                    run(config, engine, child, requests, answers, ProgressBar())
        finally:
            told = f"{len(answers)} answers, {answers.refused} of them errors; {earlier} were there before"
            click.echo(f"{target} has {told}", err=True)
