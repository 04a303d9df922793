"""Plots of cells as SVG, for light and dark pages."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
from cycler import cycler
from matplotlib.figure import Figure

INK: Final = "#7f7f7f"  # text and axes: readable on white and on black
_COLORS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # for all kinds of eyes
_STYLE: Final = {
    **{"svg.hashsalt": "specinfer", "svg.fonttype": "none"},  # names in the file depend on the plot only
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **{"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "font.size": 10},
    **{"legend.fontsize": 7, "axes.prop_cycle": cycler(color=_COLORS)},
}


def svg(draw: Callable[[Figure], None]) -> str:
    """Return what `draw` draws on a new figure; the same plot gives the same text."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def lines(axes: Any, series: Mapping[str, Mapping[Any, float]], **style: Any) -> None:
    """Draw a line with marks for each name, through its heights by x."""
    for name, points in series.items():
        axes.plot([*points], [*points.values()], **{"marker": "o", "label": name, **style})
    axes.legend()


def bars(axes: Any, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """Draw groups of bars, with a bar for each name in each; 0 is a figure that is not there."""
    width = 0.8 / len(series)
    for number, (name, heights) in enumerate(series.items()):
        axes.bar([at + number * width for at in range(len(groups))], heights, width, label=name)
    axes.set_xticks([at + 0.4 - width / 2 for at in range(len(groups))], groups, fontsize=7)
    axes.figure.legend(loc="outside lower center", ncols=4)
