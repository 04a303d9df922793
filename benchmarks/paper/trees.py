"""Memory and latency of trees of 1 to 128 nodes."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.paper.lab import Lab
from benchmarks.paper.passes import BLOCK, binary, filled_runner, medians, profiled, tree_rows
from benchmarks.paper.question import Cells, Figures, Question, Verdict
from benchmarks.study import row
from specinfer.config import EngineConfig
from specinfer.engine.models import load_models
from specinfer.kernels.machine import release_free_memory
from specinfer.runtime.kv_cache import bytes_per_block, process_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
            "peak_bytes": max(0, _peak() - before),
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


def _peak() -> int:
    """Return the most bytes that this process had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def page(cells: Cells) -> list[str]:
    lines = [
        f"A pass over a binary tree behind {_TEXT} tokens of text, with the logits of all nodes. Peak: by "
        "how much the process grows over its size after a pass of one node, logits included. K and V are "
        "those of the tree's nodes, in the cache.",
        "",
        "| model | nodes | ms | over one node | per node | attention | K and V, MB | logits, MB | peak, MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, cell in _sorted(cells):
        for nodes, found in cell.items():
            ms, over = 1e3 * found["seconds"], found["seconds"] / cell["1"]["seconds"]
            sizes = [f"{found[kind] / 1e6:.1f}" for kind in ("kv_bytes", "logit_bytes", "peak_bytes")]
            times = f"{ms:.1f} | {over:.2f} | {ms / int(nodes):.2f}"
            lines.append(row(_MODELS[name], nodes, times, f"{found['attention']:.0%}", *sizes))
    largest = [(name, list(cell.items())[-1], cell["1"]) for name, cell in _sorted(cells)]
    costs = [
        f"a tree of {nodes} nodes takes {found['seconds'] / one['seconds']:.1f} times as long as one node "
        f"and {(found['kv_bytes'] + found['peak_bytes']) / 1e6:.0f} MB ({_MODELS[name]})"
        for name, (nodes, found), one in largest
    ]
    shares = [found["attention"] for _, cell in _sorted(cells) for found in cell.values()]
    return [
        *lines,
        "",
        f"On this machine {', '.join(costs)}. Attention takes {min(shares):.0%} to {max(shares):.0%} of the "
        "kernels' time.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    latency, memory = figure.subplots(1, 2)
    for name, cell in _sorted(cells):
        nodes = [int(count) for count in cell]
        times = [one["seconds"] / cell["1"]["seconds"] for one in cell.values()]
        latency.plot(nodes, times, marker="o", label=_MODELS[name])
        memory.plot(nodes, [(one["kv_bytes"] + one["peak_bytes"]) / 1e6 for one in cell.values()], marker="o")
    latency.set(xlabel="nodes", ylabel="time of a pass over one node's")
    memory.set(xlabel="nodes", ylabel="memory of a tree, MB")
    latency.legend(fontsize=8)


def verdict(cells: Cells) -> Verdict:
    ours = [
        f"{_MODELS[name]}: "
        + ", ".join(f"{cell[str(n)]['seconds'] / cell['1']['seconds']:.1f}" for n in _ASKED if str(n) in cell)
        for name, cell in _sorted(cells)
    ]
    sizes = ", ".join(map(str, _ASKED))
    return Verdict(paper="-", ours=f"passes of {sizes} nodes over one: {'; '.join(ours)}", outcome="new")


def _sorted(cells: Cells) -> list[tuple[str, Figures]]:
    return [(name, cells[name]) for name in _MODELS if name in cells]


QUESTION: Final = Question(
    name="trees",
    asks="What do trees of 32, 64 and 128 nodes cost?",
    keys=keys,
    measure=measure,
    page=page,
    plot=plot,
    verdict=verdict,
)
