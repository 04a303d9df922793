"""Tree width against batch size: the seconds that a request waits for a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan
from typing import Any, Final

from benchmarks.paper.lab import Lab
from benchmarks.paper.plots import INK, lines
from benchmarks.paper.question import Cells, Figure, Figures, Verdict
from benchmarks.paper.ways import PLAIN, compare, shaped
from benchmarks.study import shown, spread, table

ASKS: Final = "Which tree width is best at which batch size?"
_WIDTHS: Final = ("1", "2", "3", "4", "5")
_COST: Final = "cost"  # in place of a width: a learned shape, sized by the cost of a pass; the default
_PAIRS: Final = {"head": "SmolLM2 with its head", "pair": "Qwen2.5-Coder 1.5B with the 0.5B"}
_PAPER: Final = 1.2  # speed of trees over sequences, at least
_SMALL: Final = 2  # the largest batch at which the paper found wide trees best


def keys(lab: Lab) -> list[str]:
    batches: Mapping[str, Sequence[int]] = {"head": (1, 2, 4, 8, 16, 32), "pair": (1, 2, 4)}
    chosen = lab.pick(full=batches, quick={"head": (1, 4, 16)}, toy={"head": (1, 2)})
    return [f"{name},{batch}" for name, sizes in chosen.items() for batch in sizes]


def measure(lab: Lab, key: str) -> Figures:
    name, batch = key.split(",")
    widths = lab.pick(full=_WIDTHS, quick=("1", "3", "5"), toy=("1", "2"))
    ways: dict[str, Any] = {width: shaped(1, 1, int(width), 1, 1, 1, 1, 1) for width in widths}
    questions = lab.questions("Alpaca", max(lab.pick(full=4, quick=2, toy=1), int(batch)))
    tokens, rounds = lab.pick(full=(24, 3), quick=(24, 1), toy=(8, 1))
    ways[_COST] = {"tree_size": "cost"}
    return compare(lab, name, ways, questions, batch=int(batch), max_tokens=tokens, rounds=rounds)


def page(cells: Cells) -> list[str]:
    rows: list[Sequence[object]] = []
    for key, cell in cells.items():
        name, batch = key.split(",")
        times = [1e3 * cell[way]["seconds"] if way in cell else nan for way in (PLAIN, *_WIDTHS, _COST)]
        rows.append((_PAIRS[name], batch, *shown(times, 1), _best(cell), *shown([_gain(cell)])))
    rows.append(("paper", "1 to 2", *[""] * 7, "wide", f"{_PAPER} to 1.5"))
    rows.append(("paper", "4 and more", *[""] * 7, "2 to 3", f"{_PAPER} to 1.5"))
    small, large = _bests(cells)
    kept = min(cell[PLAIN]["seconds"] / cell[_COST]["seconds"] for cell in cells.values())
    ways = [way for cell in cells.values() for name, way in cell.items() if name != PLAIN]
    return [
        "Milliseconds per token of a request, after its first, while a batch of requests runs. Trees have "
        "`w` branches at the "
        "third level and no other; the draft's have eight levels, the head's five. By cost: a learned shape, "
        "sized by the cost of a pass, the default.",
        *table(
            " | batch | without | w = 1 | 2 | 3 | 4 | 5 | by cost | best width | best tree over sequence",
            rows,
        ),
        f"The best width is {_listed(small)} up to a batch of {_SMALL} and {_listed(large)} above. The best "
        f"tree has {spread(list(map(_gain, cells.values())), 2)} of a sequence's speed (median, least and "
        f"most), and trees sized by cost {_sized(cells)}. Sizes by cost keep at least {kept:.2f} of the "
        f"speed without speculation in every row, and {sum(way['same'] for way in ways)} of "
        f"{sum(way['texts'] for way in ways)} texts are those without speculation. Each node "
        "of a pass takes computing time on a CPU ([trees](trees.md)). Wide trees are not free as on a GPU.",
    ]


def plot(cells: Cells, figure: Figure) -> None:
    names = list(dict.fromkeys(key.split(",")[0] for key in cells))
    for name, axes in zip(names, figure.subplots(1, len(names), squeeze=False)[0], strict=True):
        found = {key.split(",")[1]: cell for key, cell in cells.items() if key.startswith(f"{name},")}
        for way in (*_WIDTHS, _COST):
            known = {batch: cell for batch, cell in found.items() if way in cell}
            speeds = {batch: cell[PLAIN]["seconds"] / cell[way]["seconds"] for batch, cell in known.items()}
            label, style = ("by cost", "--") if way == _COST else (f"w = {way}", "-")
            lines(axes, {label: speeds} if speeds else {}, linestyle=style)
        axes.axhline(1, linewidth=0.8, color=INK)
        axes.set(xlabel="batch size", ylabel="speed over no speculation", title=_PAIRS[name])


def verdict(cells: Cells) -> Verdict:
    small, large = _bests(cells)
    gains = [_gain(cell) for cell in cells.values()]
    enough = sum(gain >= _PAPER for gain in gains)
    wider = max(large, default=0) > max(small, default=5)
    against = ["large batches have wider best trees"] if wider else []
    if not {*large} <= {2, 3}:
        against.append(f"the best width from 4 on is {_listed(large)}")
    if enough < len(gains):
        against.append(f"trees reach {_PAPER} of a sequence's speed in {enough} of {len(gains)} rows")
    return Verdict(
        f"width {_listed(small)} at batch 1 to 2, {_listed(large)} from 4 on; {spread(gains, 2)}; "
        f"sized by cost {_sized(cells)}",
        f"wide trees at batch 1 to 2, width 2 to 3 from 4 on; tree over sequence {_PAPER} to 1.5",
        "reproduced",
        "; ".join(against),
    )


def _best(cell: Figures) -> int:
    """Return the width with the least time per token."""
    return int(min((way for way in _WIDTHS if way in cell), key=lambda way: cell[way]["seconds"]))


def _gain(cell: Figures) -> float:
    """Return the speed of the best tree, at least two wide, over that of a sequence."""
    return float(cell["1"]["seconds"] / min(cell[way]["seconds"] for way in _WIDTHS[1:] if way in cell))


def _sized(cells: Cells) -> str:
    """Return the speed of trees sized by cost over that of a sequence."""
    return spread([cell["1"]["seconds"] / cell[_COST]["seconds"] for cell in cells.values()], 2)


def _bests(cells: Cells) -> tuple[list[int], list[int]]:
    """Return the best widths at small batches, and at larger ones."""
    found: tuple[set[int], set[int]] = set(), set()
    for key, cell in cells.items():
        found[int(key.split(",")[1]) > _SMALL].add(_best(cell))
    return sorted(found[0]), sorted(found[1])


def _listed(widths: list[int]) -> str:
    return " or ".join(map(str, widths)) or "not measured"
