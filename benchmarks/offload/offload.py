"""Compares specinfer and others on models larger than memory, whose passes read the rest from disk.

    make peers-env ARGS="transformers llama_cpp"                            once: the others
    python -m benchmarks.offload.offload --model TARGET.gguf --draft SMALL.gguf \
        --dataset alpaca=alpaca.jsonl --dataset humaneval=humaneval.jsonl

The target is a 4-bit file; a dithered bfloat16 model is made from it once (dithered.py). Limits are shares of
the model's bytes, beyond the memory of Python itself. Every engine under a limit is a child in a memory
cgroup, and does not run if none can be made. Only the resident run, whose texts are the reference, has
unlimited memory.

A cell is one row (cells.py) with its share of the prompts. Cells of one question alternate. A JSON file
beside the page keeps finished cells: an interrupted run continues, and failed cells run again. A cell's speed
is the tokens after the first ones of prompts that ran together, divided by their seconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.offload.cells import (
    BYTES,
    PLAIN,
    RESIDENT,
    ROWS,
    Bench,
    Limit,
    Prompt,
    Question,
    Row,
    run_cell,
)
from benchmarks.offload.dithered import dithered
from benchmarks.peers.engines import OURS, Home, default_home, script_of
from benchmarks.peers.process import Worker
from benchmarks.speculation.policy_live import read_edits
from benchmarks.study import REQUIRED, Study, natural, parser, row, run, settings_of
from specinfer.hub import resolve
from specinfer.report.dataset import read_dataset
from specinfer.tokenizer import ChatEncoder, Tokenizer

EDITS: Final = "edits"
LONGEST_EDIT: Final = 768  # max tokens of a prompt
_HEAD: Final = (
    *("limit", "asked", "row", "tokens/s", "over plain", "tokens a pass", "seconds a pass", "MB a pass"),
    *("waited", "peak RSS over the limit", "text as resident"),
)
Cell = Mapping[str, Any]
Cells = Mapping[str, Cell]  # "limit|question|row|round" -> cell


def main() -> None:
    args = arguments()
    grid = ("limits", "kinds", "temperatures", "batches", "only")
    study = Study("offload", args.out, settings_of(args, without=(*grid, "home", "models", "timeout")))
    for name, make in cells_of(prepare(args)):
        start, _, round_ = name.rpartition("|")
        if any("error" in study.cells.get(f"{start}|{r}", {}) for r in range(int(round_))):
            continue
        if "answers" not in study.cells.get(name, {}):
            study.keep(name, make())
            cell = study.cells[name]
            print(f"{name}: {cell.get('error') or speed(cell)}", flush=True)
            study.write(page(study), args.threads)
    print(study.write(page(study), args.threads))


def arguments() -> argparse.Namespace:
    threads = psutil.cpu_count(logical=False) or 1
    options = parser(__doc__, model=REQUIRED, draft=REQUIRED, max_tokens=64, rounds=2, threads=threads)
    options.add_argument(
        "--dataset", action="append", default=[], metavar="NAME=FILE.jsonl", help="prompts; repeatable"
    )
    options.add_argument("--prompts", type=natural, default=8, help="of each workload (default 8)")
    options.add_argument(
        "--peer-prompts", type=natural, default=2, help="prompts of a round for peers (default 2)"
    )
    options.add_argument("--peer-tokens", type=natural, default=24, help="of their answers (default 24)")
    options.add_argument("--limits", type=float, nargs="+", default=[0.5, 0.25, 0.75], help="shares of bytes")
    options.add_argument(
        "--kinds", nargs="+", choices=[*BYTES], default=["none", "int8"], help="quantizations"
    )
    options.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    options.add_argument("--batches", type=natural, nargs="+", default=[1, 4])
    options.add_argument("--only", default="", help="only cells whose names contain this text")
    options.add_argument("--timeout", type=float, default=1800, help="seconds for one answer, or to load")
    cache = Path.home() / ".cache" / "specinfer-bench"
    options.add_argument("--models", type=Path, default=cache, help="folder for the models")
    options.add_argument("--home", type=Path, default=default_home(), help="folder of the other engines")
    return options.parse_args()


def prepare(args: argparse.Namespace) -> Bench:
    """Make missing models and read the prompts."""
    gguf, folder = dithered(Path(args.model).resolve(), args.models)
    encoder = ChatEncoder(Tokenizer.load(resolve(str(folder))))

    def chat(text: str, prediction: str | None = None) -> Prompt:
        return Prompt(encoder.token_ids([{"role": "user", "content": text}]), prediction)

    prompts = {}
    for given in args.dataset:
        name, sign, file = given.partition("=")
        if not sign:
            sys.exit(f"error: got --dataset {given}; allowed: NAME=FILE.jsonl")
        conversations = read_dataset(Path(file)).conversations[: args.prompts]
        prompts[name] = [chat(conversation.turns[0]) for conversation in conversations]
    edits = [chat(edit.prompt, edit.source) for edit in read_edits()]
    prompts[EDITS] = [edit for edit in edits if len(edit.tokens) <= LONGEST_EDIT][: args.prompts]
    with Worker([sys.executable, *script_of(OURS)], {}, 120) as worker:
        own = worker.ask({"model": None})["own"]
    return Bench(folder, gguf, resolve(args.draft[0]).path, prompts, Home(args.home), own, args)


def cells_of(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the names of all cells in running order, each with its measuring function."""
    args = bench.args
    questions = [
        Question(workload, temperature, batch)
        for temperature in args.temperatures
        for batch in args.batches
        for workload in bench.prompts
    ]
    resident = Row(name=RESIDENT, options={"lookup": False, "max_nodes": 1})
    for limit in [Limit(kind, share) for share in args.limits for kind in args.kinds]:
        for question in questions:
            for round_ in range(args.rounds):
                turns = [(Limit(limit.kind, 1), resident)]
                turns += [(limit, each) for each in ROWS if asked(each, limit, question)]
                for at, each in turns if round_ % 2 == 0 else reversed(turns):
                    name = f"{at}|{question}|{each.name}|{round_}"
                    if args.only in name:
                        yield name, partial(run_cell, bench, at, question, each, round_)


