"""Engines that answer under a memory limit: rows of a cell, whose passes read the rest from the disk.

Every engine is a child in a memory cgroup. Before it runs, the pages of its files are dropped from the cache,
so that its reads count for its limit. Only the resident run, whose texts are the reference, has unlimited
memory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.machines.memory_group import memory_group
from benchmarks.offload.dithered import dithered
from benchmarks.peers.engines import INSTALL, OURS, Home, WeightsError, default_home, script_of
from benchmarks.peers.process import Worker
from specinfer.hub import resolve
from specinfer.models.open_model import open_model
from specinfer.tokenizer import ChatEncoder, Tokenizer

_BYTES: Final = 2  # of a weight in bfloat16
_GUESSES: Final = 16  # length of a peer's chain; a pass takes seconds, so it may be long
_PEER_TOKENS: Final = 24  # of a peer's answer
_TREE_ROOM: Final = 64  # KV slots beyond prompt and answer, for rejected nodes
_ASSISTANCE: Final = {
    "num_assistant_tokens": _GUESSES,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine in one mode."""

    peer: str | None = None  # engines.script_of has the names; None: specinfer
    draft: str | None = None  # form of the small model, see Home.weights
    options: Mapping[str, Any] = field(default_factory=dict)


# Incremental has one-node trees: no draft, no `offload="auto"` copy of the target, no lookups.
ROWS: Final[Mapping[str, Row]] = {
    "incremental": Row(options={"lookup": False, "max_nodes": 1}),
    "self": Row(options={"drafts": ["self"], "draft_quantization": "int4", "lookup": False}),
    "small": Row(draft="file", options={"draft_quantization": "int4", "lookup": False}),
    "auto": Row(),
    "llama.cpp": Row(peer="llama_cpp"),
    "llama.cpp + small": Row(peer="llama_cpp", draft="file", options={"draft_tokens": _GUESSES}),
    "accelerate": Row(peer="transformers"),
    "accelerate + small": Row(peer="transformers", draft="safetensors", options={"assistance": _ASSISTANCE}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Answers under a limit: `share` of the model's bytes and `spare` beyond the memory of Python itself."""

    model: str  # a GGUF file is dithered first (dithered.py)
    draft: str
    questions: Sequence[str]
    temperature: float
    max_tokens: int
    rounds: int  # in which the questions are dealt out; a peer answers one of each
    share: float
    spare: int
    limited: bool  # False: no cgroup enforces the limit

    def answered(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the figures of these ROWS, the incremental one first.

        Raises WorkerError for an engine that cannot run, WeightsError for a model that it cannot read, and
        NoGroupError.
        """
        source = Path(self.model)
        gguf, folder = dithered(source, source.parent) if source.suffix == ".gguf" else (source, source)
        files = resolve(str(folder))
        encoder = ChatEncoder(Tokenizer.load(files))
        prompts = [encoder.token_ids([{"role": "user", "content": one}]) for one in self.questions]
        context = max(map(len, prompts)) + self.max_tokens + _TREE_ROOM
        weights = sum(shape[0] * shape[1] for shape in open_model(files).shapes.values() if len(shape) == 2)
        with Worker([sys.executable, *script_of(OURS)], {}, 120) as worker:
            limit = worker.ask({"model": None})["own"] + int(self.share * _BYTES * weights) + self.spare
        known = self._run(ROWS["incremental"], None, folder, prompts, context)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for number in range(self.rounds):
            dealt = [*range(number, len(prompts), self.rounds)]
            for name in names if number % 2 == 0 else reversed(names):
                row = ROWS[name]
                asked = [prompts[at] for at in (dealt[:1] if row.peer else dealt)]
                model = gguf if row.peer == "llama_cpp" else folder
                found[name].append(self._run(row, limit, model, asked, context))
                length = self._length(row)
                texts = zip(found[name][-1].pop("texts"), dealt, strict=False)
                same = [text == known["texts"][at][:length] for text, at in texts]
                found[name][-1] |= {"same": sum(same), "texts": len(same)}
        plain = [one["tokens_per_s"] for one in found[names[0]]]
        return {name: _figures(each, plain) for name, each in found.items()}

    def _run(
        self, row: Row, limit: int | None, model: Path, prompts: Sequence[Sequence[int]], context: int
    ) -> dict[str, Any]:
        """Return the texts and figures of one row's answers; without a limit it is resident."""
        home = Home(default_home())
        python = Path(sys.executable) if row.peer is None else home.python(row.peer)
        if not python.exists():
            raise WeightsError(f"{row.peer} is not installed; {INSTALL}")
        draft = None if row.draft is None else home.weights(resolve(self.draft).path, row.draft)
        options = dict(row.options)
        if row.peer is None:
            options |= {"quantization": "none", "dtype": "bfloat16", "max_batch_size": 1}
            options |= {"max_context": context, "prefix_reuse": False}
            options |= {} if draft is None else {"drafts": [str(draft)]}
            options |= {} if limit is None else {"offload": "auto", "memory": limit}
        elif row.peer == "transformers":
            options["memory"] = limit
        setup = {"model": str(model), "draft": draft and str(draft), "context": context, "options": options}
        command, threads = [str(python), *script_of(row.peer or OURS)], len(os.sched_getaffinity(0))
        environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        with ExitStack() as stack:
            if limit is not None and self.limited:
                command = stack.enter_context(memory_group(limit)).inside(command)
            for path in (model,) if draft is None else (model, draft):
                for file in path.glob("*.safetensors") if path.is_dir() else [path]:
                    _forget(file)
            worker = stack.enter_context(Worker(command, environment, 1800))
            worker.ask({**setup, "threads": threads})
            self._answer(worker, row, prompts[0], 2)  # everything is warm
            replies = [self._answer(worker, row, prompt, self._length(row)) for prompt in prompts]
        later = [reply["answers"][0]["arrivals"] for reply in replies]
        steps = sum(len(arrivals) - 1 for arrivals in later)
        tokens = sum(count for arrivals in later for _, count in arrivals[1:])
        streamed, passes = (
            sum(reply.get("counted", {}).get(name, 0) for reply in replies)
            for name in ("streamed_bytes", "steps")
        )
        return {
            "texts": [reply["answers"][0]["tokens"] for reply in replies],
            "tokens_per_s": tokens / sum(arrivals[-1][0] - arrivals[0][0] for arrivals in later),
            "tokens_per_pass": tokens / steps,
            "mb_per_pass": streamed / max(1, passes) / 1e6,
        }

    def _length(self, row: Row) -> int:
        return min(self.max_tokens, _PEER_TOKENS) if row.peer else self.max_tokens

    def _answer(self, worker: Worker, row: Row, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        if row.peer is not None:
            return {"answers": [worker.ask({"prompt": prompt, "max_tokens": max_tokens})]}
        law = {"temperature": self.temperature, "max_tokens": max_tokens, "ignore_eos": True, "seed": 0}
        return worker.ask({"prompts": [prompt], "params": [law]})


def _figures(rounds: Sequence[Mapping[str, Any]], plain: Sequence[float]) -> dict[str, Any]:
    """Return medians over rounds, with the gain over incremental decoding in the same round."""
    found = {
        name: median(one[name] for one in rounds)
        for name in ("tokens_per_s", "tokens_per_pass", "mb_per_pass")
    }
    gain = median(one["tokens_per_s"] / speed for one, speed in zip(rounds, plain, strict=True))
    texts = {name: sum(one[name] for one in rounds) for name in ("same", "texts")}
    return {**found, "gain": gain, **texts}


def _forget(file: Path) -> None:
    """Drop a file's pages from the cache, so that reading them counts for the reader's limit."""
    number = os.open(file, os.O_RDONLY)
    os.fdatasync(number)
    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(number)
