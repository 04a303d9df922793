"""Figures of servers under load and their page, in Markdown.

A cell of the JSON file is one engine in one round with one data set and one number of users: {"error":
reason}, or figures of `specinfer bench --url` with a digest of each text. Over several rounds the page has
medians, and minimum and maximum in brackets.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.load.serving_engines import Engine
from benchmarks.study import digest, row

_KEPT = (  # kept figures of a load
    *("duration", "completed", "failed", "total_output_tokens", "request_throughput", "output_throughput"),
    *("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p99_itl_ms"),
    *("median_e2el_ms", "p99_e2el_ms", "client_cores", "tokens_counted_as_chunks"),
)
_TEXT_DIGITS = 8  # digits of a text's digest, enough to compare texts
_HEAD = (
    *("users", "engine", "bits", "output tokens/s", "times no speculation", "requests/s"),
    *("first token ms, median / p99", "per token ms, median / p99", "between chunks ms, p99"),
    *("whole answer s, median / p99", "tokens per step", "failed", "text as without speculation"),
)

Cell = Mapping[str, Any]
Cells = Mapping[str, Cell]  # cell_key -> cell
Figure = Callable[[Cell], float | None]


def cell_key(engine: Engine, round_: int, dataset: str, users: int) -> str:
    return f"{engine.name}|{round_}|{dataset}|{users}"


def kept(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the kept figures and digests of a load, or the reason if nothing was answered."""
    reason = next((error for error in result["errors"] if error), "")
    if not result["completed"]:
        return {"error": reason}
    cell = {name: result[name] for name in _KEPT}
    texts = zip(result["generated_texts"], result["errors"], strict=True)
    cell["texts"] = ["" if error else digest(text)[:_TEXT_DIGITS] for text, error in texts]
    if reason:
        cell["reason"] = reason
    if (speculation := result.get("speculative_decoding")) is not None:
        cell["tokens_per_step"] = speculation["mean_acceptance_length"]
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in cell.items()}


def page(engines: Sequence[Engine], cells: Cells, settings: Mapping[str, Any]) -> list[str]:
    """Return the settings, a table per data set, and conditions."""
    draft = f" (draft: {settings['draft']})" if settings["draft"] else ""
    ends = "end of text ignored where a server can" if settings["ignore_eos"] else "or to the end of the text"
    lines = [
        f"# {settings['model']}{draft}: servers under load",
        "",
        f"Users with one chat request each at a time, greedy, {settings['max_tokens']} tokens {ends}; of "
        f"each data set {settings['per_user']} prompts a user, at least {settings['least']} and at most "
        f"{settings['limit']}, the same for every engine; no prompt is asked twice in a run, and runs share "
        "no cache where servers know `cache_salt`. One server at a time, on "
        f"{settings['threads']} threads, with the client on the same machine; a warm-up before each run; "
        f"{settings['rounds']} rounds, every second one in reverse. Median over rounds [least - most]. "
        "Times no speculation: output tokens/s over those of the same engine without, with as many users, "
        "round by round. Tokens per step are the server's own count; * marks servers that count no tokens: "
        "there chunks are counted.",
    ]
    for dataset in settings["datasets"]:
        lines += ["", f"## {dataset}", "", row(*_HEAD), f"|{'---|' * len(_HEAD)}"]
        for users in settings["users"]:
            lines += [_row(engine, cells, settings, dataset, users) for engine in engines]
    return [*lines, "", *_conditions(engines, cells)]


def _row(engine: Engine, cells: Cells, settings: Mapping[str, Any], dataset: str, users: int) -> str:
    def runs(name: str) -> dict[int, Cell]:
        keys = {r: f"{name}|{r}|{dataset}|{users}" for r in range(settings["rounds"])}
        return {r: cells[key] for r, key in keys.items() if key in cells}

    found = runs(engine.name)
    run = {r: cell for r, cell in found.items() if "error" not in cell}
    if not run:
        reason = next((cell["error"] for cell in found.values()), "not run yet")
        return row(users, engine.name, engine.bits, reason.replace("|", "/"), *[""] * (len(_HEAD) - 4))
    plain = {r: cell for r, cell in runs(engine.plain).items() if "error" not in cell and r in run}
    star = "*" if any(cell["tokens_counted_as_chunks"] for cell in run.values()) else ""
    alone = engine.name == engine.plain
    return row(
        users,
        engine.name,
        engine.bits,
        _spread(run, "output_throughput", 1) + star,
        "" if alone else _times(run, plain),
        _spread(run, "request_throughput", 2),
        f"{_median(run, 'median_ttft_ms', 0)} / {_median(run, 'p99_ttft_ms', 0)}",
        f"{_median(run, 'median_tpot_ms', 1)} / {_median(run, 'p99_tpot_ms', 1)}",
        _median(run, "p99_itl_ms", 0),
        f"{_median(run, 'median_e2el_ms', 1, 1e-3)} / {_median(run, 'p99_e2el_ms', 1, 1e-3)}",
        _median(run, "tokens_per_step", 2),
        sum(cell["failed"] for cell in run.values()),
        "" if alone else _agreement(run, plain),
    )


def _values(run: Mapping[int, Cell], name: str) -> list[float]:
    return [cell[name] for cell in run.values() if name in cell]


def _median(run: Mapping[int, Cell], name: str, digits: int, unit: float = 1.0) -> str:
    values = _values(run, name)
    return f"{unit * statistics.median(values):.{digits}f}" if values else ""


def _spread(run: Mapping[int, Cell], name: str, digits: int) -> str:
    values = _values(run, name)
    middle = _median(run, name, digits)
    if len(values) == 1:
        return middle
    return f"{middle} [{min(values):.{digits}f} - {max(values):.{digits}f}]"


def _times(run: Mapping[int, Cell], plain: Mapping[int, Cell]) -> str:
    ratios = [run[r]["output_throughput"] / cell["output_throughput"] for r, cell in plain.items()]
    return f"{statistics.median(ratios):.2f}" if ratios else "not known"


def _agreement(run: Mapping[int, Cell], plain: Mapping[int, Cell]) -> str:
    """Return "30/32": prompts with equal texts, of those that both answered."""
    pairs = [
        pair
        for r, cell in plain.items()
        for pair in zip(run[r]["texts"], cell["texts"], strict=True)
        if all(pair)
    ]
    return f"{sum(ours == theirs for ours, theirs in pairs)}/{len(pairs)}" if pairs else "not known"


def _conditions(engines: Sequence[Engine], cells: Cells) -> list[str]:
    """List versions, reasons of failures, the load of the machine, and the client's share of it."""
    names = {engine.name for engine in engines}
    done = {
        key: cell for key, cell in cells.items() if "error" not in cell and key.partition("|")[0] in names
    }
    if not done:
        return []
    versions = sorted({cell["version"] for cell in done.values() if cell.get("version")})
    said = [f"- servers: {', '.join(versions)}"] if versions else []
    said += [
        f"- failed requests of {key}: {cell['reason']}" for key, cell in done.items() if "reason" in cell
    ]
    for name, what in (("busy_elsewhere", "other programs kept"), ("client_cores", "the client kept")):
        key = max(done, key=lambda key: float(done[key][name]))
        said.append(f"- {what} at most {done[key][name]:.2f} cores busy (beside {key})")
    return said
