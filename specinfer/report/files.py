"""Report files: JSON, written whole or not at all, and matplotlib pictures in one style."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from specinfer.errors import ConfigError
from specinfer.files import write_text


def check_writable(path: Path) -> None:
    """Raise ConfigError if `path` cannot be written; called before minutes of measurement."""
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder; give a file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}; make it first")
    if not os.access(path.absolute().parent, os.W_OK):
        raise ConfigError(f"cannot write {path}: the folder is not writable; choose another")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write `result` to `path`, whole or not at all; raises ConfigError if writing fails."""
    try:
        write_text(path, json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


INK: Final = "#22303c"
QUIET: Final = "#8a949e"
COLOURS: Final = ("#4477aa", "#ee9944", "#66aa77", "#aa5577", "#8877bb")
REST: Final = "#c3c9cf"  # the unimportant rest of a chart


def check_plot(path: Path) -> None:
    """Raise ConfigError if matplotlib is missing or does not support the suffix."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'specinfer[plot]'")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot is {str(path)!r}; allowed: a file that ends in .png, .svg or .pdf")


def new_figure(width: float, height: float, *, dpi: int = 150) -> Any:
    """Create an empty matplotlib figure, sized in inches, that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    return figure


def dress(axes: Any, title: str, xlabel: str, ylabel: str) -> None:
    """Set title, labels and common style of axes."""
    axes.set_title(title, color=INK, fontsize=11, loc="left")
    axes.set_xlabel(xlabel, color=INK)
    axes.set_ylabel(ylabel, color=INK)
    axes.tick_params(colors=INK, length=0)
    axes.grid(axis="y", color="#e4e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)


def save(figure: Any, path: Path) -> None:
    """Write the picture; raises ConfigError if that fails."""
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
