"""`specinfer bench`: times a model without and with speculation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from specinfer.cli.options import (
    FILE,
    Command,
    adapter_option,
    build_llm,
    model_options,
    speculation_options,
    template_option,
)
from specinfer.errors import ConfigError
from specinfer.speculation_config import NO_SPECULATION


@click.command(cls=Command)
@click.option("--dataset", type=FILE, metavar="FILE.jsonl", help='Rows with "prompt" or "turns".')
@click.option("--limit", type=int, metavar="N", help="Use the first N conversations.")
@click.option("--batch-size", type=click.IntRange(1), default=1, help="Requests in a batch.")
@template_option
@click.option("--temperature", type=float, default=0.0, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Sample from the k most likely tokens; 0: all.")
@click.option("--top-p", type=float, default=1.0, help="Sample from the likeliest tokens of this mass.")
@click.option("--max-tokens", type=int, default=128, help="Longest answer, in tokens.")
@click.option("--seed", type=int, default=0, help="Seed of the first request; then + 1 each.")
@click.option("--json", "json_file", type=FILE, metavar="FILE", help="Write all figures; -: print them.")
@model_options
@adapter_option
@speculation_options
def bench(
    *,
    dataset: Path | None,
    limit: int | None,
    batch_size: int,
    templated: bool | None,
    temperature: float,
    top_k: int,
    top_p: float,
    max_tokens: int,
    seed: int,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Time a model without and with speculation.

    Both run on the same prompts and the same loaded weights, in turns, so that a slower moment of the machine
    slows both. Without --dataset the built-in prompts are used, and without --draft the drafts of `serve`.
    """
    from specinfer.files import check_writable, write_json
    from specinfer.report.dataset import built_in, read_dataset
    from specinfer.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_tokens, seed=seed
    )
    prompts = (built_in() if dataset is None else read_dataset(dataset)).head(limit)
    if json_file is not None and str(json_file) != "-":
        check_writable(json_file)
    llm = build_llm(options, max_batch_size=batch_size)
    if not llm.config.speculation.enabled:
        raise ConfigError("speculation is off, so there is nothing to compare; add --draft or --lookup")

    from specinfer.bench.report import as_json
    from specinfer.bench.run import Load, compare
    from specinfer.progress import ProgressBar

    chat = llm.tokenizer.has_chat_template if templated is None else templated
    load = Load(params=params, batch_size=batch_size, chat=chat)
    with ProgressBar().showing(2 * prompts.num_turns, "answering", "requests") as bar:
        plain = llm.variant(replace(llm.config, speculation=NO_SPECULATION))
        comparison = compare(plain, llm, prompts, load, on_request=lambda: bar.advance(1))
    result = as_json(comparison, llm, prompts, load)
    if json_file is not None and str(json_file) == "-":
        click.echo(json.dumps(result))
    else:
        _show(result)
    if json_file is not None and str(json_file) != "-":
        write_json(json_file, result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from specinfer.bench.report import lines, table

    options, dataset = result["options"], result["dataset"]
    sampling = options["sampling"]
    sampler = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']:g}"
    weights = options["dtype"] if options["quantization"] == "none" else options["quantization"]
    click.echo(
        f"{Path(result['model']).name} ({weights}, {options['device']}), "
        f"{dataset['requests']} requests of {dataset['name']}, {options['batch_size']} in flight, {sampler}, "
        f"at most {sampling['max_tokens']} tokens each\n"
    )
    shown = Table("", "without speculation", "with speculation", box=None, pad_edge=False)
    for row in table(result):
        shown.add_row(*row)
    Console(highlight=False, width=max(100, Console().width)).print(shown)
    click.echo("\n" + "\n".join(lines(result)))
