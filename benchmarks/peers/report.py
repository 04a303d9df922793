"""Figures of engines and their page, in Markdown.

A cell of the JSON file is one engine in one round: {"error": reason}, or its answers with its memory. To
compare texts it keeps digests of each text's beginning and of the whole. Figures are of a whole cell (tokens
of all answers divided by their time); over several rounds the page has their median, and minimum and maximum
in brackets.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from benchmarks.peers.engines import Engine
from benchmarks.study import digest, row

AGREE = 32  # tokens compared between engines with different rounding
REFERENCE = "specinfer-bf16"

Cell = Mapping[str, Any]
Cells = Mapping[str, Cell]  # "engine|round" -> cell
Figure = Callable[[Cell], float | None]


def cell_key(engine: Engine, round_: int) -> str:
    return f"{engine.name}|{round_}"


def answer(prompt: int, reply: Mapping[str, Any], max_tokens: int) -> dict[str, Any]:
    """Return the kept part of a worker's reply; raises ValueError unless it has `max_tokens` tokens."""
    tokens = reply["tokens"]
    if len(tokens) != max_tokens:
        raise ValueError(f"made {len(tokens)} tokens of {max_tokens} for prompt {prompt}")
    arrivals = reply["arrivals"]
    return {
        "prompt": prompt,
        "tokens": len(tokens),
        "head": digest(tokens[:AGREE]),
        "text": digest(tokens),
        "first_seconds": round(arrivals[0][0], 6),
        "first_tokens": arrivals[0][1],
        "seconds": round(arrivals[-1][0], 6),
        "steps": len(arrivals) - 1,  # after the first tokens, which come with the prefill
    }


def decode_rate(cell: Cell) -> float | None:
    """Return tokens per second after the first ones; None if all arrived together."""
    seconds = sum(a["seconds"] - a["first_seconds"] for a in cell["answers"])
    return _decoded(cell) / seconds if seconds else None


def overall_rate(cell: Cell) -> float:
    """Return tokens per second from the request on."""
    return made(cell) / sum(float(a["seconds"]) for a in cell["answers"])


def made(cell: Cell) -> int:
    """Return the tokens of all answers."""
    return sum(int(a["tokens"]) for a in cell["answers"])


def first_token_seconds(cell: Cell) -> float:
    """Return the median time from a request to its first token."""
    return statistics.median(float(a["first_seconds"]) for a in cell["answers"])


def tokens_per_step(cell: Cell) -> float | None:
    """Return the mean number of tokens that arrive together after the first."""
    steps = sum(a["steps"] for a in cell["answers"])
    return _decoded(cell) / steps if steps else None


def _decoded(cell: Cell) -> float:
    return float(made(cell) - sum(a["first_tokens"] for a in cell["answers"]))


def measured(engine: Engine, cells: Cells, rounds: int) -> dict[int, Cell]:
    """Return the engine's cells that hold figures, by round."""
    found = {r: cells[key] for r in range(rounds) if (key := cell_key(engine, r)) in cells}
    return {r: cell for r, cell in found.items() if "error" not in cell}


def agreement(ours: Iterable[Cell], theirs: Iterable[Cell], part: Literal["head", "text"]) -> str:
    """Return "3/4": prompts whose first tokens, or texts, are equal, of those that both answered."""
    one, other = (
        {a["prompt"]: a[part] for cell in cells for a in cell["answers"]} for cells in (ours, theirs)
    )
    both = one.keys() & other.keys()
    return f"{sum(one[prompt] == other[prompt] for prompt in both)}/{len(both)}" if both else "-"


def ratio(figure: Figure, ours: Mapping[int, Cell], theirs: Mapping[int, Cell]) -> float | None:
    """Return the median over common rounds of our figure divided by theirs."""
    pairs = [(figure(ours[r]), figure(theirs[r])) for r in ours.keys() & theirs.keys()]
    ratios = [a / b for a, b in pairs if a is not None and b]
    return statistics.median(ratios) if ratios else None


