"""Memory and latency of trees of 1 to 128 nodes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from benchmarks.paper.lab import Lab
from benchmarks.paper.passes import BLOCK, binary, filled_runner, medians, profiled, tree_rows
from benchmarks.paper.plots import lines
from benchmarks.paper.question import Cells, Figure, Figures, Verdict
from benchmarks.peers.process import memory
from benchmarks.study import shown, table
from specinfer.config import EngineConfig
from specinfer.engine.models import load_models
from specinfer.kernels.machine import release_free_memory
from specinfer.runtime.kv_cache import bytes_per_block, process_bytes

ASKS: Final = "What do trees of 32, 64 and 128 nodes cost?"
_MODELS: Final = {"head": "SmolLM2-135M", "pair": "Qwen2.5-Coder-1.5B"}
_TEXT: Final = 512  # cached tokens before the trees
_ASKED: Final = (32, 64, 128)  # the sizes of the paper's experiment


def keys(lab: Lab) -> list[str]:
    return list(lab.pick(full=_MODELS, quick=_MODELS, toy={"head": ""}))


def measure(lab: Lab, key: str) -> Figures:
    """Return figures by number of nodes."""
    model = lab.target if key == "pair" else lab.small
    sizes = lab.pick(full=(1, 8, 16, *_ASKED), quick=(1, 8, 16, *_ASKED), toy=(1, 4))
    lab.elsewhere(model)
    # A new process, as memory that earlier passes used is not taken again.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_passes, model, sizes, lab.pick(full=9, quick=3, toy=1)).result()


def _passes(model: str, sizes: tuple[int, ...], rounds: int) -> dict[str, dict[str, float]]:
    target = load_models(EngineConfig.from_options(model, {})).target
    table = range(-(-(_TEXT + max(sizes)) // BLOCK))
    runner = filled_runner(target, len(table))
    kept = [(target.config, target.kernels.kv_dtype(target.dtype))]
    trees = {str(nodes): [tree_rows(_TEXT, table, binary(nodes))] for nodes in sizes}
    runner.forward(trees["1"])  # takes the memory that every pass needs
    release_free_memory()
    before = process_bytes()
    found: dict[str, dict[str, float]] = {}
    for name, rows in trees.items():
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again at the present size
        logits = runner.forward(rows)
        found[name] = {
            "peak_bytes": max(0, memory("VmHWM") - before),
            "logit_bytes": logits.nbytes,
            "kv_bytes": bytes_per_block(kept, int(name)),
        }
        del logits
        with profiled(target.kernels) as stages:
            runner.forward(rows)
        spent = sum(stages.values())
        found[name]["attention"] = stages["attention"] / spent if spent else 0
    calls = {name: (lambda rows=rows: runner.forward(rows)) for name, rows in trees.items()}
    for name, seconds in medians(calls, rounds).items():
        found[name]["seconds"] = seconds
    return found


def page(cells: Cells) -> list[str]:
    rows: list[Sequence[object]] = []
    costs, shares = [], []
    for name, cell in cells.items():
        for nodes, found in cell.items():
            over, ms = found["seconds"] / cell["1"]["seconds"], 1e3 * found["seconds"]
            sizes = shown((found[kind] / 1e6 for kind in ("kv_bytes", "logit_bytes", "peak_bytes")), 1)
            shares.append(found["attention"])
            times = f"{ms:.1f}", f"{over:.2f}", f"{ms / int(nodes):.2f}", f"{shares[-1]:.0%}"
            rows.append((_MODELS[name], nodes, *times, *sizes))
        costs.append(
            f"{over:.1f} times as long as one node and {_memory(found):.0f} MB "
            f"({_MODELS[name]}, {nodes} nodes)"
        )
    return [
        f"A pass over a binary tree behind {_TEXT} tokens of text, with the logits of all nodes. Peak: by "
        "how much the process grows over its size after a pass of one node, logits included. K and V are "
        "those of the tree's nodes, in the cache.",
        *table(
            "model | nodes | ms | over one node | per node | attention | K and V, MB | logits, MB | peak, MB",
            rows,
        ),
        f"The largest trees take {', '.join(costs)}. Attention takes {min(shares):.0%} to "
        f"{max(shares):.0%} of the kernels' time.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    latency, size = figure.subplots(1, 2)
    for name, cell in cells.items():
        times = {int(nodes): one["seconds"] / cell["1"]["seconds"] for nodes, one in cell.items()}
        lines(latency, {_MODELS[name]: times})
        lines(size, {_MODELS[name]: {int(nodes): _memory(one) for nodes, one in cell.items()}})
    latency.set(xlabel="nodes", ylabel="time of a pass over one node's")
    size.set(xlabel="nodes", ylabel="memory of a tree, MB")


def verdict(cells: Cells) -> Verdict:
    found = {
        name: [cell[str(n)]["seconds"] / cell["1"]["seconds"] for n in _ASKED if str(n) in cell]
        for name, cell in cells.items()
    }
    ours = "; ".join(f"{_MODELS[name]}: {', '.join(shown(each, 1))}" for name, each in found.items())
    return Verdict(f"passes of {', '.join(map(str, _ASKED))} nodes over one: {ours}")


def _memory(found: Figures) -> float:
    """Return the megabytes of a tree."""
    return float(found["kv_bytes"] + found["peak_bytes"]) / 1e6
