"""Ranks and stages of one core each: their speed without guesses, and with each kind of tree.

A layout is a process on core 0 with the draft, whose followers have cores 1, 2, ..., with one kernel thread
each. `apart(Layout.of("1x2@1000"), job)` has two nodes connected by a network (two_nodes.py).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from operator import truediv
from statistics import median
from typing import Any, Final

import psutil

from benchmarks.machines.two_nodes import MASTER, NoNodesError, enter, follower, two_nodes
from benchmarks.study import ask, digest, total_figures, without_speculation
from specinfer import LLM, RequestOutput, SamplingParams
from specinfer.tree.token_tree import Expansion

_INCREMENTAL: Final = "incremental"
_FOLLOWER: Final = "specinfer.parallel.follower"
_CHAIN: Final = Expansion((1, 1, 1, 1, 1, 1, 1, 1))
# "sized": the part that is fastest on this machine. A sized tree has a learned shape.
_KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "sized tree": {},
    "sized sequence": {"expansion": _CHAIN},
    "tree": {"expansion": Expansion((1, 1, 3, 1, 1, 1, 1, 1)), "tree_size": "fixed"},
    "sequence": {"expansion": _CHAIN, "tree_size": "fixed"},
}


@dataclass(frozen=True, slots=True)
class Layout:
    """The number of ranks per layer, and the number of stages."""

    tensor: int
    stages: int
    mbit: int  # network between two nodes with a rank each; 0: all on one node

    @classmethod
    def of(cls, text: str) -> Layout:
        """Parse `TPxPP` or `TPxPP@MBIT`."""
        sizes, _, mbit = text.partition("@")
        tensor, stages = map(int, sizes.split("x"))
        return cls(tensor, stages, int(mbit or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The answers that are measured: for each batch size, to as many questions and at least `alone`."""

    model: str
    draft: str
    questions: Sequence[str]
    batches: Sequence[int]
    alone: int
    max_tokens: int
    rounds: int


def apart(layout: Layout, job: Job) -> dict[str, Any]:
    """Measure a layout in another process; raises NoNodesError where it cannot run here."""
    cores = sorted(os.sched_getaffinity(0))
    if layout.tensor * layout.stages > len(cores):
        raise NoNodesError(f"{layout.tensor * layout.stages} ranks need a core each, there are {len(cores)}")
    with ExitStack() as stack:
        node, key_file = None, None
        if layout.mbit:
            nodes = stack.enter_context(two_nodes(layout.mbit))
            stack.enter_context(follower(nodes, job.model, cores[1]))
            node, key_file = nodes.here, nodes.key_file
        started = ProcessPoolExecutor(1, get_context("spawn"), _place, (node, cores[0]))
        pool = stack.enter_context(started)
        return pool.submit(_measure, layout, job, cores, key_file).result()


def _place(node: str | None, core: int) -> None:
    """Move this process to that core, and to that node."""
    if node is not None:
        enter(node)
    os.sched_setaffinity(0, {core})


@contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    """Give followers that start in the block the second of these cores, the third and so on."""
    done = threading.Event()

    def watch() -> None:
        known: list[int] = []
        while not done.wait(0.005):
            for child in psutil.Process().children():
                if child.pid not in known and _follows(child):
                    known.append(child.pid)
                    child.cpu_affinity([cores[len(known) % len(cores)]])

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()


def _follows(process: psutil.Process) -> bool:
    try:
        return _FOLLOWER in process.cmdline()
    except psutil.Error:
        return False


def _measure(layout: Layout, job: Job, cores: Sequence[int], key_file: str | None) -> dict[str, Any]:
    """Return speeds and gains by batch size, and a digest of all texts; a key means another node."""
    options: dict[str, Any] = {} if key_file is None else {"master": MASTER, "key_file": key_file}
    with _pinned(cores):
        llm = LLM(
            job.model,
            drafts=(job.draft,),
            quantization="int8",
            draft_quantization="int4",
            tensor_parallel=layout.tensor,
            pipeline_parallel=layout.stages,
            threads=1,
            prefix_reuse=False,
            lookup=False,
            max_batch_size=max(job.batches),
            max_context=1024,
            **options,
        )
    with ExitStack() as stack:
        stack.enter_context(llm)
        modes = {_INCREMENTAL: without_speculation(llm)}
        modes |= {name: llm.variant(**options) for name, options in _KINDS.items()}
        for mode in modes.values():
            stack.enter_context(mode)
            _answered(mode, job.questions, max(job.batches), 4)  # everything is warm
        found: dict[str, Any] = {}
        texts: dict[int, set[str]] = {}
        for batch in job.batches:
            asked = job.questions[: max(batch, job.alone)]
            speeds: dict[str, list[float]] = {name: [] for name in modes}
            steps: dict[str, float] = {}
            for number in range(job.rounds):
                for name in [*modes] if number % 2 == 0 else [*reversed(modes)]:
                    speed, outputs = _answered(modes[name], asked, batch, job.max_tokens)
                    speeds[name].append(speed)
                    steps[name] = total_figures(outputs).tokens_per_step
                    texts.setdefault(batch, set()).add(digest([one.token_ids for one in outputs]))
            plain = speeds.pop(_INCREMENTAL)
            found[str(batch)] = {
                "tokens_per_s": median(plain),
                "gains": {name: median(map(truediv, each, plain)) for name, each in speeds.items()},
                "tokens_per_step": {name: steps[name] for name in speeds},
            }
    return {"batches": found, "texts": {str(batch): sorted(each) for batch, each in texts.items()}}


def _answered(
    llm: LLM, questions: Sequence[str], batch: int, max_tokens: int
) -> tuple[float, list[RequestOutput]]:
    """Return tokens per second of these answers, the reading of prompts included, and the answers."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs: list[RequestOutput] = []
    began = time.perf_counter()
    for first in range(0, len(questions), batch):
        outputs += ask(llm, questions[first : first + batch], params)
    return sum(len(one.token_ids) for one in outputs) / (time.perf_counter() - began), outputs
