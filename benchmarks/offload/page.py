"""The page of offload.py: a table for every limit, comparisons of rows, and others' figures.

A cell's groups are prompts that ran together. Its speed is the tokens after the first of each group, divided
by their seconds. Ratios compare cells of one question and round; the page gives their median over rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.offload.rows import KINDS, OURS, PEERS, PLAIN, ROWS
from benchmarks.study import row
from specinfer.report.files import dress, new_figure, save

Cell = Mapping[str, Any]
Cells = Mapping[str, Cell]  # "limit|question|row|round" -> cell
Figure = Callable[[Cell], float | None]

# Published figures: source, measurement, baseline, and differences from the tables here.
PUBLISHED: Final = (
    (
        "SpecInfer (2305.09781)",
        "2.6 - 3.5 x",
        "incremental offloading (FlexGen), OPT-13B and 30B",
        "A10 of 24 GB, weights in host memory; trees of width 1,1,3,...; drafts of 125M",
    ),
    (
        "FlexGen (2303.06865)",
        "1 token/s at batch 144",
        "OPT-175B",
        "throughput of large batches; no speculation",
    ),
    (
        "Sequoia (2402.12374)",
        "7.96 x, 9.5 x",
        "own offloading on an RTX 4090, DeepSpeed on an L40; a 70B",
        "host memory over PCIe; one static tree of a small model; batch 1",
    ),
    (
        "UMbreLLa",
        "7.2 - 8.6 tokens/s, code 11.4",
        "a 70B in AWQ on an RTX 4090",
        "host memory over PCIe; no ratio is given",
    ),
    (
        "SubSpec (NeurIPS 2025)",
        "9.1 x, 12.5 x",
        "plain offloading; Qwen2.5-7B to 8 GB, 32B to 24 GB",
        "host memory over PCIe; the draft is the model itself in 4 bits, which shares its KV; batch 1",
    ),
    (
        "ShadowSpec (2026)",
        "1.17 - 1.54 x",
        "SubSpec",
        "drafts while weights are copied; one GPU, batch 1",
    ),
    (
        "SpecOffload (2505.10259)",
        "2.54 x",
        "the best offloading engine of theirs; Mixtral 8x7B",
        "throughput of batches, two of which take turns",
    ),
)


class Name(NamedTuple):
    """The parts of a cell's name."""

    limit: str
    question: str
    row: str
    round: str

    @classmethod
    def of(cls, text: str) -> Name:
        return cls(*text.split("|"))


def page(cells: Cells, settings: Mapping[str, Any]) -> list[str]:
    """Return the page, in Markdown."""
    limits = dict.fromkeys(name.limit for name in map(Name.of, cells) if name.row != "resident")
    rate = settings["rate"]
    return [
        f"# Models larger than memory: {settings['model']}, dithered",
        "",
        "*Dithered*: the 4-bit file's weights moved by chance within half a step of their grid, in "
        "bfloat16, so that its 4-bit draft (`self`) differs from it. *Inflated*: that model with layers "
        "between its own that add nothing, so that its text is known. A limit is that share of the weights' "
        "bytes, above what Python takes by itself; everybody runs in a memory cgroup of that size, pages of "
        "files included"
        + (f", and reads at most {rate} MB/s." if rate else ", and reads as fast as the disk does."),
        "",
        f"{settings['max_tokens']} tokens for each of {settings['prompts']} prompts a workload, end of text "
        f"ignored, {settings['threads']} threads; drafts are {', '.join(settings['draft'])} and `self`, "
        "the model in int4. Rows of a question run in turns, every second round in reverse. Speed is of what "
        "comes after the first token; the disk's rate is that of one reader of 4 MiB past the page cache, "
        f"just before. Others answer {settings['peer_prompts']} prompts of each round with "
        f"{settings['peer_tokens']} tokens, and may have rounded otherwise than the resident run. Pages of "
        "libraries that others read first are in the peak, and not in the limit. "
        "Ratios are the median over rounds of the ratio within a round.",
        *(line for limit in limits for line in _table(limit, cells)),
        *_summary([*limits], cells),
        *_kinds([*limits], cells),
        "",
        "## What others report",
        "",
        "On GPUs, which these engines need; nothing of it was measured here.",
        "",
        row("who", "reported", "over, or of", "what differs from the tables above"),
        row(*["---"] * 4),
        *(row(*published) for published in PUBLISHED),
        "",
        *_conditions(cells),
    ]


def draw(cells: Cells, path: Path) -> bool:
    """Draw speeds relative to plain, greedy, at batch 1; return False without matplotlib."""
    bars = _bars(cells)
    if not bars or find_spec("matplotlib") is None:
        return False
    figure = new_figure(4 + 1.5 * len(bars), 4)
    axes = figure.subplots()
    names = list(dict.fromkeys(name for _, ratios in bars for name in ratios))
    for i, name in enumerate(names):
        places = [at + (i - len(names) / 2) * 0.8 / len(names) for at in range(len(bars))]
        heights = [ratios.get(name, 0.0) for _, ratios in bars]
        axes.bar(places, heights, width=0.8 / len(names), label=name, align="edge")
    dress(axes, "Speed over own incremental offloading, greedy, batch 1", "", "times")
    axes.set_xticks(range(len(bars)), [label for label, _ in bars], fontsize=7)
    axes.axhline(1, linewidth=0.8, color="#888888")
    axes.legend(frameon=False, fontsize=8)
    save(figure, path)
    return True


