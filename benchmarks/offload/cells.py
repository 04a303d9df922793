"""A cell of benchmarks/offload/offload.py: a row's answers to its prompts, under a limit.

Every engine under a limit is a child in a memory cgroup, and does not run if none can be made. Before it
runs, the disk's rate is measured, and the pages of its files are dropped from the cache, so that its reads
count for its limit.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import run as call
from typing import Any

from benchmarks.machines.memory_group import NoGroupError, memory_group
from benchmarks.offload.rows import Row
from benchmarks.offload.slow_disk import Inside, slow_disk
from benchmarks.peers.process import Worker, WorkerError
from benchmarks.peers.weights import INSTALL, Home, WeightsError
from benchmarks.study import digest
from specinfer.hub import resolve
from specinfer.models.open_model import open_model

HERE = Path(__file__).parent
ENGINE = HERE / "run_engine.py"
PEERS = HERE.parent / "peers"
RESIDENT = "resident"
BYTES = {"none": 2.0, "int8": 1.0, "int4": 19 / 32}  # per weight; int4 has a scale and a zero for 32 of them
REFERENCE_SECONDS = 2.0
WARM_UP_TOKENS = 2
TREE_ROOM = 64  # KV slots beyond prompt and answer, for rejected nodes


@dataclass(frozen=True, slots=True)
class Limit:
    """A model under a limit."""

    model: str  # dithered or inflated
    kind: str  # its quantization
    share: float  # share of its bytes that may be in memory

    def __str__(self) -> str:
        return f"{self.model} {self.kind} {self.share:.0%}"


@dataclass(frozen=True, slots=True)
class Question:
    """Workload, sampling and batch size; cells of one question are compared."""

    workload: str
    temperature: float
    batch: int

    def __str__(self) -> str:
        return f"{self.workload} T={self.temperature:g} batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    prediction: str | None = None


@dataclass(frozen=True)
class Bench:
    """Common data of all cells."""

    folders: dict[str, Path]  # dithered, inflated -> model folder
    gguf: Path  # the dithered model in bfloat16
    draft: Path
    prompts: dict[str, list[Prompt]]  # by workload
    home: Home
    own: int  # bytes of Python itself
    args: argparse.Namespace

    def bytes(self, limit: Limit) -> int:
        """Return the bytes of the weights in memory."""
        return int(limit.share * weights(self.folders[limit.model]) * BYTES[limit.kind])

    def dealt(self, question: Question, round_: int) -> range:
        """Return the prompt numbers of a question's round."""
        count = len(self.prompts[question.workload])
        return range(round_ * count // self.args.rounds, (round_ + 1) * count // self.args.rounds)

    def context(self, question: Question) -> int:
        """Return the number of KV slots for an answer."""
        longest = max(len(prompt.tokens) for prompt in self.prompts[question.workload])
        return longest + int(self.args.max_tokens) + TREE_ROOM


def run_cell(bench: Bench, limit: Limit, question: Question, row: Row, round_: int) -> dict[str, Any]:
    """Return one row's answers to its prompts of a round, or the reason for their absence."""
    python = Path(sys.executable) if row.peer is None else bench.home.python(row.peer)
    if not python.exists():
        return {"error": f"not installed; {INSTALL}"}
    script = ENGINE if row.peer is None else PEERS / f"run_{row.peer}.py"
    room = bench.bytes(limit)
    memory = {"own": bench.own, "room": room}
    try:
        setup, files = setup_of(bench, limit, question, row, None if row.name == RESIDENT else room)
        if row.name == RESIDENT:
            command = [str(python), str(script)]
            return {**run_child(bench, command, setup, question, row, round_), **memory, "reference": None}
        rate = bench.args.rate and bench.args.rate * 10**6
        with memory_group(bench.own + room) as group, slow_disk(group, rate, files[0]) as inside:
            reference = read_reference(inside, files[0])
            for file in files:
                forget(file)
            command = inside([str(python), str(script)])
            cell = run_child(bench, command, setup, question, row, round_)
            group_facts = {
                "group_peak": group.peak_usage(),
                "kills": group.oom_kills(),
                "reference": reference,
            }
            return {**cell, **memory, **group_facts}
    except NoGroupError as error:
        return {"error": f"not run: {error}"}
    except (WorkerError, WeightsError, ValueError, OSError) as error:
        return {"error": str(error)}


def run_child(
    bench: Bench, command: Sequence[str], setup: dict[str, Any], question: Question, row: Row, round_: int
) -> dict[str, Any]:
    """Return a child's answers and peak memory; raises WorkerError, or ValueError for a wrong length."""
    environment = {"OMP_NUM_THREADS": str(bench.args.threads), "HF_HUB_OFFLINE": "1"}
    with Worker(command, environment, bench.args.timeout) as worker:
        cell = converse(bench, worker, setup, question, row, round_)
        return {**cell, "peak": worker.peak_memory()}


def setup_of(
    bench: Bench, limit: Limit, question: Question, row: Row, room: int | None
) -> tuple[dict[str, Any], list[Path]]:
    """Return the child's first message and the files it reads; `room` is None for the resident run."""
    folder, options = bench.folders[limit.model], dict(row.options)
    model = {
        "folder": lambda: folder,
        "bf16": lambda: bench.gguf,
        "q8_0": lambda: bench.home.weights(bench.gguf, "q8_0"),
    }[row.form]()
    draft = None if row.draft is None else bench.home.weights(bench.draft, row.draft)
    if row.peer is None:
        options |= {
            "quantization": limit.kind,
            "dtype": "bfloat16",
            "max_batch_size": question.batch,
            "max_context": bench.context(question),
            "prefix_reuse": False,
        }
        if draft is not None:
            options["drafts"] = [str(draft)]
        if room is not None:
            options = {"offload": "auto", "memory": bench.own + room, **options}
    elif row.peer == "transformers":
        options["memory"] = bench.own + (room or 0)
    elif row.peer == "airllm":
        options["layers"] = str(bench.home.folder / "weights" / f"airllm-{folder.name}")
    setup = {
        "model": str(model),
        "draft": None if draft is None else str(draft),
        "threads": bench.args.threads,
        "context": bench.context(question),
        "options": options,
    }
    paths = [path for path in (model, draft) if path is not None]
    return setup, [
        file for path in paths for file in ([*path.glob("*.safetensors")] if path.is_dir() else [path])
    ]


def converse(
    bench: Bench, worker: Worker, setup: dict[str, Any], question: Question, row: Row, round_: int
) -> dict[str, Any]:
    """Load, warm up and answer, a batch at a time; raises WorkerError, or ValueError for a wrong length."""
    began = time.perf_counter()
    loading = worker.ask(setup)
    loaded = time.perf_counter()
    prompts, numbers = bench.prompts[question.workload], [*bench.dealt(question, round_)]
    args, max_tokens = bench.args, int(bench.args.max_tokens)
    if row.peer is not None:
        numbers, max_tokens = numbers[: args.peer_prompts], min(max_tokens, args.peer_tokens)
    ask(worker, row, question, [(numbers[0], prompts[numbers[0]])], WARM_UP_TOKENS, salt="warm")
    answers, groups = [], []
    measured, busy = time.perf_counter(), worker.busy_elsewhere()
    for start in range(0, len(numbers), question.batch):
        batch = [(number, prompts[number]) for number in numbers[start : start + question.batch]]
        asked_at = time.perf_counter()
        reply = ask(worker, row, question, batch, max_tokens, salt=str(start))
        for number, answer in zip(numbers[start:], reply["answers"], strict=False):
            if len(answer["tokens"]) != max_tokens:
                raise ValueError(f"made {len(answer['tokens'])} tokens for prompt {number}")
            head = digest(answer["tokens"][: args.peer_tokens])
            answers.append({"prompt": number, "text": digest(answer["tokens"]), "head": head})
        whole = time.perf_counter() - asked_at
        groups.append({**timed(reply["answers"]), "whole": whole, "counted": reply.get("counted", {})})
    busy = worker.busy_elsewhere() - busy
    return {
        "answers": answers,
        "groups": groups,
        "versions": loading["versions"],
        "load_seconds": loaded - began,
        "busy_elsewhere": max(busy, 0.0) / (time.perf_counter() - measured),
    }


def ask(
    worker: Worker,
    row: Row,
    question: Question,
    batch: Sequence[tuple[int, Prompt]],
    max_tokens: int,
    salt: str,
) -> dict[str, Any]:
    """Return the answers to some concurrent prompts; a peer gets one."""
    if row.peer is not None:
        [(_, prompt)] = batch
        return {"answers": [worker.ask({"prompt": prompt.tokens, "max_tokens": max_tokens})]}
    params = [
        {
            "temperature": question.temperature,
            "seed": number,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "cache_salt": salt,
            **({"prediction": prompt.prediction} if row.predicts else {}),
        }
        for number, prompt in batch
    ]
    return worker.ask({"prompts": [prompt.tokens for _, prompt in batch], "params": params})


def timed(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return tokens, seconds and passes after the first token of all prompts, and the seconds to it."""
    first = max(answer["arrivals"][0][0] for answer in answers)
    later = [[(at, n) for at, n in answer["arrivals"] if at > first] for answer in answers]
    everything = [arrival for arrivals in later for arrival in arrivals]
    return {
        "first": first,
        "tokens": sum(n for _, n in everything),
        "seconds": max((at for at, _ in everything), default=first) - first,
        "passes": max(len(arrivals) for arrivals in later),
    }


def read_reference(inside: Inside, file: Path) -> float | None:
    """Return bytes per second of one reader with pieces of 4 MiB, or None if refused."""
    command = [sys.executable, str(HERE / "read_rate.py"), str(file), str(REFERENCE_SECONDS)]
    done = call(inside(command), capture_output=True, text=True, check=False)
    return float(done.stdout) if done.returncode == 0 else None


def forget(file: Path) -> None:
    """Drop a file's pages from the cache, so that reading them counts for the reader's limit."""
    if hasattr(os, "posix_fadvise"):
        number = os.open(file, os.O_RDONLY)
        os.fdatasync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def weights(folder: Path) -> int:
    """Return the number of elements of a model's matrices."""
    shapes = open_model(resolve(str(folder))).shapes.values()
    return sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
