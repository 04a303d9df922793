"""The page of replicas.py: tables of loads and of message costs, and a picture of the gaps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.load import channels
from benchmarks.study import row
from specinfer.report.files import dress, new_figure, save

_SUMS = ("requests", "failed", "kills", "seconds", "tokens", "second_turns", "found", "different")


def p95(gaps: Sequence[float]) -> float:
    """Return the 95th percentile."""
    return sorted(gaps)[int(0.95 * len(gaps))] if gaps else 0.0


def page(settings: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the page, in Markdown."""
    lines = [
        f"# Replicas: {settings['model']}, {settings['quantization']}",
        "",
        f"{settings['users']} users hold talks of two turns, for {settings['minutes']:g} minutes where "
        f"nothing is killed, each with a session of its own; a replica has {settings['threads']} threads and "
        f"batches of {settings['batch_size']}; answers have {settings['max_tokens']} tokens at most, greedy "
        "and T = 0.8 in turn. Trouble is SIGKILL for one engine, SIGUSR1 for the server, a signal for a "
        "rank, or the loss of the link between two ranks, each time "
        f"{settings['kill_every']:g} s after all replicas took work; gaps are then those of the streams that "
        "went on with another engine.",
    ]
    if settings["pinned"]:
        lines.append("Everything, users too, has as many cores as there are replicas.")
    loads: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for name, cell in found.items():
        kind, replicas, _ = name.split(", ")
        if kind != "channel":
            loads.setdefault((kind, replicas), []).append(cell)
    return [*lines, *load_table(loads), *channel_table(found)]


def load_table(loads: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return the table of loads, with a row per kind."""
    speeds = {
        int(replicas): statistics.median(cell["tokens"] / cell["seconds"] for cell in cells)
        for (kind, replicas), cells in loads.items()
        if kind == "plain"
    }
    lines = [""]
    if len(speeds) == 2:
        one, several = sorted(speeds)
        ratio = speeds[several] / speeds[one]
        lines += [f"Output tokens/s, {several} replicas over one, medians: {ratio:.2f}.", ""]
    lines += [
        row(
            *("load", "replicas", "requests; failed", "other texts than offline", "troubles", "tokens/s"),
            *("gap p95, s", "longest", "second turns that found their prefix"),
        ),
        row(*["---"] * 9),
    ]
    for (kind, replicas), cells in loads.items():
        all_of = {name: sum(cell[name] for cell in cells) for name in _SUMS}
        gaps = [gap for cell in cells for gap in cell["gaps"]]
        lines.append(
            row(
                *(kind, replicas, f"{all_of['requests']}; {all_of['failed']}", all_of["different"]),
                *(all_of["kills"], f"{all_of['tokens'] / all_of['seconds']:.1f}"),
                f"{p95(gaps) if gaps else max(cell['gap_p95'] for cell in cells):.3f}",
                f"{max(cell['gap_most'] for cell in cells):.2f}",
                f"{all_of['found']} of {all_of['second_turns']}",
            )
        )
    return lines if loads else []


def channel_table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the table of message costs."""
    cells = {name.rpartition(", ")[2]: cell for name, cell in found.items() if name.startswith("channel")}
    if not cells:
        return []
    lines = [
        "",
        f"A message of the deltas of {channels.WORKS} works, 50 a second, medians in ms; CPU is that of a "
        "message in the server, in the process beside it and in the engine's.",
        "",
        row("channel", "lag", "p99", "question to answer", "CPU: server", "relay or engine", "actor"),
        row(*["---"] * 7),
    ]
    for number, cell in cells.items():
        ms = {name: f"{1000 * value:.2f}" for name, value in cell.items() if name != "commit"}
        lines.append(
            row(
                "Ray" if number == "1" else "a process",
                *(ms["lag"], ms["lag_p99"], ms["answer"], ms["server_cpu"], ms["process_cpu"]),
                ms["talker_cpu"] if number == "1" else "",
            )
        )
    return lines


def draw(found: Mapping[str, Mapping[str, Any]], path: Path) -> bool:
    """Draw the gaps of the streams that went on with another engine; return False if there are none, or no
    matplotlib.
    """
    gaps: dict[str, list[float]] = {}
    for name, cell in found.items():
        if cell.get("gaps"):
            gaps.setdefault(name.split(", ")[0], []).extend(cell["gaps"])
    if find_spec("matplotlib") is None or not gaps:
        return False
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for kind, seconds in gaps.items():
        shares = [100 * (at + 1) / len(seconds) for at in range(len(seconds))]
        axes.step(sorted(seconds), shares, where="post", label=f"{kind} ({len(seconds)} streams)")
    dress(axes, "Streams that have their next token", "seconds after the last token", "percent")
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)
    return True
