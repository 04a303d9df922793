"""A cell of offload.py: a row's answers to its prompts, under a limit.

Every engine under a limit is a child in a memory cgroup, and does not run if none can be made. Before it
runs, the pages of its files are dropped from the cache, so that its reads count for its limit.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.machines.memory_group import NoGroupError, memory_group
from benchmarks.peers.engines import INSTALL, OURS, Home, WeightsError, script_of
from benchmarks.peers.process import Worker, WorkerError
from benchmarks.study import digest
from specinfer.hub import resolve
from specinfer.models.open_model import open_model

PLAIN: Final = "plain"
RESIDENT: Final = "resident"
# Bytes per weight; int4 has a scale and a zero for 32 of them.
BYTES: Final = {"none": 2.0, "int8": 1.0, "int4": 19 / 32}
DRAFT_TOKENS: Final = 16  # length of a peer's chain; a pass takes seconds, so it may be long
WARM_UP_TOKENS: Final = 2
TREE_ROOM: Final = 64  # KV slots beyond prompt and answer, for rejected nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine in one mode."""

    name: str
    peer: str | None = None  # engines.script_of has the names; None: specinfer
    form: str = "folder"  # the dithered folder, or "bf16" or "q8_0" as a GGUF file
    draft: str | None = None  # the small model as the available GGUF "file", or as "safetensors"
    options: Mapping[str, Any] = field(default_factory=dict)
    edits: bool | None = None  # True: only for edits; False: never for edits; None: every workload
    predicts: bool = False  # gets the old file as the prediction
    kinds: tuple[str, ...] = tuple(BYTES)  # quantizations of the target that it runs for


_ASSISTANCE: Final = {
    "num_assistant_tokens": DRAFT_TOKENS,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}
_SELF: Final = {"drafts": ["self"], "draft_quantization": "int4", "lookup": False}


def _peers() -> list[Row]:
    rows: list[Row] = []
    own: dict[str, Any]
    for form, kinds in (("bf16", ("none",)), ("q8_0", ("none", "int8"))):
        own = {"peer": "llama_cpp", "form": form, "edits": False, "kinds": kinds}
        guessing: dict[str, Any] = {"draft": "file", "options": {"draft_tokens": DRAFT_TOKENS}}
        rows.append(Row(name=f"llama.cpp {form}", **own))
        rows.append(Row(name=f"llama.cpp {form} + small", **own, **guessing))
    own = {"peer": "transformers", "edits": False, "kinds": ("none",)}
    rows.append(Row(name="accelerate", **own))
    rows.append(
        Row(name="accelerate + small", draft="safetensors", options={"assistance": _ASSISTANCE}, **own)
    )
    return rows


# Plain has one-node trees: no draft, no `offload="auto"` copy of the target, no lookups.
ROWS: Final = (
    Row(name=PLAIN, options={"lookup": False, "max_nodes": 1}),
    Row(name="self", options=_SELF, kinds=("none", "int8")),
    Row(name="small", draft="file", options={"draft_quantization": "int4", "lookup": False}),
    Row(name="auto"),
    Row(name="prediction", options={"lookup": False, "offload": "layers"}, edits=True, predicts=True),
    *_peers(),
)


@dataclass(frozen=True, slots=True)
class Limit:
    """A quantization under a limit."""

    kind: str
    share: float  # share of its bytes that may be in memory

    def __str__(self) -> str:
        return f"{self.kind} {self.share:.0%}"


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

    folder: Path  # the dithered model
    gguf: Path  # the same in bfloat16
    draft: Path
    prompts: dict[str, list[Prompt]]  # by workload
    home: Home
    own: int  # bytes of Python itself
    args: argparse.Namespace

    def bytes(self, limit: Limit) -> int:
        """Return the bytes of the weights in memory."""
        shapes = open_model(resolve(str(self.folder))).shapes.values()
        weights = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
        return int(limit.share * weights * BYTES[limit.kind])

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
    command = [str(python), *script_of(row.peer or OURS)]
    environment = {"OMP_NUM_THREADS": str(bench.args.threads), "HF_HUB_OFFLINE": "1"}
    room = bench.bytes(limit)
    memory = {"own": bench.own, "room": room}
    try:
        setup, files = setup_of(bench, limit, question, row, None if row.name == RESIDENT else room)

        def answered(command: Sequence[str]) -> dict[str, Any]:
            with Worker(command, environment, bench.args.timeout) as worker:
                cell = converse(bench, worker, setup, question, row, round_)
                return {**cell, **memory, "peak": worker.peak_memory()}

        if row.name == RESIDENT:
            return answered(command)
        with memory_group(bench.own + room) as group:
            for file in files:
                forget(file)
            return {**answered(group.inside(command)), "kills": group.oom_kills()}
    except NoGroupError as error:
        return {"error": f"not run: {error}"}
    except (WorkerError, WeightsError, ValueError, OSError) as error:
        return {"error": str(error)}


def setup_of(
    bench: Bench, limit: Limit, question: Question, row: Row, room: int | None
) -> tuple[dict[str, Any], list[Path]]:
    """Return the child's first message and the files it reads; `room` is None for the resident run."""
    options = dict(row.options)
    model = {"folder": bench.folder, "bf16": bench.gguf}.get(row.form)
    model = model or bench.home.weights(bench.gguf, row.form)
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
    versions = worker.ask(setup)["versions"]
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
    busy = max(worker.busy_elsewhere() - busy, 0.0) / (time.perf_counter() - measured)
    return {"answers": answers, "groups": groups, "versions": versions, "busy_elsewhere": busy}


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
    law = {"temperature": question.temperature, "max_tokens": max_tokens, "ignore_eos": True}
    params = [
        {**law, "seed": number, "cache_salt": salt}
        | ({"prediction": prompt.prediction} if row.predicts else {})
        for number, prompt in batch
    ]
    return worker.ask({"prompts": [prompt.tokens for _, prompt in batch], "params": params})


def timed(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return tokens, seconds and passes after the first token of all prompts."""
    first = max(answer["arrivals"][0][0] for answer in answers)
    later = [[(at, n) for at, n in answer["arrivals"] if at > first] for answer in answers]
    everything = [arrival for arrivals in later for arrival in arrivals]
    return {
        "tokens": sum(n for _, n in everything),
        "seconds": max((at for at, _ in everything), default=first) - first,
        "passes": max(len(arrivals) for arrivals in later),
    }


def forget(file: Path) -> None:
    """Drop a file's pages from the cache, so that reading them counts for the reader's limit."""
    if hasattr(os, "posix_fadvise"):
        number = os.open(file, os.O_RDONLY)
        os.fdatasync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)
