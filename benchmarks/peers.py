"""specinfer beside other engines: the same weights, prompts and lengths, one engine after another.

    make peers-env                                   once: the others, each in an environment of its own
    python benchmarks/peers.py --model TARGET.gguf --draft SSM.gguf --prompts alpaca.jsonl humaneval.jsonl

Every engine is a child process (benchmarks/peers/run_*.py), started for a round and ended after it, so that
none spins or holds memory while another is measured. One that is missing or fails is a row with its reason.
Every finished (engine, round) is kept in a JSON file beside the Markdown: an interrupted run goes on where
it was, and what failed is tried again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import psutil
from peers.engines import ENGINES, Engine, select
from peers.process import Worker, WorkerError
from peers.report import answer, cell_key, markdown
from peers.weights import INSTALL, Home, WeightsError
from provenance import default_result, provenance_lines

from specinfer.errors import UserError
from specinfer.hub import resolve
from specinfer.report.dataset import Dataset, built_in, read_dataset
from specinfer.report.provenance import commit
from specinfer.tokenizer import Tokenizer

SCRIPTS = Path(__file__).parent / "peers"
WARM_UP_TOKENS = 16
TREE_ROOM = 64  # cache positions beyond prompt and answer, for what is guessed and not kept


@dataclass(frozen=True)
class Task:
    """What every engine is asked to do."""

    model: Path
    draft: Path | None
    prompts: Sequence[list[int]]
    max_tokens: int
    rounds: int
    threads: int

    @property
    def context(self) -> int:
        """Cache positions a request may need."""
        return max(map(len, self.prompts)) + self.max_tokens + TREE_ROOM

    def dealt(self, round_: int) -> range:
        """The prompts of one round."""
        n = len(self.prompts)
        return range(round_ * n // self.rounds, (round_ + 1) * n // self.rounds)


def main() -> None:
    args = arguments()
    try:
        engines = select(args.engines, has_draft=args.draft is not None)
        target = resolve(args.model)
        draft = resolve(args.draft).path if args.draft is not None else None
        datasets = [read_dataset(path) for path in args.prompts] or [built_in()]
        questions = interleave(datasets, args.limit)
        tokenizer = Tokenizer.load(target)
        prompts = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in questions]
    except (UserError, ValueError) as error:
        sys.exit(f"error: {error}")
    rounds = min(args.rounds, len(prompts))
    task = Task(target.path, draft, prompts, args.max_tokens, rounds, args.threads)
    settings = {
        "model": target.path.stem,
        "model_bytes": target.path.stat().st_size,
        "draft": draft.stem if draft is not None else None,
        "datasets": [Path(dataset.name).stem for dataset in datasets],
        "num_prompts": len(prompts),
        "prompts_digest": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:12],
        "max_tokens": args.max_tokens,
        "rounds": rounds,
        "threads": args.threads,
    }
    out: Path = args.out or default_result("peers", target.path.stem)
    cells_file = out.with_suffix(".json")
    cells = read_cells(cells_file, settings)
    home = Home(args.home)
    for round_, engine in schedule(engines, rounds, cells):
        if any("error" in cells.get(cell_key(engine, r), {}) for r in range(round_)):
            continue  # what failed in an earlier round has its reason
        cell = cells[cell_key(engine, round_)] = run_cell(engine, task, round_, home, args.timeout)
        print(f"round {round_ + 1}/{rounds} {engine.name}: {outcome(cell)}", flush=True)
        write(cells_file, json.dumps({"settings": settings, "cells": cells}) + "\n")
        write(out, markdown(shown(engines, cells), cells, settings, provenance_lines(args.threads)))
    page = markdown(shown(engines, cells), cells, settings, provenance_lines(args.threads))
    write(out, page)
    print(page)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="the target (default smollm2-135m)")
    parser.add_argument("--draft", help="the small model of the modes with +draft, which else are left out")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE.jsonl", help="default: the package's own"
    )
    parser.add_argument("--limit", type=int, default=40, help="prompts in total, from all files in turn")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--rounds", type=int, default=4, help="parts the prompts are dealt out to (default 4)"
    )
    parser.add_argument("--engines", default="*", help="names, comma-separated, * for any text (default *)")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--timeout", type=float, default=1200, help="seconds for one answer, or to load")
    parser.add_argument(
        "--home", type=Path, default=default_home(), help="where the others are (SPECINFER_PEERS)"
    )
    parser.add_argument("--out", type=Path, help="Markdown file; its cells lie beside it as .json")
    args = parser.parse_args()
    for name in ("limit", "max_tokens", "rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; allowed: an integer >= 1")
    return args


def default_home() -> Path:
    """Where install.sh puts the others."""
    named = os.environ.get("SPECINFER_PEERS")
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(named) if named else (Path(cache) if cache else Path.home() / ".cache") / "specinfer-peers"


def interleave(datasets: Sequence[Dataset], limit: int) -> list[str]:
    """The first questions of the data sets in turn, `limit` in all."""
    columns = [[c.turns[0] for c in dataset.conversations] for dataset in datasets]
    questions = chain.from_iterable(zip_longest(*columns))
    return [question for question in questions if question is not None][:limit]


def schedule(engines: Sequence[Engine], rounds: int, cells: dict[str, Any]) -> list[tuple[int, Engine]]:
    """Which engine runs when, every second round in reverse; what is finished does not run again."""
    cells_left = [
        (round_, engine)
        for round_ in range(rounds)
        for engine in (engines if round_ % 2 == 0 else engines[::-1])
    ]
    return [
        (round_, engine)
        for round_, engine in cells_left
        if "answers" not in cells.get(cell_key(engine, round_), {})
    ]


def shown(engines: Sequence[Engine], cells: dict[str, Any]) -> list[Engine]:
    """The engines of the page: those asked for now, and those an earlier run has left cells of."""
    known = {engine.name for engine in engines} | {key.partition("|")[0] for key in cells}
    return [engine for engine in ENGINES if engine.name in known]


def run_cell(engine: Engine, task: Task, round_: int, home: Home, timeout: float) -> dict[str, Any]:
    """One engine's answers to the prompts of one round, or the reason there are none."""
    python = Path(sys.executable) if engine.environment is None else home.python(engine.environment)
    if not python.exists():
        return {"error": f"not installed; {INSTALL}"}
    command = [str(python), str(SCRIPTS / f"run_{engine.script}.py")]
    environment = {"OMP_NUM_THREADS": str(task.threads), "HF_HUB_OFFLINE": "1"}
    try:
        setup = {
            "model": str(home.weights(task.model, engine.form)),
            "draft": str(home.weights(task.draft, engine.form)) if engine.draft and task.draft else None,
            "threads": task.threads,
            "context": task.context,
            "options": dict(engine.options),
        }
        with Worker(command, environment, timeout) as worker:
            return converse(worker, setup, task, round_)
    except (WorkerError, WeightsError, ValueError) as error:
        return {"error": str(error)}