def speed(cell: Cell) -> float | None:
    """Return tokens per second after the first ones; None if all arrived together."""
    seconds = _sum(cell, "seconds")
    return _sum(cell, "tokens") / seconds if seconds else None


def tokens_a_pass(cell: Cell) -> float | None:
    passes = _sum(cell, "passes")
    return _sum(cell, "tokens") / passes if passes else None


def seconds_a_pass(cell: Cell) -> float | None:
    passes = _sum(cell, "passes")
    return _sum(cell, "seconds") / passes if passes else None


def streamed(cell: Cell) -> float | None:
    """Return the bytes that a pass streamed, prefill included; None if not counted."""
    total, steps = _counted(cell, "streamed_bytes"), _counted(cell, "steps")
    return total / steps if total is not None and steps else None


def rate_reached(cell: Cell) -> float | None:
    """Return bytes streamed per second, relative to the rate of one reader just before."""
    total, reference = _counted(cell, "streamed_bytes"), cell["reference"]
    return total / _sum(cell, "whole") / reference if total is not None and reference else None


def waited(cell: Cell) -> float | None:
    """Return the share of time that passes waited for bytes."""
    seconds = _counted(cell, "stream_wait_seconds")
    return None if seconds is None else seconds / _sum(cell, "whole")


def ratio(
    limit: str, question: str, some: str, other: str, cells: Cells, *, rivals: str | None = None
) -> float | None:
    """Return the median over rounds of one row's speed divided by another's, under `rivals` or the same
    limit.
    """
    others = _of(rivals or limit, question, other, cells)
    pairs = [
        (speed(cell), speed(others[round_]))
        for round_, cell in _of(limit, question, some, cells).items()
        if round_ in others
    ]
    ratios = [a / b for a, b in pairs if a is not None and b]
    return statistics.median(ratios) if ratios else None


def _table(limit: str, cells: Cells) -> list[str]:
    head = [*("asked", "row", "tokens/s", "over plain", "tokens a pass", "seconds a pass", "MB a pass")]
    head += [*("disk MB/s", "rate over the disk's", "waited", "peak RSS over the limit", "text as resident")]
    questions = dict.fromkeys(name.question for name in map(Name.of, cells) if name.limit == limit)
    lines = ["", f"## {limit} of its bytes", "", row(*head), row(*["---"] * len(head))]
    for question in questions:
        for each in ROWS:
            found = {
                name: cell
                for name, cell in cells.items()
                if Name.of(name)[:3] == (limit, question, each.name)
            }
            if found:
                lines.append(_row(limit, question, each.name, found, cells))
    return lines


def _row(limit: str, question: str, name: str, found: Cells, cells: Cells) -> str:
    done = [cell for cell in found.values() if "error" not in cell]
    if not done:
        reason = next(iter(found.values()))["error"].replace("|", "/")
        return row(question, name, reason, *[""] * 9)

    def median(figure: Figure, form: str, scale: float = 1) -> str:
        values = [value for cell in done if (value := figure(cell)) is not None]
        return format(scale * statistics.median(values), form) if values else ""

    over = ratio(limit, question, name, PLAIN, cells)
    return row(
        question,
        name,
        median(speed, ".2f"),
        "" if over is None or name == PLAIN else f"{over:.2f}",
        median(tokens_a_pass, ".2f"),
        median(seconds_a_pass, ".2f"),
        median(streamed, ".0f", 1e-6),
        median(lambda cell: cell["reference"], ".0f", 1e-6),
        median(rate_reached, ".2f"),
        median(waited, ".0%"),
        median(lambda cell: cell["peak"] / (cell["own"] + cell["room"]), ".2f"),
        _agreement(limit, question, "text" if _ours(name) else "head", done, cells),
    )


def _agreement(limit: str, question: str, part: str, done: Sequence[Cell], cells: Cells) -> str:
    """Return "7/8": answers whose text, or head, equals the resident run's, of those that both gave."""
    kind = limit.split()[1]
    resident = [
        cell for name, cell in cells.items() if name.startswith(f"dithered {kind} 100%|{question}|resident|")
    ]
    known = {a["prompt"]: a[part] for cell in resident if "error" not in cell for a in cell["answers"]}
    answers = [a for cell in done for a in cell["answers"] if a["prompt"] in known]
    same = sum(a[part] == known[a["prompt"]] for a in answers)
    return f"{same}/{len(answers)}" if answers else ""


