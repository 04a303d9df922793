"""Table 2 of the paper: tokens per step by tree width, and how many guesses a step accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from math import nan
from statistics import fmean
from typing import Any, Final

from benchmarks.paper.lab import DATASETS, Lab, answer, ranks
from benchmarks.paper.plots import lines
from benchmarks.paper.question import Cells, Figure, Figures, Verdict
from benchmarks.study import shown, table
from specinfer.tree.token_tree import Expansion

ASKS: Final = "How many tokens does a step yield, by tree width?"
_WIDTHS: Final = ("1", "2", "3", "4", "5")  # at the third level
_PAPER: Final[Mapping[str, Mapping[str, Sequence[float]]]] = {  # LLaMA-7B with a draft of 68M
    "greedy": {
        "Alpaca": (2.95, 3.07, 3.21, 3.33, 3.43),
        "CP": (2.58, 3.24, 3.46, 3.59, 3.69),
        "WebQA": (2.27, 2.69, 2.86, 2.98, 3.07),
        "CIP": (2.73, 3.40, 3.62, 3.79, 3.91),
        "PIQA": (2.18, 2.80, 2.97, 3.10, 3.21),
    },
    "stochastic": {
        "Alpaca": (1.79, 2.11, 2.26, 2.32, 2.38),
        "CP": (1.69, 1.99, 2.15, 2.23, 2.28),
        "WebQA": (1.64, 1.93, 2.08, 2.15, 2.21),
        "CIP": (1.72, 2.05, 2.19, 2.28, 2.29),
        "PIQA": (1.67, 1.93, 2.08, 2.15, 2.21),
    },
}
MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {"temperature": 0.0, "verifier": "coupled"},
    "coupled": {"temperature": 1.0, "verifier": "coupled"},
    "mss": {"temperature": 1.0, "verifier": "mss"},
}
LAW: Final = {"greedy": "greedy", "coupled": "stochastic", "mss": "stochastic"}
_FIXED: Final = "fixed"  # eight levels, with the branches at the third
_COST: Final = "cost"  # trees of a learned shape, sized by the cost of a pass


def keys(lab: Lab) -> list[str]:
    # Sizes by cost come first: they need a quiet machine.
    return [f"{name},{mode},{size}" for size in (_COST, _FIXED) for name in lab.datasets() for mode in MODES]


def measure(lab: Lab, key: str) -> Figures:
    name, mode, size = key.split(",")
    fixed, law = size == _FIXED, MODES[mode]
    shape: dict[str, Any] = {"tree_size": "cost", "max_batch_size": 1}
    shape = {"expansion": Expansion.parse("1,1,5,1,1,1,1,1")} if fixed else shape
    steps: list[list[int]] = []  # ranks of the accepted guesses
    questions = lab.questions(name, lab.pick(full=6 if fixed else 8, quick=3, toy=1))
    limit = lab.pick(full=64, quick=24, toy=8)
    with lab.llm(lab.target, [lab.draft], verifier=law["verifier"], **shape) as llm:
        llm.on_tree = lambda event: steps.extend([ranks(event)][: event.tree.num_nodes - 1])
        figures = answer(llm, questions, temperature=law["temperature"], max_tokens=limit)

    def accepted(width: str) -> list[int]:  # a narrower tree is a part of the widest
        cut = 9 if width == _COST else int(width)
        each = [2 if len(taken) > 2 and taken[2] >= cut else len(taken) for taken in steps]
        each += [0] * (figures.steps - len(steps))  # without guesses
        return [each.count(n) for n in range(max(each, default=0) + 1)]

    return {
        "nodes_per_step": figures.drafted_tokens / max(1, figures.steps),
        # By width: the number of steps that accept 0, 1, ... guesses.
        "steps": {width: accepted(width) for width in (_WIDTHS if fixed else (_COST,))},
    }


def page(cells: Cells) -> list[str]:
    rows: list[Sequence[object]] = []
    for name, mode in [(name, mode) for name in DATASETS for mode in MODES]:
        ours = [_tokens(cells, name, mode, width) for width in (*_WIDTHS, _COST)]
        if any(one > 0 for one in ours):
            rows.append((name, f"{mode}, ours", *shown(ours)))
            rows.append((name, f"{LAW[mode]}, paper", *shown(_PAPER[LAW[mode]][name]), ""))
    held = _held(cells)
    gains = [f"{mean['5'] / mean['1']:.2f} ({mode})" for mode in MODES if (mean := _means(cells, mode))]
    papers = [f"{_papers(law)['5'] / _papers(law)['1']:.2f} ({law})" for law in _PAPER]
    return [
        "Tokens per step. A step verifies a tree of the draft's guesses: eight levels, with `w` branches at "
        "the third. A narrower tree is a part of the widest, so its figure is the mean over the steps "
        "of the run with five branches. The last column has the default: trees sized by the cost of a pass, "
        "of a learned shape unless their guesses are sampled (`mss`).",
        *table("data set |  | w = 1 | 2 | 3 | 4 | 5 | by cost", rows),
        f"{sum(held)} of {len(held)} figures are at or above the paper's. Five branches yield "
        f"{', '.join(gains)} times the tokens of one; in the paper {', '.join(papers)}.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    widths, accepted = figure.subplots(1, 2)
    lines(widths, {mode: _means(cells, mode) for mode in MODES})
    lines(widths, {f"{law}, paper": _papers(law) for law in _PAPER}, linestyle=":", marker=".")
    for mode in MODES:
        # For 0, 1, ... accepted guesses, the share of steps that accept at most as many at width 5.
        found = [cell["steps"]["5"] for key, cell in cells.items() if key.endswith(f",{mode},{_FIXED}")]
        counts = [sum(each) for each in zip_longest(*found, fillvalue=0)]
        shares = [total / sum(counts) for total in accumulate(counts)]
        accepted.step(range(len(shares)), shares, where="post", label=mode)
    widths.set(xlabel="tree width", ylabel="tokens per step")
    accepted.set(xlabel="accepted guesses in a step, at most", ylabel="share of steps", ylim=(0, 1))


def verdict(cells: Cells) -> Verdict:
    held = _held(cells)
    ours = [f"{means['5']:.2f} {mode}" for mode in MODES if (means := _means(cells, mode))]
    against = f"{held.count(False)} of {len(held)} figures are below the paper's" if False in held else ""
    against = against if held else "not measured"
    return Verdict(", ".join(ours), "3.46 tokens a step greedy, 2.27 sampled, width 5", "surpassed", against)


def _tokens(cells: Cells, name: str, mode: str, width: str) -> float:
    """Return the tokens per step; nan without a cell."""
    cell = cells.get(f"{name},{mode},{_COST if width == _COST else _FIXED}")
    steps: list[int] = cell["steps"][width] if cell else []
    return 1 + sum(n * count for n, count in enumerate(steps)) / sum(steps) if any(steps) else nan


def _papers(law: str) -> dict[str, float]:
    """Return the paper's mean over the data sets, by width."""
    return {width: fmean(each) for width, *each in zip(_WIDTHS, *_PAPER[law].values(), strict=True)}


def _means(cells: Cells, mode: str) -> dict[str, float]:
    """Return the mean tokens per step over the data sets, by width; empty without cells."""
    found = {width: [_tokens(cells, name, mode, width) for name in DATASETS] for width in _WIDTHS}
    known = {width: [one for one in each if one > 0] for width, each in found.items()}
    return {width: fmean(each) for width, each in known.items() if each}


def _held(cells: Cells) -> list[bool]:
    """Return for each figure that was measured whether it reaches the paper's."""
    return [
        round(ours, 2) >= paper
        for mode, law in LAW.items()
        for name, papers in _PAPER[law].items()
        for width, paper in zip(_WIDTHS, papers, strict=True)
        if (ours := _tokens(cells, name, mode, width)) > 0
    ]
