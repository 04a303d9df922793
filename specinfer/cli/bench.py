"""`specinfer bench`: times a model without and with speculation, or a server under load."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from click.core import ParameterSource

from specinfer.cli.help import FILE, Command
from specinfer.cli.options import (
    SHORT_MODEL,
    SHORT_SPECULATION,
    adapter_option,
    build_llm,
    model_options,
    speculation_options,
    template_option,
)
from specinfer.errors import ConfigError
from specinfer.speculation_config import NO_SPECULATION

if TYPE_CHECKING:
    from specinfer.report.dataset import Dataset
    from specinfer.sampling_params import SamplingParams


_Command = TypeVar("_Command", bound=Callable[..., Any])
_OPTIONS = (
    click.option("--endpoint", default="chat", show_default=True, help="chat or completions."),
    click.option("--concurrency", type=int, metavar="N", help="Users with one request at a time each."),
    click.option("--rate", type=float, metavar="R", help="Conversations per second, at random times."),
    click.option("--num-requests", type=int, metavar="N", help="Use the first N requests of the data set."),
    click.option(
        "--api-key",
        envvar="OPENAI_API_KEY",
        show_envvar=True,
        metavar="KEY",
        help="Key that the server requires.",
    ),
    click.option("--body", metavar="JSON", help="More fields of each request; null removes one."),
    click.option("--ignore-eos", is_flag=True, help="Make every answer --max-tokens long."),
    click.option(
        "--warmup",
        type=int,
        default=1,
        show_default=True,
        metavar="N",
        help="Requests before the measurement.",
    ),
    click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds for each answer."),
    click.option("--save-texts", is_flag=True, help="Add the answers to the file of --json."),
)
_NAMES = {
    *("endpoint", "concurrency", "rate", "num_requests", "api_key"),
    *("body", "ignore_eos", "warmup", "timeout", "save_texts"),
}
# Options of the command that apply to a server as well.
_SHARED = {
    *("url", "dataset", "limit", "model", "temperature"),
    *("top_k", "top_p", "max_tokens", "seed", "json_file"),
}


def load_options(command: _Command) -> _Command:
    """Add --endpoint, --concurrency, --rate and the other options that need --url."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_load_options(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of `load_options` from `options` and return them.

    Raises ConfigError that names options that need --url, or that exclude it.
    """
    given = {
        parameter.name: "/".join([parameter.opts[0], *parameter.secondary_opts])
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    }
    if "url" in given:
        wrong = [option for name, option in given.items() if name not in _SHARED | _NAMES]
        if wrong:
            instead = {
                "--batch-size": "--concurrency sets the number",
                "--chat/--raw": "--endpoint chooses it",
            }
            hints = "".join(f"; {instead[option]}" for option in wrong if option in instead)
            raise ConfigError(
                f"{', '.join(wrong)}: not allowed with --url, as the server sets it; leave it out{hints}; "
                "fields of a request go into --body"
            )
    elif wrong := [option for name, option in given.items() if name in _NAMES]:
        raise ConfigError(f"{', '.join(wrong)}: allowed only with --url; add the address of a server")
    chosen = {name: options.pop(name) for name in _NAMES}
    chosen["model"] = options["model"] if "model" in given else None
    return chosen


_SHORT: Final = (
    *("dataset", "limit", "batch_size", "temperature", "max_tokens", "seed", "json_file", "plot"),
    *("url", "concurrency", "rate", "num_requests", *SHORT_MODEL, *SHORT_SPECULATION),
)


@click.command(cls=Command, short=_SHORT)
@click.option("--url", metavar="URL", help="Time this OpenAI-compatible server.")
@load_options
@click.option("--dataset", type=FILE, metavar="FILE.jsonl", help='Rows with "prompt" or "turns".')
@click.option("--limit", type=int, metavar="N", help="Use the first N conversations.")
@click.option("--batch-size", type=int, default=1, show_default=True, help="Requests in a batch.")
@template_option
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-k", type=int, default=0, help="Sample from the k most likely tokens; 0: all.")
@click.option("--top-p", type=float, default=1.0, help="Sample from the likeliest tokens of this mass.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Longest answer, in tokens.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the first request; then + 1 each."
)
@click.option(
    "--json", "--out", "json_file", type=FILE, metavar="FILE", help="Write all figures; -: print them."
)
@click.option("--plot", type=FILE, metavar="FILE.png", help="Draw acceptance and time per stage.")
@model_options
@adapter_option
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
    """Time a model without and with speculation, or a server with --url.

    Both run on the same prompts and the same loaded weights, in turns, so that a slower moment of the machine
    slows both. Without --dataset the built-in prompts are used; without --draft prompt lookup is.

    With --url the command times a specinfer server, or any other with OpenAI's API. The figures are for
    requests over HTTP, with the names of `vllm bench serve`. --concurrency N simulates N users who wait for
    their answers. --rate R starts conversations at random times. The default is one user.
    --model is the server's name of the model, by default the first that it lists. Options of an engine
    (--draft, --dtype, ...) are refused.
    """
    of_server = take_load_options(context, options)
    from specinfer.report.dataset import built_in, read_dataset
    from specinfer.report.files import check_writable, write_json
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
        from specinfer.report.files import check_plot

        check_plot(plot)
        check_writable(plot)
    if batch_size < 1:
        raise ConfigError(f"batch size is {batch_size}; allowed: an integer >= 1")
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
    if plot is not None:
        from specinfer.bench.report import draw

        draw(result, plot)


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


def bench_server(
    url: str, options: dict[str, Any], prompts: Dataset, params: SamplingParams, json_file: Path | None
) -> None:
    """Time the server at `url`, print and write the figures; exits with 1 if no request was answered.

    `options` is what `take_load_options` returns. Raises UserError.
    """
    from specinfer.bench.load import ServerLoad, Traffic, first_requests, measure
    from specinfer.bench.openai_client import RequestOptions
    from specinfer.progress import ProgressBar
    from specinfer.report.files import write_json

    if options["save_texts"] and json_file is None:
        raise ConfigError("--save-texts needs a file to write them to; give --json FILE")
    concurrency, rate = options["concurrency"], options["rate"]
    if concurrency is None and rate is None:
        concurrency = 1
    load = ServerLoad(
        url=url,
        model=options["model"],
        api_key=options["api_key"],
        traffic=Traffic(concurrency=concurrency, rate=rate, seed=params.seed or 0),
        request=RequestOptions(
            params=params,
            endpoint=options["endpoint"],
            ignore_eos=options["ignore_eos"],
            body=_fields(options["body"]),
            timeout=options["timeout"],
        ),
        warm_up=options["warmup"],
        save_texts=options["save_texts"],
    )
    prompts = first_requests(prompts, options["num_requests"])
    with ProgressBar().showing(prompts.num_turns, "answering", "requests") as bar:
        result = measure(load, prompts, on_request=lambda: bar.advance(1))
    if str(json_file) == "-":
        click.echo(json.dumps(result))
    else:
        _show_load(result)
        if json_file is not None:
            write_json(json_file, result)
    if not result["completed"]:
        sys.exit(1)


def _fields(body: str | None) -> dict[str, Any]:
    if body is None:
        return {}
    try:
        fields = json.loads(body)
    except ValueError as error:
        raise ConfigError(f'body is not JSON ({error}); allowed: an object, like {{"top_k": 5}}') from None
    if not isinstance(fields, dict):
        raise ConfigError(f'body is {body}; allowed: a JSON object, like {{"top_k": 5}}')
    return fields


def _show_load(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from specinfer.bench.load_figures import lines, table, times_table

    if result["max_concurrency"] is None:
        pace = f"{result['request_rate']:g} conversations a second"
    else:
        pace = f"{result['max_concurrency']} at a time"
    options = result["options"]
    sampler = "greedy" if options["temperature"] == 0 else f"temperature {options['temperature']:g}"
    click.echo(
        f"{result['model_id']} at {result['base_url']}{result['endpoint']}, {result['num_prompts']} requests "
        f"of {result['dataset']}, {pace}, {sampler}, at most {options['max_tokens']} tokens each\n"
    )
    totals = Table(box=None, pad_edge=False, show_header=False)
    for row in table(result):
        totals.add_row(*row)
    times = Table("ms", "mean", "median", "std", "p99", box=None, pad_edge=False)
    for times_row in times_table(result):
        times.add_row(*times_row)
    console = Console(highlight=False, width=max(100, Console().width))
    console.print(totals, "", times, sep="\n")
    if speculation := lines(result):
        click.echo("\n" + "\n".join(speculation))
