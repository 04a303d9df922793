"""Measures servers under load, with speculation and without, for 1, 2, ... concurrent users over HTTP.

    make peers-env                                   once: the others, each in its own environment
    python -m benchmarks.load.serving --model TARGET.gguf --draft SSM.gguf --dataset alpaca.jsonl

Every engine is a server process (see benchmarks/serving/engines.py) that runs for one round under the load of
`specinfer bench --url`. Beside each mode with speculation the same engine runs without. A missing or failing
server is a row with its reason. A JSON file beside the Markdown keeps every finished cell: an interrupted run
continues, and failed cells run again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import psutil

from benchmarks.load.serving_engines import ENGINES, Engine, select
from benchmarks.load.serving_report import cell_key, kept, page
from benchmarks.peers.process import Server, WorkerError, free_port
from benchmarks.peers.weights import INSTALL, Home, WeightsError, default_home
from benchmarks.study import REQUIRED, Study, digest, natural, parser, run
from specinfer.bench.load import ServerLoad, Traffic, first_requests, measure
from specinfer.bench.openai_client import RequestOptions
from specinfer.errors import ConfigError
from specinfer.hub import resolve
from specinfer.report.dataset import Conversation, Dataset, read_dataset
from specinfer.sampling_params import SamplingParams

LEAST = 8  # min requests of a run

Run: TypeAlias = tuple[Dataset, int, str]  # prompts, users, the name of the cell


@dataclass(frozen=True)
class Task:
    """The prompts and options, equal for every server."""

    model: Path
    draft: Path | None
    datasets: Sequence[Dataset]
    users: Sequence[int]
    per_user: int
    rounds: int
    max_tokens: int
    ignore_eos: bool
    context: int
    threads: int
    timeout: float

    def dealt(self, dataset: Dataset, users: int) -> Dataset:
        """Return the prompts of this number of users."""
        return first_requests(dataset, min(dataset.num_turns, max(LEAST, self.per_user * users)))


def main() -> None:
    args = arguments()
    try:
        engines = select(ENGINES, args.engines, has_draft=args.draft is not None)
    except ValueError as error:
        sys.exit(f"error: {error}")
    target = resolve(args.model).path
    draft = resolve(args.draft).path if args.draft is not None else None
    datasets = [first_turns(read_dataset(path).head(args.limit)) for path in args.dataset]
    if len({dataset.name for dataset in datasets}) < len(datasets):
        sys.exit("error: two data sets have one name; rename a file")
    for dataset in datasets:
        if (has := dataset.num_turns) < (most := max(args.users)):
            sys.exit(f"error: {dataset.name} has {has} prompts, too few for {most} users; change one")
    settings = {
        "model": target.stem,
        "draft": draft.stem if draft is not None else None,
        "datasets": [dataset.name for dataset in datasets],
        "prompts_digest": digest([[c.turns for c in dataset.conversations] for dataset in datasets]),
        "least": LEAST,
        **{
            name: getattr(args, name)
            for name in (
                "limit",
                "per_user",
                "users",
                "rounds",
                "max_tokens",
                "ignore_eos",
                "context",
                "threads",
            )
        },
    }
    study = Study("serving", args.out, settings)
    task = Task(
        target,
        draft,
        datasets,
        **{name: settings[name] for name in ("users", "per_user", "rounds", "max_tokens", "ignore_eos")},
        **{name: settings[name] for name in ("context", "threads")},
        timeout=args.timeout,
    )
    home = Home(args.home)
    sweep(engines, task, study, home)
    print(study.write(page(shown(engines, study.cells), study.cells, settings), args.threads))


def arguments() -> argparse.Namespace:
    threads = psutil.cpu_count(logical=False) or 1
    options = parser(
        __doc__, model=REQUIRED, dataset=REQUIRED, limit=128, max_tokens=128, rounds=1, threads=threads
    )
    options.add_argument("--draft", help="the small model of the modes with +draft, which else are left out")
    options.add_argument(
        "--users",
        type=lambda text: [natural(part) for part in text.split(",")],
        default=[1, 2, 4, 8, 16, 32],
        metavar="N,N,...",
        help="concurrent users (default 1,2,4,8,16,32)",
    )
    options.add_argument("--per-user", type=natural, default=4, help="prompts for each user (default 4)")
    options.add_argument("--engines", default="*", help="names, comma-separated, * for any text (default *)")
    options.add_argument(
        "--ignore-eos", action="store_true", help="--max-tokens each, where a server can; else to the end"
    )
    options.add_argument("--context", type=natural, default=4096, help="tokens of a request (default 4096)")
    options.add_argument("--timeout", type=float, default=1200, help="seconds for one answer, or to start")
    options.add_argument(
        "--home", type=Path, default=default_home(), help="folder of the other engines (SPECINFER_PEERS)"
    )
    return options.parse_args()


def first_turns(dataset: Dataset) -> Dataset:
    """Return the first questions under the file's name; later ones would depend on the answers."""
    questions = tuple(Conversation(talk.turns[:1]) for talk in dataset.conversations)
    return replace(dataset, name=Path(dataset.name).stem, conversations=questions)