def page(engines: Sequence[Engine], cells: Cells, settings: Mapping[str, Any]) -> list[str]:
    """Return the settings, a row per engine, ours over theirs, and conditions."""
    rounds = settings["rounds"]
    runs = {engine.name: measured(engine, cells, rounds) for engine in engines}
    draft = f" (draft: {settings['draft']})" if settings["draft"] else ""
    return [
        f"# {settings['model']}{draft}: specinfer and others, batch size 1",
        "",
        f"{settings['num_prompts']} prompts of {', '.join(settings['datasets'])} through the chat "
        "template, the same token ids for every engine; greedy, "
        f"{settings['max_tokens']} tokens each, end of text ignored; {settings['threads']} threads, "
        f"prefix caches off. The prompts are dealt out to rounds ({rounds} in all); in each every engine "
        "runs, alone, in a process of its own, after a warm-up; every second round runs them in reverse. "
        "Median over rounds [least - most]. Decode is from the first token to the last, overall from "
        "the request. Agreement is in prompts: the whole text with that of the same engine without "
        f"speculation, and the first {AGREE} tokens with {REFERENCE}'s.",
        "",
        "| engine | bits | decode tokens/s | overall tokens/s | first token ms | tokens per step "
        "| peak memory GiB | text as without speculation | first tokens as ours |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_row(engine, runs, cells, rounds) for engine in engines),
        *_ratios(engines, runs),
        "",
        *_conditions(engines, runs),
    ]


def _row(engine: Engine, runs: Mapping[str, Mapping[int, Cell]], cells: Cells, rounds: int) -> str:
    run = runs[engine.name]
    if not run:
        keys = [cell_key(engine, r) for r in range(rounds)]
        reason = next((cells[key]["error"] for key in keys if key in cells), "not run yet")
        return f"| {engine.name} | {engine.bits} | {reason.replace('|', '/')} | | | | | | |"
    plain, reference = (runs.get(name, {}).values() for name in (engine.plain, REFERENCE))
    return row(
        engine.name,
        engine.bits,
        _spread(decode_rate, run, 1),
        _spread(overall_rate, run, 1),
        _spread(lambda cell: 1e3 * first_token_seconds(cell), run, 0),
        _spread(tokens_per_step, run, 2),
        f"{max(cell['peak_memory'] for cell in run.values()) / 2**30:.2f}",
        "" if engine.plain == engine.name else agreement(run.values(), plain, "text"),
        "" if engine.name == REFERENCE else agreement(run.values(), reference, "head"),
    )


def _spread(figure: Figure, run: Mapping[int, Cell], digits: int) -> str:
    values = [value for cell in run.values() if (value := figure(cell)) is not None]
    if not values:
        return "not known"
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} [{min(values):.{digits}f} - {max(values):.{digits}f}]"


def _ratios(engines: Sequence[Engine], runs: Mapping[str, Mapping[int, Cell]]) -> list[str]:
    ours = [engine for engine in engines if engine.ours and runs[engine.name]]
    theirs = [engine for engine in engines if not engine.ours and runs[engine.name]]
    if not ours or not theirs:
        return []
    lines = [
        "",
        "## Ours over theirs",
        "",
        "How many times theirs, by tokens per second of decoding / overall: the median over rounds of the "
        "ratio within a round.",
        "",
        f"| | {' | '.join(engine.name for engine in theirs)} |",
        f"|---|{'---|' * len(theirs)}",
    ]
    for mine in ours:
        pairs = [(runs[mine.name], runs[other.name]) for other in theirs]
        figures = (f"{_times(decode_rate, *pair)} / {_times(overall_rate, *pair)}" for pair in pairs)
        lines.append(row(mine.name, *figures))
    return lines


def _times(figure: Figure, ours: Mapping[int, Cell], theirs: Mapping[int, Cell]) -> str:
    value = ratio(figure, ours, theirs)
    return "-" if value is None else f"{value:.2f}"


def _conditions(engines: Sequence[Engine], runs: Mapping[str, Mapping[int, Cell]]) -> list[str]:
    """Return the load of the machine and the versions."""
    done = [(engine.name, cell) for engine in engines for cell in runs[engine.name].values()]
    if not done:
        return []
    versions = sorted({f"{k} {v}" for _, cell in done for k, v in cell["versions"].items()})
    name, busiest = max(done, key=lambda pair: pair[1]["busy_elsewhere"])
    return [
        f"- engines: {', '.join(versions)}",
        f"- other programs kept at most {busiest['busy_elsewhere']:.2f} cores busy (beside {name})",
    ]
