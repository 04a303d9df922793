"""Latency on several processes and nodes: incremental, sequence and tree decoding, and other engines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import get_context
from operator import truediv
from statistics import median
from typing import Any, Final

import psutil

from benchmarks.machines.two_nodes import MASTER, NoNodesError, enter, follower, two_nodes
from benchmarks.paper.lab import Lab
from benchmarks.paper.plots import INK, bars
from benchmarks.paper.question import Cells, Figure, Figures, Verdict
from benchmarks.study import ask, digest, shown, span, table, total_figures, without_speculation
from specinfer import LLM, RequestOutput, SamplingParams
from specinfer.errors import UserError
from specinfer.tree.token_tree import Expansion

ASKS: Final = "How fast are several processes and nodes, beside one and beside other engines?"
_LAYOUTS: Final = {  # ranks per layer and stages, and the Mbit/s between two nodes with a rank each
    "1x1": "one core",
    "2x1": "two ranks",
    "1x2": "two stages",
    "1x2@1000": "two stages, 1 Gbit/s between",
    "2x1@1000": "two ranks, 1 Gbit/s between",
}
_CHAIN: Final = Expansion((1, 1, 1, 1, 1, 1, 1, 1))
# "sized": the part that is fastest on this machine. A sized tree has a learned shape.
_MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "sequence": {"expansion": _CHAIN, "tree_size": "fixed"},
    "tree": {"expansion": Expansion((1, 1, 3, 1, 1, 1, 1, 1)), "tree_size": "fixed"},
    "sized sequence": {"expansion": _CHAIN},
    "sized tree": {},
}
_INCREMENTAL: Final = "incremental"
_FOLLOWER: Final = "specinfer.parallel.follower"
# A key is LAYOUT, or LAYOUT,RUN for a run of older pages, whose machine is not this one.
_RUNS: Final = {
    **{"zen5": [*_LAYOUTS][:3], "zen5-1gbit": [*_LAYOUTS], "zen4": [*_LAYOUTS]},
    **{"vllm": ["1x1", "2x1"], "llama.cpp": ["1x1", "1x2@1000"]},
}
_PEERS: Final = {"vllm": "vLLM in bfloat16, two cores", "llama.cpp": "llama.cpp in Q4_K_M, RPC"}
_PAPER: Final = {"one node": 1.5, "two nodes": 2.4, "tree over sequence": 1.2}  # the least it reports


def keys(lab: Lab) -> list[str]:
    older = [f"{layout},{run}" for run, layouts in _RUNS.items() for layout in layouts]
    return lab.pick(full=[*_LAYOUTS][:4] + older, quick=["1x1", "2x1"], toy=["1x1", "1x2"])


def measure(lab: Lab, key: str) -> Figures:
    """Return the figures of a process on core 0 with the draft, whose followers have cores 1, 2, ...

    Each has one kernel thread. Nodes are network namespaces.
    """
    layout, _, run = key.partition(",")
    if run:
        raise UserError("it was measured by an older commit, or needs another engine's network")
    sizes, _, mbit = layout.partition("@")
    tensor, stages = map(int, sizes.split("x"))
    cores = sorted(os.sched_getaffinity(0))
    if tensor * stages > len(cores):
        raise NoNodesError(f"{tensor * stages} ranks need a core each, there are {len(cores)}")
    options: dict[str, Any] = {"tensor_parallel": tensor, "pipeline_parallel": stages}
    lab.elsewhere(lab.target, lab.draft)
    with ExitStack() as stack:
        node = None
        if mbit:
            nodes = stack.enter_context(two_nodes(int(mbit)))
            stack.enter_context(follower(nodes, lab.target, cores[1]))
            node = nodes.here
            options |= {"master": MASTER, "key_file": nodes.key_file}
        started = ProcessPoolExecutor(1, get_context("spawn"), _place, (node, cores[0]))
        pool = stack.enter_context(started)
        return pool.submit(_measure, lab, options, cores).result()


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
                with suppress(psutil.Error):  # it has ended
                    if child.pid not in known and _FOLLOWER in child.cmdline():
                        known.append(child.pid)
                        child.cpu_affinity([cores[len(known) % len(cores)]])

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        done.set()
        watching.join()


def _measure(lab: Lab, layout: Mapping[str, Any], cores: Sequence[int]) -> Figures:
    """Return speeds and gains by batch size, and a digest of all texts; `layout` has its options."""
    batches = lab.pick(full=(1, 4, 16), quick=(1, 4), toy=(1, 2))
    alone, tokens, rounds = lab.pick(full=(3, 32, 2), quick=(2, 16, 1), toy=(1, 8, 1))
    questions = lab.questions("Alpaca", batches[-1])
    with _pinned(cores):
        llm = LLM(
            lab.target,
            drafts=(lab.draft,),
            quantization="int8",
            draft_quantization="int4",
            threads=1,
            prefix_reuse=False,
            lookup=False,
            max_batch_size=batches[-1],
            max_context=1024,
            **layout,
        )
    with ExitStack() as stack:
        stack.enter_context(llm)
        modes = {_INCREMENTAL: without_speculation(llm)}
        modes |= {name: llm.variant(**mode) for name, mode in _MODES.items()}
        for mode in modes.values():
            stack.enter_context(mode)
            _answered(mode, questions, batches[-1], 4)  # everything is warm
        found: dict[str, Any] = {}
        texts: dict[int, set[str]] = {}
        for batch in batches:
            asked = questions[: max(batch, alone)]
            speeds: dict[str, list[float]] = {name: [] for name in modes}
            steps: dict[str, float] = {}
            for number in range(rounds):
                for name in [*modes] if number % 2 == 0 else [*reversed(modes)]:
                    speed, outputs = _answered(modes[name], asked, batch, tokens)
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


def page(cells: Cells) -> list[str]:
    rows = []
    for key, batch, one in _ours(cells):
        layout, _, run = key.partition(",")
        gains, speed = one["gains"], f"{one['tokens_per_s']:.1f}"
        figures = *(gains.get(mode) for mode in _MODES), *_ratios(gains)
        rows.append((_LAYOUTS[layout], run or "new", batch, speed, _over(cells, key, batch), *shown(figures)))
    peers = [
        (
            *(engine, _LAYOUTS[key.partition(",")[0]], batch, f"{figures['tokens_per_s']:.1f}"),
            *(_over(cells, key, batch), figures.get("equal_texts", "")),
        )
        for name, engine in _PEERS.items()
        for key, cell in cells.items()
        if key.endswith(f",{name}")
        for batch, figures in cell["batches"].items()
    ]
    other = "other engines | layout | batch | tokens/s | over one process | texts as one process's"
    texts = [cell["texts"] for cell in cells.values() if "texts" in cell]
    same = all(each == texts[0] and all(len(one) == 1 for one in each.values()) for each in texts)
    return [
        "A rank or stage is a process with one core. A node is a network namespace. Each gain is the speed "
        "with guesses over that without, in the same run. A *sequence* has eight guesses, the paper's *tree* "
        "eight levels with three branches at the third. *Sized* ones are cut by the cost of a pass, and a "
        "sized tree has a learned shape. Runs with a name are of older pages: an AMD Zen 4 or Zen 5, weights "
        "in int8, a draft in int4. All but vLLM's leave out the reading of prompts.",
        *table(
            f"layout | run | batch | incremental, tokens/s | over one core | {' | '.join(_MODES)} | "
            "tree over sequence | the same, sized",
            rows,
        ),
        *(table(other, peers) if peers else []),
        *_eight_gpus(cells),
        "The paper has gains of 1.5 to 2.5 on one node, 2.4 to 2.8 over two, and 1.2 to 1.5 for trees over "
        f"sequences. Here the best kind of guesses has, at batch 1, {_listed(_gains(cells))}."
        + (f" Texts of all layouts and kinds {'are' if same else 'are not all'} the same." if texts else ""),
    ]


def plot(cells: Cells, figure: Figure) -> None:
    axes = figure.subplots()
    found = {key: cell["gains"] for key, batch, cell in _ours(cells) if batch == "1"}
    names = [key.replace(",", "\n").replace("@1000", "\n1 Gb/s").replace("-", "\n") for key in found]
    bars(axes, names, {mode: [gains.get(mode, 0) for gains in found.values()] for mode in _MODES})
    axes.axhline(1, linewidth=0.8, color=INK)
    axes.tick_params(axis="x", labelsize=6)
    axes.set(ylabel="speed over incremental decoding")


def verdict(cells: Cells) -> Verdict:
    found = _gains(cells)
    below = [f"{name} {min(each):.2f}" for name, each in found.items() if min(each) < _PAPER[name]]
    against = f"less than its least: {', '.join(below)}; on CPUs, with a draft of a third of the target"
    paper = "1.5 to 2.5 (one node), 2.4 to 2.8 (two nodes), 1.2 to 1.5 (tree over sequence)"
    return Verdict(_listed(found), paper, "reproduced", against if below else "" if found else "not measured")


def _ours(cells: Cells) -> Iterator[tuple[str, str, Figures]]:
    """Yield key, batch and figures of cells with guesses."""
    for key, cell in cells.items():
        for batch, figures in cell["batches"].items():
            if "gains" in figures:
                yield key, batch, figures


def _over(cells: Cells, key: str, batch: str) -> str:
    """Return a layout's speed over that of one process in the same run."""
    _, comma, run = key.partition(",")
    one = cells.get(f"1x1{comma}{run}", {"batches": {}})["batches"].get(batch)
    return f"{cells[key]['batches'][batch]['tokens_per_s'] / one['tokens_per_s']:.2f}" if one else ""


