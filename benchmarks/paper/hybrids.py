"""What does a tree cost a hybrid of attention and recurrent states?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast

import torch

from benchmarks.machines.hybrids import CPU, GUESSED, PROMPT, RIGHT, TEXT, guesses, passes, write_models
from benchmarks.machines.random_hybrids import SHAPES, TOY
from benchmarks.paper.lab import Lab
from benchmarks.paper.question import Cells, Figure, Figures, NotHereError, Verdict
from benchmarks.study import shown, table
from specinfer.engine.hardware import use_threads
from specinfer.kernels.choice import choose_kernels
from specinfer.kernels.disk import Bandwidth
from specinfer.speculation_config import Quantization

ASKS: Final = "What does a tree cost a model with recurrent states?"
_GUESSES: Final = "guesses"
_SHAPES: Final = {**SHAPES, "toy": TOY}


def keys(lab: Lab) -> Sequence[str]:
    names = lab.pick(full=[*SHAPES], quick=["Qwen3.5-0.8B"], toy=["toy"])
    kinds = lab.pick(full=["int4", "none", _GUESSES], quick=["int4", _GUESSES], toy=["int4", _GUESSES])
    return [f"{name},{kind}" for name in names for kind in kinds]


def measure(lab: Lab, key: str) -> Figures:
    name, kind = key.split(",")
    lab.elsewhere("random weights")
    kernels, why = choose_kernels("native", CPU)
    if kernels.library is None:
        raise NotHereError(f"native kernels are needed: {why}")
    torch.set_num_threads(use_threads(None, kernels))
    with TemporaryDirectory() as made:
        model, draft = _SHAPES[name]
        if kind == _GUESSES:
            write_models(Path(made), model=model, draft=draft)
            return guesses(Path(made), kernels, lab.pick(full=3, quick=1, toy=1))
        write_models(Path(made), model=model, plain=model.plain)
        return passes(Path(made), cast(Quantization, kind), kernels, Bandwidth(kernels.library))


def page(cells: Cells) -> list[str]:
    rows, guessed = [], []
    for key, cell in _passes(cells).items():
        one, tree, prompt = cell["nodes"]["1"], cell["nodes"]["16"], cell["prompt"]
        share = prompt["seconds"] / (prompt["seconds"] - prompt["recurrences"])
        figures = one["floor"], *_over_one(cell), tree["recurrence"], share
        rows.append((*key.replace("none", "bfloat16").split(","), f"{one['ms']:.1f}", *shown(figures)))
    for name, cell in _guesses(cells).items():
        names = ("fixed_tokens", "fixed_gain", "cost_tokens", "cost_gain", "control")
        guessed.append((name, *shown(cell[one] for one in names), "same" if cell["same"] else "DIFFERENT"))
    return [
        f"Shapes of published models with random weights. A pass runs behind {TEXT} tokens; its floor is the "
        f"memory's time for one node. A plain model attends in every layer; a prompt has {PROMPT:,} tokens.",
        *table(
            "shape | weights | one node, ms | over its floor | 16 nodes over one | plain model "
            "| recurrences, ms | prompt over one without them",
            rows,
        ),
        f"Greedy answers in int4, one at a time. The draft is a smaller hybrid, right at {RIGHT:.0%} of all "
        f"positions; its trees are {GUESSED}, or sized by cost.",
        *table("shape | tokens per step | over none | by cost | over none | none over none | texts", guessed),
        f"{_said(cells)}.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    axes = figure.subplots()
    for number, (key, cell) in enumerate(_passes(cells, "int4").items()):
        nodes = [int(count) for count in cell["nodes"]]
        for kind, style in (("ms", "-"), ("plain", ":")):
            times = [at[kind] / cell["nodes"]["1"][kind] for at in cell["nodes"].values()]
            name = key.split(",")[0] + (", plain" if kind == "plain" else "")
            axes.plot(nodes, times, linestyle=style, marker="o", color=f"C{number}", label=name)
    axes.set(xlabel="nodes of a tree", ylabel="time of a pass over that of one node")
    axes.legend()


def verdict(cells: Cells) -> Verdict:
    return Verdict(_said(cells))


def _passes(cells: Cells, kind: str = "") -> dict[str, Figures]:
    return {key: cell for key, cell in cells.items() if "nodes" in cell and key.endswith(kind)}


def _guesses(cells: Cells) -> dict[str, Figures]:
    return {key.split(",")[0]: cell for key, cell in cells.items() if key.endswith(_GUESSES)}


def _over_one(cell: Figures) -> tuple[float, float]:
    """Return the time of 16 nodes over that of one, of the hybrid and of the plain model."""
    one, tree = cell["nodes"]["1"], cell["nodes"]["16"]
    return tree["ms"] / one["ms"], tree["plain"] / one["plain"]


def _said(cells: Cells) -> str:
    found = [_over_one(cell) for cell in _passes(cells, "int4").values()]
    gains = [cell["cost_gain"] for cell in _guesses(cells).values()]
    ratios = [
        f"{min(of):.2f} to {max(of):.2f} times one node of {what}"
        for what, of in zip(("a hybrid", "a plain model"), zip(*found, strict=True), strict=False)
    ]
    said = [f"In int4 a tree of 16 nodes takes {', '.join(ratios)}"] if ratios else []
    if gains:
        noise = max(abs(cell["control"] - 1) for cell in _guesses(cells).values())
        said.append(
            f"Guesses sized by cost gain {min(gains):.2f} to {max(gains):.2f} times; two runs without "
            f"guesses differ by up to {noise:.0%}"
        )
    return ". ".join(said)