def _summary(limits: Sequence[str], cells: Cells) -> list[str]:
    """Compare the choice of `auto` with the best row, and our rows with the peers'."""
    head = (
        "limit",
        "asked",
        "auto over the best of ours",
        "plain over each peer's plain",
        "best over peers' best",
    )
    lines = []
    guessing = [each.name for each in OURS if each.name not in (PLAIN, "auto", "prediction")]
    for limit in limits:
        for question in dict.fromkeys(n.question for n in map(Name.of, cells) if n.limit == limit):

            def best(names: Sequence[str], limit: str = limit, question: str = question) -> str | None:
                speeds = {name: _median_speed(limit, question, name, cells) for name in names}
                known = {name: value for name, value in speeds.items() if value is not None}
                return max(known, key=lambda name: known[name]) if known else None

            ours = best([PLAIN, *guessing])
            theirs = best([each.name for each in PEERS])
            auto = None if ours is None else ratio(limit, question, "auto", ours, cells)
            plain = {
                each.name: over
                for each in PEERS
                if each.draft is None
                and (over := ratio(limit, question, PLAIN, each.name, cells)) is not None
            }
            rivals = None
            if ours is not None and theirs is not None:
                rivals = ratio(limit, question, ours, theirs, cells)
            if auto is None and not plain:
                continue
            lines.append(
                row(
                    limit,
                    question,
                    "" if auto is None else f"{auto:.2f} ({ours})",
                    ", ".join(f"{name} {over:.1f}" for name, over in plain.items()),
                    "" if rivals is None else f"{rivals:.1f} ({ours}, {theirs})",
                )
            )
    return ["", "## Side by side", "", row(*head), row(*["---"] * len(head)), *lines] if lines else []


def _kinds(limits: Sequence[str], cells: Cells) -> list[str]:
    """Compare plain rows of one quantization with the next wider one in the same memory."""
    rooms = {Name.of(name).limit: cell["room"] for name, cell in cells.items() if "room" in cell}
    lines = []
    for narrow in limits:
        for wide in limits:
            (model, kind, _), (same, wider, _) = narrow.split(), wide.split()
            apart = abs(rooms.get(narrow, 0) - rooms.get(wide, 1)) / rooms.get(wide, 1)
            if model != same or KINDS.index(kind) != KINDS.index(wider) + 1 or apart > 0.02:
                continue
            for question in dict.fromkeys(n.question for n in map(Name.of, cells) if n.limit == wide):
                over = ratio(narrow, question, PLAIN, PLAIN, cells, rivals=wide)
                if over is not None:
                    lines.append(f"- {narrow} over {wide}, the same memory, {question}, plain: {over:.2f}")
    return ["", *lines] if lines else []


def _conditions(cells: Cells) -> list[str]:
    """List versions, load of the machine, and processes killed for their memory."""
    done = {name: cell for name, cell in cells.items() if "error" not in cell}
    if not done:
        return []
    versions = sorted({f"{k} {v}" for cell in done.values() for k, v in cell["versions"].items()})
    busiest = max(done, key=lambda name: done[name]["busy_elsewhere"])
    kills = sum(cell.get("kills", 0) for cell in done.values())
    return [
        f"- engines: {', '.join(versions)}",
        f"- other programs kept at most {done[busiest]['busy_elsewhere']:.2f} cores busy "
        f"(beside {busiest.replace('|', ', ')})",
        f"- processes that the kernel ended for want of memory: {kills}",
    ]


def _bars(cells: Cells) -> list[tuple[str, dict[str, float]]]:
    """Return our rows' speeds relative to plain for each limit and workload, greedy, at batch 1."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name in map(Name.of, cells):
        if name.question.endswith(" T=0 batch 1") and _ours(name.row):
            over = ratio(name.limit, name.question, name.row, PLAIN, cells)
            if over is not None and name.row != PLAIN:
                found.setdefault((name.limit, name.question), {})[name.row] = over
    return [(f"{limit}\n{question.split()[0]}", ratios) for (limit, question), ratios in found.items()]


def _of(limit: str, question: str, row: str, cells: Cells) -> dict[str, Cell]:
    """Return a row's cells that hold figures, by round."""
    named = {Name.of(name): cell for name, cell in cells.items()}
    return {
        name.round: cell
        for name, cell in named.items()
        if name[:3] == (limit, question, row) and "error" not in cell
    }


def _median_speed(limit: str, question: str, row: str, cells: Cells) -> float | None:
    found = [
        value for cell in _of(limit, question, row, cells).values() if (value := speed(cell)) is not None
    ]
    return statistics.median(found) if found else None


def _ours(row: str) -> bool:
    return any(each.name == row for each in OURS)


def _sum(cell: Cell, name: str) -> float:
    return float(sum(group[name] for group in cell["groups"]))


def _counted(cell: Cell, name: str) -> float | None:
    """Return the sum of one of the engine's counters over all groups; None without that counter."""
    values = [group["counted"].get(name) for group in cell["groups"]]
    return None if None in values else float(sum(values))