def _gains(cells: Cells) -> Mapping[str, list[float]]:
    """Return the best gain of each layout at batch 1, and of trees over sequences, fixed or sized."""
    found: dict[str, list[float]] = {name: [] for name in _PAPER}
    for key, batch, figures in _ours(cells):
        if batch == "1":
            found["two nodes" if "@" in key else "one node"].append(max(figures["gains"].values()))
            ratios = [ratio for ratio in _ratios(figures["gains"]) if ratio]
            found["tree over sequence"] += [max(ratios)] if ratios else []
    return {name: each for name, each in found.items() if each}


def _ratios(gains: Mapping[str, float]) -> list[float | None]:
    """Return the speed of trees over that of sequences, fixed and sized; None if it was not measured."""
    pairs = [("tree", "sequence"), ("sized tree", "sized sequence")]
    return [gains[a] / gains[b] if a in gains and b in gains else None for a, b in pairs]


def _listed(found: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(f"{span(each, 2)} ({name})" for name, each in found.items())


def _eight_gpus(cells: Cells) -> list[str]:
    """Return the lines of a model of eight H100; only the tokens per step are measured."""
    one: Mapping[str, Any] = cells.get("1x1", {"batches": {}})["batches"].get("1", {})

    def pass_ms(rows: int) -> float:
        computing = max(140e9 / 8 / 2.7e12, rows * 140e9 / 8 / 400e12)  # two FLOPs for two bytes
        return 1e3 * (computing + 160 * (12e-6 + rows * 8192 * 4 * 1.75 / 225e9))

    lines = []
    for name, rows in (("sequence", 9), ("tree", 21)):
        step = pass_ms(rows) + 8 * (2e9 / 2.7e9 + 0.15) + 2
        if tokens := one.get("tokens_per_step", {}).get(name):
            figures = *shown([step], 1), *shown([step / pass_ms(1), tokens, tokens * pass_ms(1) / step])
            lines.append((name, *figures))
    model = [
        "This is a model, not a measurement: 70 billion parameters in bfloat16 on eight H100. Each reads "
        "2.7 TB/s and computes 400 TFLOP/s; a layer has two exchanges of 12 us and their bytes at 225 GB/s. "
        "A step has eight passes of a draft of a billion parameters, each 0.15 ms and the reading of its "
        "weights, and 2 ms of Python. One token "
        f"without guesses takes {pass_ms(1):.1f} ms. The gain holds if that draft agrees as often as ours.",
        *table("guesses | ms a step | tokens a step that pay | measured here, one core | gain", lines),
    ]
    return model if lines else []
