"""Table 2 of the paper: tokens per step by tree width, and how many guesses a step accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from benchmarks.paper.lab import Lab, answer
from benchmarks.paper.question import Cells, Figures, Question, Verdict
from benchmarks.study import row
from specinfer.tree.token_tree import Expansion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTHS: Final = (1, 2, 3, 4, 5)
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
_MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "greedy": {"temperature": 0.0, "verifier": "coupled"},
    "coupled": {"temperature": 1.0, "verifier": "coupled"},
    "mss": {"temperature": 1.0, "verifier": "mss"},
}
_LAW: Final = {"greedy": "greedy", "coupled": "stochastic", "mss": "stochastic"}
_COST: Final = "cost"  # in place of a width: trees of a learned shape, sized by the cost of a pass


def keys(lab: Lab) -> list[str]:
    widths: Sequence[object] = lab.pick(full=[*_WIDTHS, _COST], quick=[1, 3, 5, _COST], toy=[2, _COST])
    return [f"{name},{mode},{width}" for name in lab.datasets() for mode in _MODES for width in widths]


def measure(lab: Lab, key: str) -> Figures:
    name, mode, width = key.split(",")
    shape: dict[str, Any] = {"tree_size": "cost"}
    if width != _COST:
        shape = {"expansion": Expansion((1, 1, int(width), 1, 1, 1, 1, 1))}
    questions = lab.questions(name, lab.pick(full=20, quick=4, toy=1))
    with lab.llm(lab.target, [lab.draft], verifier=_MODES[mode]["verifier"], **shape) as llm:
        figures = answer(
            llm,
            questions,
            temperature=_MODES[mode]["temperature"],
            max_tokens=lab.pick(full=64, quick=32, toy=8),
        )
    return {
        "tokens_per_step": figures.tokens_per_step,
        "steps": figures.steps,
        "nodes_per_step": figures.drafted_tokens / max(1, figures.steps),
        "accepted_per_depth": figures.accepted_per_depth,
    }


def page(cells: Cells) -> list[str]:
    lines = [
        "Every step verifies a tree of the draft's guesses: eight levels, with `w` branches at the third "
        "one. The last column has trees with a learned shape and a size by cost, the default.",
        "",
        "| data set | | w = 1 | 2 | 3 | 4 | 5 | by cost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in _PAPER["greedy"]:
        for mode in _MODES:
            found = [cells.get(f"{name},{mode},{width}") for width in (*_WIDTHS, _COST)]
            if any(found):
                ours = [f"{cell['tokens_per_step']:.2f}" if cell else "" for cell in found]
                paper = [f"{figure:.2f}" for figure in _PAPER[_LAW[mode]][name]]
                lines.append(row(name, f"{mode}, ours", *ours))
                lines.append(row(name, f"{_LAW[mode]}, paper", *paper, ""))
    above, rows = _compared(cells)
    return [
        *lines,
        "",
        f"{above} of {rows} figures are at or above the paper's: a draft of a third of its target's size "
        "agrees more often than one of a hundredth. Width therefore adds less than it did there.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    widths, accepted = figure.subplots(1, 2)
    for mode in _MODES:
        means = [
            (width, fmean(cell["tokens_per_step"] for cell in found))
            for width in _WIDTHS
            if (found := [one for key, one in cells.items() if key.endswith(f",{mode},{width}")])
        ]
        widths.plot(*zip(*means, strict=True), marker="o", label=f"{mode}")
        law = _LAW[mode]
        if mode != "coupled":
            papers = [fmean(rows[w - 1] for rows in _PAPER[law].values()) for w in _WIDTHS]
            widths.plot(_WIDTHS, papers, linestyle=":", marker=".", label=f"{law}, paper")
        depths = _distribution(cells, mode)
        accepted.step(range(len(depths)), depths, where="post", label=mode)
    widths.set(xlabel="tree width", ylabel="tokens per step", xticks=_WIDTHS)
    accepted.set(xlabel="accepted guesses in a step, at most", ylabel="share of steps", ylim=(0, 1))
    widths.legend(fontsize=8)


def verdict(cells: Cells) -> Verdict:
    above, rows = _compared(cells)
    wide = {
        mode: fmean(cell["tokens_per_step"] for key, cell in cells.items() if f",{mode},5" in key)
        for mode in ("greedy", "mss")
        if any(f",{mode},5" in key for key in cells)
    }
    return Verdict(
        paper="3.46 tokens a step greedy, 2.27 sampled, width 5",
        ours=", ".join(f"{figure:.2f} {mode}" for mode, figure in wide.items()),
        outcome="surpassed" if above == rows else "did not hold",
        why="" if above == rows else f"{rows - above} of {rows} figures are below the paper's",
    )


def _compared(cells: Cells) -> tuple[int, int]:
    """Return the number of figures that reach the paper's, and of all that it has."""
    pairs = [
        (cell["tokens_per_step"], _PAPER[_LAW[mode]][name][int(width) - 1])
        for key, cell in cells.items()
        for name, mode, width in [key.split(",")]
        if width != _COST
    ]
    return sum(ours >= paper for ours, paper in pairs), len(pairs)


def _distribution(cells: Cells, mode: str) -> list[float]:
    """Return, for 0, 1, ... accepted guesses, the share of steps that accept at most as many at width 5."""
    found = [cell for key, cell in cells.items() if key.endswith(f",{mode},{max(_WIDTHS)}")]
    steps = sum(cell["steps"] for cell in found)
    longest = max((len(cell["accepted_per_depth"]) for cell in found), default=0)
    more = [sum(sum(cell["accepted_per_depth"][d : d + 1]) for cell in found) for d in range(longest)]
    return [1 - count / steps for count in [*more, 0]] if steps else []


QUESTION: Final = Question(
    name="table2",
    asks="How many tokens does a step yield, by tree width?",
    keys=keys,
    measure=measure,
    page=page,
    plot=plot,
    verdict=verdict,
)
