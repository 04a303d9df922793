"""A picture of a training: its loss, and what held-out guesses are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_INK = "#22303c"


def draw_training(history: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Write the picture of a training's measurements to `path`, if matplotlib is there; whether it is.

    Raises OSError.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    minutes = [row["seconds"] / 60 for row in history]
    left.plot(minutes, [row["loss"] for row in history], color="#4477aa")
    _dress(left, "Loss")
    for level in range(len(history[-1]["hits"])):
        middle.plot(minutes, [row["hits"][level] for row in history], label=f"level {level + 1}")
    middle.legend(frameon=False, fontsize=8)
    middle.set_ylim(0, 1)
    _dress(middle, "Held out: first guess right")
    right.plot(minutes, [row["tokens_per_pass"] for row in history], color="#66aa77")
    _dress(right, "Held out: tokens a pass, chain")
    figure.savefig(path)
    return True


def _dress(axes: Any, title: str) -> None:
    axes.set_title(title, color=_INK, fontsize=11, loc="left")
    axes.set_xlabel("minutes of training", color=_INK)
    axes.grid(color="#e4e8eb", linewidth=0.8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
