"""`specinfer bench`: a model without and with speculation, on the same prompts, or a server under load."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from specinfer.cli.options import build_llm, model_options, speculation_options
from specinfer.cli.server_load import bench_server, load_options, take_load_options
from specinfer.config import NO_SPECULATION
from specinfer.errors import ConfigError


@click.command()
@click.option("--url", metavar="URL", help="Put a load on this OpenAI-compatible server instead.")
@load_options
@click.option("--dataset", type=Path, metavar="FILE.jsonl", help='Rows with "prompt" or "turns".')
@click.option("--limit", type=int, metavar="N", help="The first N conversations of the data set.")
@click.option("--batch-size", type=int, default=1, show_default=True, help="Requests in flight.")
@click.option("--chat/--raw", "templated", default=None, help="Through the chat template, or as they stand.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Keep the k most likely tokens; 0: all.")
@click.option("--top-p", type=float, default=1.0, help="Keep the likeliest with this mass.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Of each answer.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the first request; the next: + 1.")
@click.option(
    "--json", "--out", "json_file", type=Path, metavar="FILE", help="Write all figures; - prints them."
)
@click.option("--plot", type=Path, metavar="FILE.png", help="Draw acceptance and time per stage.")
@model_options
@speculation_options
@click.pass_context
def bench(
    context: click.Context,
    /,
    url: str | None,
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
    plot: Path | None,
    **options: Any,
) -> None:
    """Measure a model without and with speculation, on the same prompts and the same loaded weights.

    The two take turns, so that a machine that slows down slows both. Without --dataset the built-in prompts
    are used; without --draft the speculator is lookups.

    With --url the model is one that a server serves, ours or any other that speaks OpenAI's API: figures are
    of requests over HTTP, named as `vllm bench serve` names them. --concurrency N has N users wait for their
    answers, --rate R lets conversations arrive at random; default is one user. --model is the server's name
    of it, by default the first it lists. --endpoint and what follows it up to --save-texts is for servers,
    and what a server is told when it starts (--draft, --dtype, ...) is refused.
    """
    of_server = take_load_options(context, options)
    from specinfer.report.dataset import built_in, read_dataset
    from specinfer.report.json_file import check_writable, write_json
    from specinfer.sampling_params import SamplingParams

    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_tokens, seed=seed
    )
    prompts = (built_in() if dataset is None else read_dataset(dataset)).head(limit)
    if json_file is not None and str(json_file) != "-":
        check_writable(json_file)
    if url is not None:
        bench_server(url, of_server, prompts, params, json_file)
        return
    if plot is not None:
        from specinfer.report.picture import check_plot

        check_plot(plot)
        check_writable(plot)
    if batch_size < 1:
        raise ConfigError(f"batch size is {batch_size}; allowed: an integer >= 1")
    llm = build_llm(options, max_batch_size=batch_size)
    if not llm.config.speculation.enabled:
        raise ConfigError("nobody speculates, so there is nothing to compare; give --draft or --lookup")

    from specinfer.bench.report import as_json
    from specinfer.bench.run import Load, compare
    from specinfer.progress import progress_bar

    chat = llm.tokenizer.has_chat_template if templated is None else templated
    load = Load(params=params, batch_size=batch_size, chat=chat)
    with progress_bar("answering", 2 * prompts.num_turns, "requests") as bar:
        plain = llm.variant(replace(llm.config, speculation=NO_SPECULATION))
        comparison = compare(plain, llm, prompts, load, on_request=lambda: bar.advance(1))
    result = as_json(comparison, llm, prompts, load)
    if json_file is not None and str(json_file) == "-":
        click.echo(json.dumps(result))
    else:
        _show(result)
    if json_file is not None and str(json_file) != "-":
        write_json(json_file, result)
    if plot is not None:
        from specinfer.bench.plot import draw

        draw(result, plot)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from specinfer.bench.report import lines, table

    options, dataset = result["options"], result["dataset"]
    sampling = options["sampling"]
    how = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']:g}"
    weights = options["dtype"] if options["quantization"] == "none" else options["quantization"]
    click.echo(
        f"{Path(result['model']).name} ({weights}, {options['device']}), "
        f"{dataset['requests']} requests of {dataset['name']}, {options['batch_size']} in flight, {how}, "
        f"at most {sampling['max_tokens']} tokens each\n"
    )
    shown = Table("", "without speculation", "with speculation", box=None, pad_edge=False)
    for row in table(result):
        shown.add_row(*row)
    Console(highlight=False, width=max(100, Console().width)).print(shown)
    click.echo("\n" + "\n".join(lines(result)))
