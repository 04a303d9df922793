"""Table 1 of the paper: how often one of the draft's k first guesses is the target's token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Final

from benchmarks.paper.lab import Lab, answer, ranks
from benchmarks.paper.question import Cells, Figures, Question, Verdict
from benchmarks.paper.table2 import LAW, MODES
from benchmarks.study import row
from specinfer.tree.token_tree import Expansion

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    limit = lab.pick(full={"pair": 8, "head": 16}[pair], quick=4, toy=1)
    options = {"verifier": MODES[mode]["verifier"], "expansion": Expansion((_MOST,))}
    with lab.llm(*lab.pair(pair), **options) as llm:
        llm.on_tree = lambda event: taken.extend((ranks(event) or [_MOST])[: event.tree.num_nodes - 1])
        answer(
            llm,
            lab.questions(name, limit),
            temperature=MODES[mode]["temperature"],
            max_tokens=lab.pick(full=64, quick=24, toy=8),
        )
    return {"taken": [taken.count(rank) for rank in range(_MOST)], "steps": len(taken)}


def page(cells: Cells) -> list[str]:
    lines = [
        "In percent of the steps. Every step has five guesses for one token: greedy, the draft's likeliest; "
        "sampled (T = 1), five draws without replacement for `mss`, or with the target's noise for "
        "`coupled`. The first k of them hold the accepted token this often.",
        "",
        "| data set | | k = 1 | 2 | 3 | 4 | 5 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in _PAPER["greedy"]:
        for mode in MODES:
            found = {pair: cells.get(f"{pair},{name},{mode}") for pair in PAIRS}
            lines += [
                row(name, f"{mode}, {PAIRS[pair]}", *(f"{rate:.0f}" for rate in _rates(cell)))
                for pair, cell in found.items()
                if cell
            ]
            if any(found.values()):
                lines.append(row(name, f"{LAW[mode]}, paper", *_PAPER[LAW[mode]][name]))
    counts = {law: _compared(cells, law) for law in _PAPER}
    return [
        *lines,
        "",
        "The pair of language models reaches the paper's figure in "
        + " and in ".join(f"{above} of {rows} {law} rates" for law, (above, rows) in counts.items())
        + ". The paper's sampled rates of k > 1 are above its greedy ones; [Table 3](table3.md) has the "
        "exact rates of several rules.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    for axes, law in zip(figure.subplots(1, 2, sharey=True), _PAPER, strict=True):
        guesses = range(1, _MOST + 1)
        papers = [fmean(rates[k - 1] for rates in _PAPER[law].values()) for k in guesses]
        axes.plot(guesses, papers, linestyle=":", marker=".", label="paper")
        for mode in (mode for mode in MODES if LAW[mode] == law):
            for pair, words in PAIRS.items():
                found = [_rates(cell) for key, cell in cells.items() if _is(key, pair, mode)]
                if found:
                    means = [fmean(rates) for rates in zip(*found, strict=True)]
                    axes.plot(guesses, means, marker="o", label=f"{mode}, {words}")
        axes.set(xlabel=f"guesses, {law}", xticks=guesses, ylim=(0, 100))
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("percent of steps that accept one")


def verdict(cells: Cells) -> Verdict:
    counts = [_compared(cells, law) for law in _PAPER]
    above, rows = (sum(column) for column in zip(*counts, strict=True))
    found = [_rates(cell) for key, cell in cells.items() if _is(key, "pair", "greedy")]
    means = [f"{fmean(rates[k] for rates in found):.0f}%" for k in (0, _MOST - 1) if found]
    return Verdict(
        paper="66% greedy for one guess, 86% for five",
        ours=f"{' and '.join(means)} greedy",
        outcome="surpassed" if above == rows else "did not hold",
        why="" if above == rows else f"{rows - above} of {rows} rates are below the paper's",
    )


def _is(key: str, pair: str, mode: str) -> bool:
    return key.startswith(f"{pair},") and key.endswith(f",{mode}")


def _rates(cell: Figures) -> list[float]:
    """Return the percentages for k = 1, 2, ..."""
    return [100 * sum(cell["taken"][:k]) / max(1, cell["steps"]) for k in range(1, _MOST + 1)]


def _compared(cells: Cells, law: str) -> tuple[int, int]:
    """Return the number of the pair's rates that reach the paper's, and of all; `mss` is the sampled rule."""
    pairs = [
        (round(ours), paper)
        for name, papers in _PAPER[law].items()
        if (cell := cells.get(f"pair,{name},{'mss' if law == 'stochastic' else law}"))
        for ours, paper in zip(_rates(cell), papers, strict=True)
    ]
    return sum(ours >= paper for ours, paper in pairs), len(pairs)


QUESTION: Final = Question(
    name="table1",
    asks="How often is one of the draft's first guesses right?",
    keys=keys,
    measure=measure,
    page=page,
    plot=plot,
    verdict=verdict,
)
