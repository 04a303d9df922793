"""`specinfer bench --url`: its options, and a load on a server that runs already."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from specinfer.errors import ConfigError

if TYPE_CHECKING:
    from specinfer.report.dataset import Dataset
    from specinfer.sampling_params import SamplingParams

_Command = TypeVar("_Command", bound=Callable[..., Any])
_OPTIONS = (
    click.option("--endpoint", default="chat", show_default=True, help="chat or completions."),
    click.option("--concurrency", type=int, metavar="N", help="Users, each with one request at a time."),
    click.option("--rate", type=float, metavar="R", help="Conversations per second, arriving by chance."),
    click.option("--num-requests", type=int, metavar="N", help="The first N requests of the data set."),
    click.option(
        "--api-key",
        envvar="OPENAI_API_KEY",
        show_envvar=True,
        metavar="KEY",
        help="That the server asks for.",
    ),
    click.option("--body", metavar="JSON", help="More fields of each request; null leaves one out."),
    click.option("--ignore-eos", is_flag=True, help="Answers of --max-tokens each, where the server can."),
    click.option(
        "--warmup",
        type=int,
        default=1,
        show_default=True,
        metavar="N",
        help="Requests before those measured.",
    ),
    click.option("--timeout", type=float, default=600.0, show_default=True, help="Seconds for an answer."),
    click.option("--save-texts", is_flag=True, help="Write the answers to the file of --json, too."),
)
_NAMES = {
    *("endpoint", "concurrency", "rate", "num_requests", "api_key"),
    *("body", "ignore_eos", "warmup", "timeout", "save_texts"),
}
# Of the other options of the command these say something about requests to a server, too.
_SHARED = {
    *("url", "dataset", "limit", "model", "temperature"),
    *("top_k", "top_p", "max_tokens", "seed", "json_file"),
}


def load_options(command: _Command) -> _Command:
    """--endpoint, --concurrency, --rate and the other options that need --url."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_load_options(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `load_options` out of `options`; refuse those that the command line may not mix.

    Raises ConfigError with the names of options that need --url, or that make no sense with it.
    """
    given = {
        parameter.name: "/".join([parameter.opts[0], *parameter.secondary_opts])
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    }
    if "url" in given:
        wrong = [option for name, option in given.items() if name not in _SHARED | _NAMES]
        if wrong:
            instead = {"--batch-size": "--concurrency says how many", "--chat/--raw": "--endpoint says which"}
            hints = "".join(f"; {instead[option]}" for option in wrong if option in instead)
            raise ConfigError(
                f"{', '.join(wrong)}: with --url the server decides that, or was told when it was "
                f"started; leave it out{hints}; fields of a request go into --body"
            )
    elif wrong := [option for name, option in given.items() if name in _NAMES]:
        raise ConfigError(f"{', '.join(wrong)}: that is asked of a server, and none is named; give --url")
    taken = {name: options.pop(name) for name in _NAMES}
    taken["model"] = options["model"] if "model" in given else None
    return taken


def bench_server(
    url: str, options: dict[str, Any], prompts: Dataset, params: SamplingParams, json_file: Path | None
) -> None:
    """Measure the server at `url`, print and write the figures; exits with 1 when no request was answered.

    `options` is what `take_load_options` returns. Raises UserError.
    """
    from specinfer.bench.load import ServerLoad, first_requests, measure
    from specinfer.bench.openai_client import Asking
    from specinfer.bench.traffic import Traffic
    from specinfer.progress import progress_bar
    from specinfer.report.json_file import write_json

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
        asking=Asking(
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
    with progress_bar("answering", prompts.num_turns, "requests") as bar:
        result = measure(load, prompts, on_request=lambda: bar.advance(1))
    if str(json_file) == "-":
        click.echo(json.dumps(result))
    else:
        _show(result)
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
        raise ConfigError(f'body is no JSON ({error}); allowed: an object, like {{"top_k": 5}}') from None
    if not isinstance(fields, dict):
        raise ConfigError(f'body is {body}; allowed: a JSON object, like {{"top_k": 5}}')
    return fields


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from specinfer.bench.load_figures import lines, table, times_table

    if result["max_concurrency"] is None:
        pace = f"{result['request_rate']:g} conversations a second"
    else:
        pace = f"{result['max_concurrency']} at a time"
    options = result["options"]
    how = "greedy" if options["temperature"] == 0 else f"temperature {options['temperature']:g}"
    click.echo(
        f"{result['model_id']} at {result['base_url']}{result['endpoint']}, {result['num_prompts']} requests "
        f"of {result['dataset']}, {pace}, {how}, at most {options['max_tokens']} tokens each\n"
    )
    totals = Table(box=None, pad_edge=False, show_header=False)
    for row in table(result):
        totals.add_row(*row)
    times = Table("ms", "mean", "median", "std", "p99", box=None, pad_edge=False)
    for times_row in times_table(result):
        times.add_row(*times_row)
    console = Console(highlight=False, width=max(100, Console().width))
    console.print(totals, "", times, sep="\n")
    if said := lines(result):
        click.echo("\n" + "\n".join(said))
