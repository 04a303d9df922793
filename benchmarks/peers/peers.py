"""Compares specinfer with other engines: the same weights, prompts and lengths, one engine at a time.

    make peers-env                                   once: the others, each in its own environment
    python -m benchmarks.peers.peers --model TARGET.gguf --draft SSM.gguf --prompts alpaca.jsonl code.jsonl

Every engine is a child process (benchmarks/peers/run_*.py) that runs for one round, so that none spins or
holds memory while another is measured. A missing or failing engine is a row with its reason. A JSON file
beside the Markdown keeps every finished (engine, round): an interrupted run continues, and failed ones run
again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers.engines import ENGINES, Engine, select
from benchmarks.peers.process import Worker, WorkerError
from benchmarks.peers.report import answer, cell_key, made, page
from benchmarks.peers.weights import INSTALL, Home, WeightsError, default_home
from benchmarks.study import Study, digest, in_turn, natural, parser, run
from specinfer.hub import resolve
from specinfer.report.dataset import built_in, read_dataset
from specinfer.tokenizer import ChatEncoder, Tokenizer

SCRIPTS = Path(__file__).parent
WARM_UP_TOKENS = 16
TREE_ROOM = 64  # KV slots beyond prompt and answer, for rejected nodes


@dataclass(frozen=True)
class Task:
    """The prompts and options, equal for every engine."""

    model: Path
    draft: Path | None
    prompts: Sequence[list[int]]
    max_tokens: int
    rounds: int
    threads: int

    @property
    def context(self) -> int:
        """Return the number of KV slots for a request."""
        return max(map(len, self.prompts)) + self.max_tokens + TREE_ROOM

    def dealt(self, round_: int) -> range:
        """Return the prompts of one round."""
        n = len(self.prompts)
        return range(round_ * n // self.rounds, (round_ + 1) * n // self.rounds)


def main() -> None:
    args = arguments()
    try:
        engines = select(args.engines, has_draft=args.draft is not None)
    except ValueError as error:
        sys.exit(f"error: {error}")
    target = resolve(args.model)
    draft = resolve(args.draft).path if args.draft is not None else None
    datasets = [read_dataset(path) for path in args.prompts] or [built_in()]
    questions = [conversation.turns[0] for conversation in in_turn(datasets, args.limit)]
    chat = ChatEncoder(Tokenizer.load(target))
    prompts = [chat.token_ids([{"role": "user", "content": question}]) for question in questions]
    rounds = min(args.rounds, len(prompts))
    task = Task(target.path, draft, prompts, args.max_tokens, rounds, args.threads)
    settings = {
        "model": target.path.stem,
        "model_bytes": target.path.stat().st_size,
        "draft": draft.stem if draft is not None else None,
        "datasets": [Path(dataset.name).stem for dataset in datasets],
        "num_prompts": len(prompts),
        "prompts_digest": digest(prompts)[:12],
        "max_tokens": args.max_tokens,
        "rounds": rounds,
        "threads": args.threads,
    }
    study = Study("peers", args.out, settings)
    home = Home(args.home)

    def write() -> str:
        lines = page(shown(engines, study.cells), study.cells, settings)
        return study.write(lines, args.threads)

    for round_, engine in schedule(engines, rounds, study.cells):
        if any("error" in study.cells.get(cell_key(engine, r), {}) for r in range(round_)):
            continue  # an engine that failed in an earlier round has its reason
        cell = run_cell(engine, task, round_, home, args.timeout)
        study.keep(cell_key(engine, round_), cell)
        print(f"round {round_ + 1}/{rounds} {engine.name}: {outcome(cell)}", flush=True)
        write()
    print(write())


def arguments() -> argparse.Namespace:
    threads = psutil.cpu_count(logical=False) or 1
    options = parser(__doc__, model="smollm2-135m", max_tokens=128, rounds=4, threads=threads)
    options.add_argument("--draft", help="the small model of the modes with +draft, which else are left out")
    options.add_argument(
        "--prompts", type=Path, nargs="+", default=[], metavar="FILE.jsonl", help="default: the package's own"
    )
    options.add_argument("--limit", type=natural, default=40, help="prompts in total, from all files in turn")
    options.add_argument("--engines", default="*", help="names, comma-separated, * for any text (default *)")
    options.add_argument("--timeout", type=float, default=1200, help="seconds for one answer, or to load")
    options.add_argument(
        "--home", type=Path, default=default_home(), help="folder of the other engines (SPECINFER_PEERS)"
    )
    return options.parse_args()


def schedule(engines: Sequence[Engine], rounds: int, cells: dict[str, Any]) -> list[tuple[int, Engine]]:
    """Return the running order, reversed in every second round; finished cells do not run again."""
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
    """Return the engines of the page: those selected now, and those with cells of an earlier run."""
    known = {engine.name for engine in engines} | {key.partition("|")[0] for key in cells}
    return [engine for engine in ENGINES if engine.name in known]


def run_cell(engine: Engine, task: Task, round_: int, home: Home, timeout: float) -> dict[str, Any]:
    """Return an engine's answers to a round's prompts, or the reason for their absence."""
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
    """Load, warm up and answer one by one; raises WorkerError, or ValueError for a wrong length."""
    began = time.perf_counter()
    versions = worker.ask(setup)["versions"]
    loaded = time.perf_counter()
    dealt = task.dealt(round_)
    worker.ask({"prompt": task.prompts[dealt[0]], "max_tokens": WARM_UP_TOKENS})
    measuring, busy = time.perf_counter(), worker.busy_elsewhere()
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
        "busy_elsewhere": max(worker.busy_elsewhere() - busy, 0.0) / seconds,
    }


def outcome(cell: dict[str, Any]) -> str:
    """Return a cell in a few words, for the terminal."""
    if "error" in cell:
        return str(cell["error"])
    seconds = sum(a["seconds"] for a in cell["answers"])
    tokens = made(cell)
    return f"{tokens / seconds:.1f} tokens/s overall, {cell['load_seconds']:.0f} s to load"


if __name__ == "__main__":
    run(main)
