"""Table 1 of the paper: how often one of the draft's k first guesses is the target's token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from benchmarks.paper.lab import DATASETS, Lab, answer, ranks
from benchmarks.paper.plots import lines
from benchmarks.paper.question import Cells, Figure, Figures, Verdict
from benchmarks.paper.table2 import LAW, MODES
from benchmarks.study import shown, table
from specinfer.tree.token_tree import Expansion

ASKS: Final = "How often is one of the draft's first guesses right?"
_PAPER: Final[Mapping[str, Mapping[str, Sequence[int]]]] = {  # percent; LLaMA-7B with a draft of 68M
    "greedy": {
        "Alpaca": (68, 77, 81, 84, 85),
        "CP": (69, 79, 83, 86, 87),
        "WebQA": (62, 72, 77, 80, 82),
        "CIP": (70, 81, 85, 88, 89),
        "PIQA": (63, 75, 79, 83, 85),
    },
    "stochastic": {
        "Alpaca": (54, 81, 91, 95, 97),
        "CP": (56, 82, 92, 95, 97),
        "WebQA": (52, 80, 90, 94, 96),
        "CIP": (57, 84, 92, 95, 97),
        "PIQA": (55, 82, 91, 95, 97),
    },
}
PAIRS: Final = {"pair": "1.5B and 0.5B", "head": "SmolLM2's head"}
_MOST: Final = 5  # guesses


def keys(lab: Lab) -> list[str]:
    pairs = lab.pick(full=[*PAIRS], quick=[*PAIRS], toy=["pair"])
    return [f"{pair},{name},{mode}" for pair in pairs for name in lab.datasets() for mode in MODES]


def measure(lab: Lab, key: str) -> Figures:
    pair, name, mode = key.split(",")
    taken: list[int] = []  # the rank of each accepted guess; _MOST: a step accepted none
    questions = lab.questions(name, lab.pick(full={"pair": 8, "head": 16}[pair], quick=4, toy=1))
    law, limit = MODES[mode], lab.pick(full=64, quick=24, toy=8)
    with lab.llm(*lab.pair(pair), verifier=law["verifier"], expansion=Expansion((_MOST,))) as llm:
        llm.on_tree = lambda event: taken.extend((ranks(event) or [_MOST])[: event.tree.num_nodes - 1])
        answer(llm, questions, temperature=law["temperature"], max_tokens=limit)
    return {"taken": [taken.count(rank) for rank in range(_MOST)], "steps": len(taken)}


def page(cells: Cells) -> list[str]:
    rows: list[Sequence[object]] = []
    for name, mode in [(name, mode) for name in DATASETS for mode in MODES]:
        if found := _found(cells, mode, name):
            rows += [(name, f"{mode}, {PAIRS[pair]}", *shown(rates, 0)) for pair, [rates] in found.items()]
            rows.append((name, f"{LAW[mode]}, paper", *_PAPER[LAW[mode]][name]))
    counts = {law: _held(cells, law) for law in _PAPER}
    reached = [f"{sum(held)} of {len(held)} {law} rates" for law, held in counts.items()]
    return [
        "In percent of the steps. Every step has five guesses for one token: greedy, the draft's likeliest; "
        "sampled (T = 1), five draws without replacement for `mss`, or with the target's noise for "
        "`coupled`. The first k of them hold the accepted token this often.",
        *table("data set |  | k = 1 | 2 | 3 | 4 | 5", rows),
        f"The pair of language models reaches the paper's figure in {' and in '.join(reached)}. "
        "The paper's sampled rates of k > 1 are above its greedy ones; [Table 3](table3.md) has the "
        "exact rates of several rules.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    for axes, law in zip(figure.subplots(1, 2, sharey=True), _PAPER, strict=True):
        lines(axes, {"paper": _means([*_PAPER[law].values()])}, linestyle=":", marker=".")
        for mode in (mode for mode in MODES if LAW[mode] == law):
            found = {f"{mode}, {PAIRS[pair]}": _means(each) for pair, each in _found(cells, mode).items()}
            lines(axes, found)
        axes.set(xlabel=f"guesses, {law}", ylim=(0, 100))
    figure.axes[0].set_ylabel("percent of steps that accept one")


def verdict(cells: Cells) -> Verdict:
    laws = {law: held for law in _PAPER if (held := _held(cells, law))}
    means = _means(_found(cells, "greedy").get("pair", []))
    ours = " and ".join(f"{means[k]:.0f}%" for k in (1, _MOST) if means)
    below = [f"{held.count(False)} of {len(held)} ({law})" for law, held in laws.items() if False in held]
    against = f"below the paper's rates: {', '.join(below)}; its stochastic ones exceed its greedy ones"
    against = against if below else "" if laws else "not measured"
    return Verdict(f"{ours} greedy", "66% greedy for one guess, 86% for five", "surpassed", against)


def _found(cells: Cells, mode: str, *names: str) -> dict[str, list[list[float]]]:
    """Return by pair the percentages for k = 1, 2, ... of these data sets, else of all."""
    keys = {pair: [f"{pair},{name},{mode}" for name in names or DATASETS] for pair in PAIRS}
    found = {pair: [_rates(cells[key]) for key in each if key in cells] for pair, each in keys.items()}
    return {pair: each for pair, each in found.items() if each}


def _rates(cell: Figures) -> list[float]:
    """Return the percentages for k = 1, 2, ..."""
    return [100 * sum(cell["taken"][:k]) / max(1, cell["steps"]) for k in range(1, _MOST + 1)]


def _means(found: Sequence[Sequence[float]]) -> dict[int, float]:
    """Return the mean by k."""
    return {k: fmean(rates) for k, rates in enumerate(zip(*found, strict=True), 1)}


def _held(cells: Cells, law: str) -> list[bool]:
    """Return for each rate of the pair whether it reaches the paper's; `mss` is the sampled rule."""
    mode = "mss" if law == "stochastic" else law
    return [
        round(ours) >= paper
        for name, papers in _PAPER[law].items()
        for rates in _found(cells, mode, name).get("pair", [])
        for ours, paper in zip(rates, papers, strict=True)
    ]
