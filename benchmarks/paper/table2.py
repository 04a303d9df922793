"""Table 2 of the paper: tokens per step by tree width, and how many guesses a step accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

from benchmarks.paper.lab import Lab, answer, ranks
from benchmarks.paper.question import Cells, Figures, Question, Verdict
from benchmarks.study import row
from specinfer.tree.token_tree import Expansion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS: Final = (1, 2, 3, 4, 5)  # at the third level
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
    shape: dict[str, Any] = {"tree_size": "cost", "max_batch_size": 1}
    if size == _FIXED:
        shape = {"expansion": Expansion((1, 1, max(WIDTHS), 1, 1, 1, 1, 1))}
    steps: list[list[int]] = []  # ranks of the accepted guesses
    with lab.llm(lab.target, [lab.draft], verifier=MODES[mode]["verifier"], **shape) as llm:
        llm.on_tree = lambda event: steps.extend([ranks(event)][: event.tree.num_nodes - 1])
        figures = answer(
            llm,
            lab.questions(name, lab.pick(full=6 if size == _FIXED else 8, quick=3, toy=1)),
            temperature=MODES[mode]["temperature"],
            max_tokens=lab.pick(full=64, quick=24, toy=8),
        )
    unguessed = [0] * (figures.steps - len(steps))  # steps without guesses
    accepted = {size: [*(len(taken) for taken in steps), *unguessed]}
    if size == _FIXED:  # a narrower tree is a part of this one
        accepted = {
            str(width): [2 if len(taken) > 2 and taken[2] >= width else len(taken) for taken in steps]
            for width in WIDTHS
        }
    return {
        "nodes_per_step": figures.drafted_tokens / max(1, figures.steps),
        "steps": {  # by width: the number of steps that accept 0, 1, ... guesses
            width: [each.count(n) for n in range(max(each, default=0) + 1)]
            for width, each in accepted.items()
        },
    }


def page(cells: Cells) -> list[str]:
    lines = [
        "Tokens per step. A step verifies a tree of the draft's guesses: eight levels, with `w` branches at "
        "the third. One run with five branches gives all widths, as a narrower tree is a part of its tree. "
        "The last column has the default, trees of a learned shape, sized by the cost of a pass.",
        "",
        "| data set | | w = 1 | 2 | 3 | 4 | 5 | by cost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in _PAPER["greedy"]:
        for mode in MODES:
            ours = [_tokens(cells, name, mode, width) for width in (*map(str, WIDTHS), _COST)]
            if any(ours):
                paper = [f"{figure:.2f}" for figure in _PAPER[LAW[mode]][name]]
                lines.append(row(name, f"{mode}, ours", *(f"{one:.2f}" if one else "" for one in ours)))
                lines.append(row(name, f"{LAW[mode]}, paper", *paper, ""))
    above, figures = _compared(cells)
    means = {mode: _means(cells, mode) for mode in MODES}
    gains = [f"{mean[-1] / mean[0]:.2f} ({mode})" for mode, mean in means.items() if mean]
    papers = [f"{fmean(_papers(law, 5)) / fmean(_papers(law, 1)):.2f} ({law})" for law in _PAPER]
    return [
        *lines,
        "",
        f"{above} of {figures} figures are at or above the paper's. Five branches yield {', '.join(gains)} "
        f"times the tokens of one; in the paper {', '.join(papers)}.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    widths, accepted = figure.subplots(1, 2)
    for mode in MODES:
        widths.plot(WIDTHS[: len(means := _means(cells, mode))], means, marker="o", label=mode)
        shares = _distribution(cells, mode)
        accepted.step(range(len(shares)), shares, where="post", label=mode)
    for law in _PAPER:
        papers = [fmean(_papers(law, width)) for width in WIDTHS]
        widths.plot(WIDTHS, papers, linestyle=":", marker=".", label=f"{law}, paper")
    widths.set(xlabel="tree width", ylabel="tokens per step", xticks=WIDTHS)
    accepted.set(xlabel="accepted guesses in a step, at most", ylabel="share of steps", ylim=(0, 1))
    widths.legend(fontsize=8)


def verdict(cells: Cells) -> Verdict:
    above, figures = _compared(cells)
    ours = [f"{means[-1]:.2f} {mode}" for mode in MODES if (means := _means(cells, mode))]
    return Verdict(
        paper="3.46 tokens a step greedy, 2.27 sampled, width 5",
        ours=", ".join(ours),
        outcome="surpassed" if above == figures else "did not hold",
        why="" if above == figures else f"{figures - above} of {figures} figures are below the paper's",
    )


def _tokens(cells: Cells, name: str, mode: str, width: str) -> float | None:
    """Return the tokens per step, or None without a cell."""
    cell = cells.get(f"{name},{mode},{_COST if width == _COST else _FIXED}")
    if cell is None:
        return None
    steps: list[int] = cell["steps"][width]
    return 1 + sum(n * count for n, count in enumerate(steps)) / max(1, sum(steps))


def _papers(law: str, width: int) -> list[float]:
    return [figures[width - 1] for figures in _PAPER[law].values()]


def _means(cells: Cells, mode: str) -> list[float]:
    """Return the mean tokens per step over the data sets, by width; empty without cells."""
    found = [
        [one for name in _PAPER["greedy"] if (one := _tokens(cells, name, mode, str(width)))]
        for width in WIDTHS
    ]
    return [fmean(each) for each in found if each]


def _compared(cells: Cells) -> tuple[int, int]:
    """Return the number of figures that reach the paper's, and of all that it has."""
    pairs = [
        (ours, papers[width - 1])
        for mode, law in LAW.items()
        for name, papers in _PAPER[law].items()
        for width in WIDTHS
        if (ours := _tokens(cells, name, mode, str(width)))
    ]
    return sum(round(ours, 2) >= paper for ours, paper in pairs), len(pairs)


def _distribution(cells: Cells, mode: str) -> list[float]:
    """Return, for 0, 1, ... accepted guesses, the share of steps that accept at most as many at width 5."""
    found = [cell["steps"]["5"] for key, cell in cells.items() if key.endswith(f",{mode},{_FIXED}")]
    counts = [sum(each) for each in zip_longest(*found, fillvalue=0)]
    return [total / sum(counts) for total in accumulate(counts)]


QUESTION: Final = Question(
    name="table2",
    asks="How many tokens does a step yield, by tree width?",
    keys=keys,
    measure=measure,
    page=page,
    plot=plot,
    verdict=verdict,
)
