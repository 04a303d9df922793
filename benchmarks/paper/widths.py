"""Tree width against batch size: the seconds that a request waits for a token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from benchmarks.paper.lab import Lab
from benchmarks.paper.question import Cells, Figures, Question, Verdict
from benchmarks.paper.ways import PLAIN, compare, shaped
from benchmarks.study import row, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTHS: Final = ("1", "2", "3", "4", "5")
_COST: Final = "cost"  # in place of a width: a learned shape, sized by the cost of a pass; the default
_PAIRS: Final = {"head": "SmolLM2 with its head", "pair": "Qwen2.5-Coder 1.5B with the 0.5B"}
_PAPER: Final = 1.2  # speed of trees over sequences, at least
_SMALL: Final = 2  # the largest batch at which the paper found wide trees best


def keys(lab: Lab) -> list[str]:
    batches: Mapping[str, Sequence[int]] = {"head": (1, 2, 4, 8, 16, 32), "pair": (1, 4)}
    chosen = lab.pick(full=batches, quick={"head": (1, 4, 16)}, toy={"head": (1, 2)})
    return [f"{name},{batch}" for name, sizes in chosen.items() for batch in sizes]


def measure(lab: Lab, key: str) -> Figures:
    name, batch = key.split(",")
    widths = lab.pick(full=_WIDTHS, quick=("1", "3", "5"), toy=("1", "2"))
    least = lab.pick(full=4, quick=2, toy=1)
    return compare(
        lab,
        name,
        {
            **{width: shaped(1, 1, int(width), 1, 1, 1, 1, 1) for width in widths},
            _COST: {"tree_size": "cost"},
        },
        lab.questions("Alpaca", max(least, int(batch))),
        batch=int(batch),
        max_tokens=lab.pick(full=24, quick=24, toy=8),
        rounds=lab.pick(full=3, quick=1, toy=1),
    )


def page(cells: Cells) -> list[str]:
    lines = [
        "Milliseconds per token of a request while a batch of requests runs. Trees have `w` branches at the "
        "third level and no other; the draft's have eight levels, the head's five. By cost: a learned shape, "
        "sized by the cost of a pass, the default.",
        "",
        "| | batch | without | w = 1 | 2 | 3 | 4 | 5 | by cost | best width | best tree over sequence |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, batch, cell in _sorted(cells):
        times = [
            f"{1e3 * cell[way]['seconds']:.1f}" if way in cell else "" for way in (PLAIN, *_WIDTHS, _COST)
        ]
        lines.append(row(_PAIRS[name], batch, *times, _best(cell), f"{_gain(cell):.2f}"))
    lines.append(row("paper", "1 to 2", *[""] * 7, "wide", f"{_PAPER} to 1.5"))
    lines.append(row("paper", "4 and more", *[""] * 7, "2 to 3", f"{_PAPER} to 1.5"))
    small, large = _bests(cells)
    kept = min(cell[PLAIN]["seconds"] / cell[_COST]["seconds"] for cell in cells.values())
    texts, same = (
        sum(way[of] for cell in cells.values() for way in cell.values()) for of in ("texts", "same")
    )
    return [
        *lines,
        "",
        f"The best width is {_listed(small)} up to a batch of {_SMALL} and {_listed(large)} above; the best "
        f"tree has {spread(list(map(_gain, cells.values())), 2)} of a sequence's speed (median, least and "
        f"most), and trees sized by cost {_sized(cells)}. These have at least {kept:.2f} of the speed "
        f"without speculation in every row, and {same} of all {texts} texts are those without speculation.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    names = [name for name in _PAIRS if any(name == found for found, _, _ in _sorted(cells))]
    for name, axes in zip(names, figure.subplots(1, len(names), squeeze=False)[0], strict=True):
        found = [(batch, cell) for other, batch, cell in _sorted(cells) if other == name]
        for way in (*_WIDTHS, _COST):
            points = [(b, cell[PLAIN]["seconds"] / cell[way]["seconds"]) for b, cell in found if way in cell]
            if points:
                label = "by cost" if way == _COST else f"w = {way}"
                style = "--" if way == _COST else "-"
                axes.plot(*zip(*points, strict=True), marker="o", linestyle=style, label=label)
        axes.axhline(1, linewidth=0.8, color="#7f7f7f")
        sizes = [batch for batch, _ in found]
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(batch) for batch in sizes])
        axes.set(xlabel="batch size", ylabel="speed over no speculation", title=name)
    axes.legend(fontsize=8)


def verdict(cells: Cells) -> Verdict:
    small, large = _bests(cells)
    gains = [_gain(cell) for cell in cells.values()]
    enough = sum(gain >= _PAPER for gain in gains)
    why = f"trees reach {_PAPER} of a sequence's speed in {enough} of {len(gains)} rows"
    if narrower := max(large, default=0) <= max(small, default=5):
        why = "" if enough == len(gains) else why
    return Verdict(
        paper=f"wide trees at batch 1 to 2, width 2 to 3 from 4 on; tree over sequence {_PAPER} to 1.5",
        ours=f"width {_listed(small)} at batch 1 to 2, {_listed(large)} from 4 on; {spread(gains, 2)}; "
        f"sized by cost {_sized(cells)}",
        outcome="did not hold" if why else "reproduced",
        why=why if narrower else f"large batches have wider best trees; {why}",
    )


def _sorted(cells: Cells) -> Iterator[tuple[str, int, Figures]]:
    found = [(name, int(batch), key) for key in cells for name, batch in [key.split(",")]]
    for name, batch, key in sorted(found, key=lambda one: (list(_PAIRS).index(one[0]), one[1])):
        yield name, batch, cells[key]


def _best(cell: Figures) -> int:
    """Return the width with the least time per token."""
    return int(min((way for way in _WIDTHS if way in cell), key=lambda way: cell[way]["seconds"]))


def _gain(cell: Figures) -> float:
    """Return the speed of the best tree, at least two wide, over that of a sequence."""
    trees = [cell[way]["seconds"] for way in _WIDTHS[1:] if way in cell]
    speed: float = cell["1"]["seconds"] / min(trees)
    return speed


def _sized(cells: Cells) -> str:
    """Return the speed of trees sized by cost over that of a sequence."""
    return spread([cell["1"]["seconds"] / cell[_COST]["seconds"] for cell in cells.values()], 2)


def _bests(cells: Cells) -> tuple[list[int], list[int]]:
    """Return the best widths at small batches, and at larger ones."""
    small = sorted({_best(cell) for _, batch, cell in _sorted(cells) if batch <= _SMALL})
    return small, sorted({_best(cell) for _, batch, cell in _sorted(cells) if batch > _SMALL})


def _listed(widths: list[int]) -> str:
    return " or ".join(map(str, widths)) or "not measured"


QUESTION: Final = Question(
    name="widths",
    asks="Which tree width is best at which batch size?",
    keys=keys,
    measure=measure,
    page=page,
    plot=plot,
    verdict=verdict,
)