def asked(row: Row, limit: Limit, question: Question) -> bool:
    """True if a row runs for a question; peers only run greedily with one prompt at a time."""
    if limit.kind not in row.kinds or row.edits not in (None, question.workload == EDITS):
        return False
    return row.peer is None or (question.temperature == 0 and question.batch == 1)


def _sum(cell: Cell, name: str) -> float:
    return float(sum(group[name] for group in cell["groups"]))


def _counted(cell: Cell, name: str) -> float | None:
    """Return the sum of one of the engine's counters over all groups; None without that counter."""
    values = [group["counted"].get(name) for group in cell["groups"]]
    return None if None in values else float(sum(values))


def _divided(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def speed(cell: Cell) -> float | None:
    """Return tokens per second after the first ones; None if all arrived together."""
    return _divided(_sum(cell, "tokens"), _sum(cell, "seconds"))


def page(study: Study) -> list[str]:
    """Return the page, in Markdown."""
    settings = study.settings
    done = {name: cell for name, cell in study.cells.items() if "error" not in cell}
    versions = sorted({f"{k} {v}" for cell in done.values() for k, v in cell["versions"].items()})
    busiest = max((cell["busy_elsewhere"] for cell in done.values()), default=0.0)
    groups = dict.fromkeys(name.rpartition("|")[0] for name in study.cells)
    kills = sum(cell.get("kills", 0) for cell in done.values())
    return [
        f"# Models larger than memory: {settings['model']}, dithered",
        "",
        "*Dithered*: the 4-bit file's weights moved by chance within half a step of their grid, in "
        "bfloat16, so that its 4-bit draft (`self`) differs from it. A limit is that share of the weights' "
        "bytes, above what Python takes by itself; every engine runs in a memory cgroup of that size, pages "
        "of files included.",
        "",
        f"{settings['max_tokens']} tokens for each of {settings['prompts']} prompts a workload, end of text "
        f"ignored, {settings['threads']} threads; drafts are {', '.join(settings['draft'])} and `self`, "
        "the model in int4. Rows of a question run in turns, every second round in reverse. Speed is of what "
        f"comes after the first token. Others answer {settings['peer_prompts']} prompts of each round with "
        f"{settings['peer_tokens']} tokens, and may round otherwise than the resident run. Ratios are the "
        "median over rounds of the ratio within a round.",
        "",
        row(*_HEAD),
        row(*["---"] * len(_HEAD)),
        *(_row(group, study.cells) for group in groups if not group.endswith(RESIDENT)),
        "",
        f"- engines: {', '.join(versions)}",
        f"- other programs kept at most {busiest:.2f} cores busy",
        f"- processes that the kernel ended for want of memory: {kills}",
    ]


def _of(limit: str, question: str, name: str, cells: Cells) -> dict[str, Cell]:
    """Return a row's cells, by round."""
    start = f"{limit}|{question}|{name}|"
    return {key.removeprefix(start): cell for key, cell in cells.items() if key.startswith(start)}


def _row(group: str, cells: Cells) -> str:
    limit, question, name = group.split("|")
    found = _of(limit, question, name, cells)
    done = {round_: cell for round_, cell in found.items() if "error" not in cell}
    if not done:
        reason = next(iter(found.values()))["error"].replace("|", "/")
        return row(limit, question, name, reason, *[""] * (len(_HEAD) - 4))

    def median(values: Sequence[float | None], form: str, scale: float = 1) -> str:
        known = [value for value in values if value is not None]
        return format(scale * statistics.median(known), form) if known else ""

    every = done.values()
    plain = {r: cell for r, cell in _of(limit, question, PLAIN, cells).items() if "error" not in cell}
    over = [_divided(speed(done[r]), speed(plain[r])) for r in done.keys() & plain.keys()]
    wait = [_divided(_counted(cell, "stream_wait_seconds"), _sum(cell, "whole")) for cell in every]
    return row(
        *(limit, question, name, median([speed(cell) for cell in every], ".2f")),
        "" if name == PLAIN else median(over, ".2f"),
        median([_divided(_sum(cell, "tokens"), _sum(cell, "passes")) for cell in every], ".2f"),
        median([_divided(_sum(cell, "seconds"), _sum(cell, "passes")) for cell in every], ".2f"),
        median([_divided(_counted(c, "streamed_bytes"), _counted(c, "steps")) for c in every], ".0f", 1e-6),
        median(wait, ".0%"),
        median([cell["peak"] / (cell["own"] + cell["room"]) for cell in every], ".2f"),
        _agreement(limit, question, name, done, cells),
    )


def _agreement(limit: str, question: str, name: str, done: Cells, cells: Cells) -> str:
    """Return "7/8": answers whose text (a peer's: head) is the resident run's, of those that both gave."""
    part = "head" if any(one.name == name and one.peer for one in ROWS) else "text"
    resident = _of(f"{limit.split()[0]} 100%", question, RESIDENT, cells).values()
    known = {a["prompt"]: a[part] for cell in resident if "error" not in cell for a in cell["answers"]}
    answers = [a for cell in done.values() for a in cell["answers"] if a["prompt"] in known]
    return f"{sum(a[part] == known[a['prompt']] for a in answers)}/{len(answers)}" if answers else ""


if __name__ == "__main__":
    run(main)