def shown(engines: Sequence[Engine], cells: dict[str, Any]) -> list[Engine]:
    """Return the engines of the page: those selected now, and those with cells of an earlier run."""
    known = {engine.name for engine in engines} | {key.partition("|")[0] for key in cells}
    return [engine for engine in ENGINES if engine.name in known]


def sweep(engines: Sequence[Engine], task: Task, study: Study, home: Home) -> None:
    """Run unfinished cells, round by round; an engine that failed to start does not start again."""
    for round_ in range(task.rounds):
        for engine in engines if round_ % 2 == 0 else engines[::-1]:
            keys = {r: list(keys_of(engine, r, task)) for r in range(round_ + 1)}
            if any(all("error" in study.cells.get(key, {}) for _, _, key in keys[r]) for r in range(round_)):
                continue
            left = [item for item in keys[round_] if "completed" not in study.cells.get(item[2], {})]
            if left:
                serve(engine, left, task, study, home)


def keys_of(engine: Engine, round_: int, task: Task) -> Iterator[Run]:
    """Return all loads of a round, with the names of their cells."""
    for dataset in task.datasets:
        for users in task.users:
            yield dataset, users, cell_key(engine, round_, dataset.name, users)


def serve(engine: Engine, left: Sequence[Run], task: Task, study: Study, home: Home) -> None:
    """Start an engine's server, run each remaining load, end it, and keep every cell."""

    def keep(key: str, cell: dict[str, Any]) -> None:
        study.keep(key, cell)
        said = cell.get("error") or f"{cell['output_throughput']:.1f} tokens/s, {cell['failed']} failed"
        print(f"{key}: {said}", flush=True)

    try:
        with start(engine, task, home) as server:
            server.wait_until_ready(task.timeout)
            version = version_of(engine, home)
            for dataset, users, key in left:
                keep(key, {**load(server, dataset, users, task), "version": version})
    except (WorkerError, WeightsError) as error:
        for _, _, key in left:
            keep(key, {"error": str(error)})


def start(engine: Engine, task: Task, home: Home) -> Server:
    """Return the engine's server while it loads; raises WorkerError or WeightsError."""
    python = python_of(engine, home)
    if not python.exists():
        raise WorkerError(f"not installed; {INSTALL}")
    port = free_port()
    command, variables = engine.started(
        python=str(python),
        model=str(home.weights(task.model, engine.form)),
        draft=str(home.weights(task.draft, engine.form)) if engine.draft and task.draft else "",
        port=str(port),
        threads=str(task.threads),
        cores=f"0-{task.threads - 1}",
        context=str(task.context),
        users=str(max(task.users)),
    )
    return Server(command, {"OMP_NUM_THREADS": str(task.threads), "HF_HUB_OFFLINE": "1", **variables}, port)


def load(server: Server, dataset: Dataset, users: int, task: Task) -> dict[str, Any]:
    """Return the cell of one load."""
    request_options = RequestOptions(
        params=SamplingParams(temperature=0, max_tokens=task.max_tokens, seed=0),
        ignore_eos=task.ignore_eos,
        # Prompts of runs differ, as cached prefixes and earlier answers would make every run faster than the
        # one before.
        body={"cache_salt": f"{dataset.name} {users}"},
        timeout=task.timeout,
    )
    asked = ServerLoad(
        url=server.url,
        request=request_options,
        traffic=Traffic(concurrency=users),
        warm_up=users,
        save_texts=True,
    )
    began, busy = time.perf_counter(), server.busy_elsewhere() - time.process_time()
    try:
        result = measure(asked, task.dealt(dataset, users))
    except ConfigError as error:
        return {"error": str(error)}
    busy = server.busy_elsewhere() - time.process_time() - busy
    return {**kept(result), "busy_elsewhere": round(max(busy, 0.0) / (time.perf_counter() - began), 4)}


def python_of(engine: Engine, home: Home) -> Path:
    """Return the Python of the engine's environment, which may not exist."""
    return Path(sys.executable) if engine.environment is None else home.python(engine.environment)


def version_of(engine: Engine, home: Home) -> str:
    """Return "name 1.2" for another engine's package, or "" for ours and if it is unknown."""
    if engine.package is None:
        return ""
    code = "import sys; from importlib.metadata import version; print(version(sys.argv[1]))"
    command = [str(python_of(engine, home)), "-c", code, engine.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"{engine.package} {done.stdout.strip()}" if done.returncode == 0 else ""


if __name__ == "__main__":
    run(main)
