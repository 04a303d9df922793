"""A picture of a comparison: acceptance per depth, and where the time of both runs goes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specinfer.bench.report import OTHER
from specinfer.engine.metrics import Stage
from specinfer.errors import ConfigError

_INK, _QUIET = "#22303c", "#8a949e"
_STAGES = (  # stage, label, colour; bottom to top
    (Stage.FORWARD.value, "target forward", "#4477aa"),
    (Stage.PROPOSE.value, "propose", "#ee9944"),
    (Stage.VERIFY.value, "verify", "#66aa77"),
    (OTHER, "everything else", "#c3c9cf"),
)


def check_plot(path: Path) -> None:
    """Raise ConfigError when a picture cannot be made: no matplotlib, or a suffix it does not know."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'specinfer[plot]'")
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"--plot is {str(path)!r}; allowed: a file that ends in .png, .svg or .pdf")


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture of `result`, what `report.as_json` returns, to `path`.

    Raises ConfigError when matplotlib is missing or the file cannot be written.
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(h_pad=0.1, w_pad=0.1)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _acceptance(left, result)
    _time(right, result)
    name = Path(result["model"]).name
    figure.suptitle(
        f"{name}: {result['speedup']:.2f}x output tokens/s, {result['tokens_per_step']:.2f} tokens per step",
        color=_INK,
        fontsize=12,
        fontweight="bold",
    )
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _acceptance(axes: Any, result: Mapping[str, Any]) -> None:
    rates = [100 * rate for rate in result["speculative"]["acceptance_per_depth"]]
    depths = list(range(1, len(rates) + 1))
    bars = axes.bar(depths, rates, width=0.7, color="#4477aa")
    axes.bar_label(bars, [f"{rate:.0f}" for rate in rates], padding=2, color=_INK, fontsize=9)
    axes.set_xticks(depths)
    axes.set_ylim(0, max(100, *rates, 0) * 1.06)
    axes.set_yticks(range(0, 101, 20))
    _dress(axes, "Accepted per depth of the tree", "depth", "% of steps that guessed so deep")


def _time(axes: Any, result: Mapping[str, Any]) -> None:
    """Milliseconds per output token, so that both columns do the same work."""
    runs = (("without\nspeculation", result["baseline"]), ("with\nspeculation", result["speculative"]))
    bottoms = [0.0, 0.0]
    heights: list[float] = []
    for stage, label, colour in _STAGES:
        heights = [1e3 * run["stages"][stage]["seconds"] / run["total_output"] for _, run in runs]
        axes.bar([0, 1], heights, bottom=bottoms, width=0.55, color=colour, label=label)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for at, (_, run) in enumerate(runs):
        text = f"{bottoms[at]:.1f} ms\n{run['output_throughput']:.1f} tokens/s"
        axes.text(
            at, bottoms[at] + 0.02 * max(bottoms), text, ha="center", va="bottom", color=_INK, fontsize=9
        )
    axes.set_xticks([0, 1], [name for name, _ in runs])
    axes.set_ylim(0, 1.22 * max(bottoms))
    axes.set_xlim(-0.5, 1.5)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    _dress(axes, "Time per stage", "", "ms per output token, prompts included")


def _dress(axes: Any, title: str, xlabel: str, ylabel: str) -> None:
    axes.set_title(title, color=_INK, fontsize=11, loc="left")
    axes.set_xlabel(xlabel, color=_INK)
    axes.set_ylabel(ylabel, color=_INK)
    axes.tick_params(colors=_INK, length=0)
    axes.grid(axis="y", color="#e4e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_QUIET)
