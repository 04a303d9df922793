"""A picture of a comparison: acceptance per depth, and where the time of both runs goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specinfer.bench.report import OTHER
from specinfer.engine.steps import Stage
from specinfer.report.picture import COLOURS, INK, REST, check_plot, dress, new_figure, save

_STAGES = (  # stage, label, colour; bottom to top
    (Stage.FORWARD.value, "target forward", COLOURS[0]),
    (Stage.PROPOSE.value, "propose", COLOURS[1]),
    (Stage.VERIFY.value, "verify", COLOURS[2]),
    (OTHER, "everything else", REST),
)


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture of `result`, what `report.as_json` returns, to `path`.

    Raises ConfigError when matplotlib is missing or the file cannot be written.
    """
    check_plot(path)
    figure = new_figure(10, 4.8)
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    _acceptance(left, result)
    _time(right, result)
    name = Path(result["model"]).name
    figure.suptitle(
        f"{name}: {result['speedup']:.2f}x output tokens/s, {result['tokens_per_step']:.2f} tokens per step",
        color=INK,
        fontsize=12,
        fontweight="bold",
    )
    save(figure, path)


def _acceptance(axes: Any, result: Mapping[str, Any]) -> None:
    rates = [100 * rate for rate in result["speculative"]["acceptance_per_depth"]]
    depths = list(range(1, len(rates) + 1))
    bars = axes.bar(depths, rates, width=0.7, color=COLOURS[0])
    axes.bar_label(bars, [f"{rate:.0f}" for rate in rates], padding=2, color=INK, fontsize=9)
    axes.set_xticks(depths)
    axes.set_ylim(0, max(100, *rates, 0) * 1.06)
    axes.set_yticks(range(0, 101, 20))
    dress(axes, "Accepted per depth of the tree", "depth", "% of steps that guessed so deep")


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
            at, bottoms[at] + 0.02 * max(bottoms), text, ha="center", va="bottom", color=INK, fontsize=9
        )
    axes.set_xticks([0, 1], [name for name, _ in runs])
    axes.set_ylim(0, 1.22 * max(bottoms))
    axes.set_xlim(-0.5, 1.5)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    dress(axes, "Time per stage", "", "ms per output token, prompts included")
