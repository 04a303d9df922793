"""Compares specinfer and others on models larger than memory, whose passes read the rest from disk.

    make peers-env ARGS="transformers llama_cpp airllm"                     once: the others
    python -m benchmarks.offload.offload --model TARGET.gguf --draft SMALL.gguf \
        --dataset alpaca=alpaca.jsonl --dataset humaneval=humaneval.jsonl

The target is a 4-bit file; a dithered bfloat16 model is made from it once (offload/models.py). `--inflate`
adds a model with more layers and the same text. Limits are shares of the model's bytes, beyond the memory of
Python itself. Every engine under a limit is a child in a memory cgroup, and does not run if none can be made.
Only the resident run, whose texts are the reference, has unlimited memory.

A cell is one row (offload/rows.py) with its share of the prompts. Cells of one question alternate. Before
each, the file is read past the page cache, and its pages are dropped. A JSON file beside the page keeps
finished cells: an interrupted run continues, and failed cells run again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.offload.cells import BYTES, ENGINE, RESIDENT, Bench, Limit, Prompt, Question, run_cell
from benchmarks.offload.models import dithered, inflated
from benchmarks.offload.page import draw, page
from benchmarks.offload.rows import PLAIN, Row, select
from benchmarks.peers.process import Worker
from benchmarks.peers.weights import Home, default_home
from benchmarks.speculation.prediction import read_edits
from benchmarks.study import REQUIRED, Study, natural, parser, run, settings_of
from specinfer.hub import resolve
from specinfer.report.dataset import read_dataset
from specinfer.tokenizer import ChatEncoder, Tokenizer

EDITS = "edits"
LONGEST_EDIT = 768  # max tokens of a prompt


def main() -> None:
    args = arguments()
    try:
        rows = select(args.rows)
    except ValueError as error:
        sys.exit(f"error: {error}")
    grid = ("limits", "kinds", "inflate", "inflated_limits", "temperatures", "batches", "rows", "only")
    without = (*grid, "home", "models", "timeout")
    study = Study("offload", args.out, settings_of(args, without=without))
    bench = prepare(args)

    def write() -> str:
        picture = study.out.with_suffix(".png")
        shown = [f"![Speed over plain]({picture.name})", ""] if draw(study.cells, picture) else []
        return study.write([*page(study.cells, study.settings), *shown], args.threads)

    for name, make in cells_of(bench, rows):
        if failed_before(name, study.cells):
            continue
        if "answers" not in study.cells.get(name, {}):
            cell = make()
            study.keep(name, cell)
            print(f"{name}: {outcome(cell)}", flush=True)
            write()
    print(write())


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
    options.add_argument(
        "--inflate", type=natural, help="layers of an inflated model, under --inflated-limits"
    )
    options.add_argument("--inflated-limits", type=float, nargs="+", default=[0.5])
    options.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    options.add_argument("--batches", type=natural, nargs="+", default=[1, 4])
    options.add_argument("--rate", type=natural, help="limit of all engines' disk reads, MB/s")
    options.add_argument("--rows", default="*", help="names, comma-separated, * for any text (default *)")
    options.add_argument("--only", default="", help="only cells whose names contain this text")
    options.add_argument("--timeout", type=float, default=1800, help="seconds for one answer, or to load")
    cache = Path.home() / ".cache" / "specinfer-bench"
    options.add_argument("--models", type=Path, default=cache, help="folder for the models")
    options.add_argument("--home", type=Path, default=default_home(), help="folder of the other engines")
    return options.parse_args()


def prepare(args: argparse.Namespace) -> Bench:
    """Make missing models and read the prompts."""
    gguf, folder = dithered(Path(args.model).resolve(), args.models)
    folders = {"dithered": folder}
    if args.inflate:
        folders["inflated"] = inflated(folder, args.models, args.inflate)
    tokenizer = Tokenizer.load(resolve(str(folder)))

    def chat(text: str, prediction: str | None = None) -> Prompt:
        return Prompt(ChatEncoder(tokenizer).token_ids([{"role": "user", "content": text}]), prediction)

    prompts = {}
    for given in args.dataset:
        name, sign, file = given.partition("=")
        if not sign:
            sys.exit(f"error: got --dataset {given}; allowed: NAME=FILE.jsonl")
        conversations = read_dataset(Path(file)).conversations[: args.prompts]
        prompts[name] = [chat(conversation.turns[0]) for conversation in conversations]
    edits = [chat(edit.prompt, edit.source) for edit in read_edits()]
    prompts[EDITS] = [edit for edit in edits if len(edit.tokens) <= LONGEST_EDIT][: args.prompts]
    with Worker([sys.executable, str(ENGINE)], {}, 120) as worker:
        own = worker.ask({"model": None})["own"]
    draft = resolve(args.draft[0]).path
    return Bench(folders, gguf, draft, prompts, Home(args.home), own, args)


def cells_of(bench: Bench, rows: Sequence[Row]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield the names of all cells in running order, each with its measuring function."""
    args = bench.args
    limits = [Limit("dithered", kind, share) for share in args.limits for kind in args.kinds]
    if args.inflate:
        limits += [Limit("inflated", kind, share) for share in args.inflated_limits for kind in args.kinds]
    questions = [
        Question(workload, temperature, batch)
        for temperature in args.temperatures
        for batch in args.batches
        for workload in bench.prompts
    ]
    resident = Row(name=RESIDENT, options={"lookup": False, "max_nodes": 1})
    for limit in limits:
        for question in questions:
            for round_ in range(args.rounds):
                known = Limit("dithered", limit.kind, 1)
                turns = [(known, resident), *((limit, row) for row in rows if asked(row, limit, question))]
                if question == questions[0]:
                    turns += [(other, row) for other in beside(limit) for row in rows if row.name == PLAIN]
                for at, row in turns if round_ % 2 == 0 else reversed(turns):
                    name = f"{at}|{question}|{row.name}|{round_}"
                    if args.only in name:
                        yield name, partial(run_cell, bench, at, question, row, round_)


def beside(limit: Limit) -> list[Limit]:
    """Return the limits of other quantizations in bfloat16's memory, if they do not fit into it."""
    if limit.kind != "none" or limit.model != "dithered":
        return []
    shares = {kind: limit.share * BYTES["none"] / BYTES[kind] for kind in BYTES if kind != "none"}
    return [Limit(limit.model, kind, share) for kind, share in shares.items() if share < 1]


def asked(row: Row, limit: Limit, question: Question) -> bool:
    """True if a row runs for a question; peers only run greedily with one prompt at a time."""
    if limit.kind not in row.kinds or row.edits not in (None, question.workload == EDITS):
        return False
    return row.peer is None or (
        limit.model == "dithered" and question.temperature == 0 and question.batch == 1
    )


def failed_before(name: str, cells: dict[str, Any]) -> bool:
    """True if the row failed in an earlier round, with its reason recorded."""
    start, _, round_ = name.rpartition("|")
    return any("error" in cells.get(f"{start}|{r}", {}) for r in range(int(round_)))


def outcome(cell: dict[str, Any]) -> str:
    """Return a cell in a few words, for the terminal."""
    if "error" in cell:
        return str(cell["error"])
    tokens, seconds = (sum(group[name] for group in cell["groups"]) for name in ("tokens", "seconds"))
    return f"{tokens / seconds:.2f} tokens/s" if seconds else "all at once"


if __name__ == "__main__":
    run(main)