def converse(worker: Worker, setup: dict[str, Any], task: Task, round_: int) -> dict[str, Any]:
    """Load, warm up and ask one after another; raises WorkerError, or ValueError for a wrong length."""
    began = time.perf_counter()
    versions = worker.ask(setup)["versions"]
    loaded = time.perf_counter()
    dealt = task.dealt(round_)
    worker.ask({"prompt": task.prompts[dealt[0]], "max_tokens": WARM_UP_TOKENS})
    measuring, busy = time.perf_counter(), busy_elsewhere(worker)
    answers = []
    for index in dealt:
        reply = worker.ask({"prompt": task.prompts[index], "max_tokens": task.max_tokens})
        answers.append(answer(index, reply, task.max_tokens))
    seconds = time.perf_counter() - measuring
    return {
        "answers": answers,
        "versions": versions,
        "load_seconds": loaded - began,
        "peak_memory": worker.peak_memory(),
        "busy_elsewhere": max(busy_elsewhere(worker) - busy, 0.0) / seconds,
        "commit": commit(),
    }


def busy_elsewhere(worker: Worker) -> float:
    """CPU seconds so far that the worker did not use, those of other guests on the machine included."""
    everybody = psutil.cpu_times()
    idle = everybody.idle + getattr(everybody, "iowait", 0.0)
    counted = sum(everybody) - getattr(everybody, "guest", 0.0) - getattr(everybody, "guest_nice", 0.0)
    return float(counted - idle - worker.cpu_seconds())


def outcome(cell: dict[str, Any]) -> str:
    """A cell in a few words, for the terminal."""
    if "error" in cell:
        return str(cell["error"])
    seconds = sum(a["seconds"] for a in cell["answers"])
    tokens = sum(len(a["tokens"]) for a in cell["answers"])
    return f"{tokens / seconds:.1f} tokens/s overall, {cell['load_seconds']:.0f} s to load"


def read_cells(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The cells of an earlier run of the same task; exits when the file is of another."""
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    if stored["settings"] != settings:
        sys.exit(f"error: {path} holds cells of {stored['settings']}, not {settings}; give another --out")
    cells: dict[str, Any] = stored["cells"]
    return cells


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


if __name__ == "__main__":
    main()
