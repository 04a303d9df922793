"""Are drafts' trees quicker where their shape is learned than in a fixed one?

    python benchmarks/policy_shape.py --traces TRACE... --out RESULT.md [--shapes 1,1,3,1,1 --shapes learned]
        [--curves "avx2: 1:85,4:135,16:310,128:2200 | 1:28,4:45,16:100,128:730"]

Traces are those of `specinfer trace record --expansion learned`, which hold all likely paths. All their
texts are played in turns under the engine's policy, once for each shape, by the traces' own curves or by
given ones: rows and milliseconds of the target's passes, a bar, and the same of the draft's. Shapes are
compared with the first, paired on the same texts, with 95% intervals over texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from policy_matching_length import ratio
from study import Study, parser, row, run, settings_of

from specinfer.replay.replay import Part, cost_policy, play, play_without
from specinfer.replay.trace import Trace
from specinfer.replay.trace_store import read_trace
from specinfer.runtime.cost_curve import CostCurve
from specinfer.tree.expansion import Expansion

OWN = "the traces' own"
Curves = tuple[str, CostCurve, CostCurve]  # what machine, its target's and its draft's


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", nargs="+", type=Path, required=True, help="files of the same models")
    options.add_argument("--shapes", action="append", default=[], help="repeatable: K1,K2,... or learned")
    options.add_argument(
        "--curves", action="append", type=curves_of, default=[], help="of a machine; repeatable"
    )
    args = options.parse_args()
    args.shapes = args.shapes or ["1,1,3,1,1", "learned"]
    study = Study("policy-shape", args.out, settings_of(args, without=("curves",)))
    traces = [read_trace(path) for path in args.traces]
    machines: list[Curves | None] = [*args.curves] or [None]
    for curves in machines:
        name = OWN if curves is None else curves[0]
        if name not in study.cells:
            study.keep(
                name, played(traces if curves is None else [at(one, curves) for one in traces], args.shapes)
            )
            print(name, study.cells[name], flush=True)
    study.write(page(study.cells))


def curves_of(text: str) -> Curves:
    """A machine's curves as they are written: "name: rows:ms,rows:ms | rows:ms"."""
    try:
        name, _, both = text.partition(": ")
        target, draft = (
            [one.split(":") for one in side.strip().split(",")] for side in both.split("|", maxsplit=1)
        )
        curves = [
            CostCurve(tuple(int(rows) for rows, _ in of), tuple(float(ms) / 1e3 for _, ms in of))
            for of in (target, draft)
        ]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r}; allowed: a name, a colon and a space, then rows:ms,rows:ms | rows:ms"
        ) from error
    return name, curves[0], curves[1]


def at(trace: Trace, curves: Curves) -> Trace:
    """The trace as it would have been on another machine."""
    _, target, draft = curves
    drafts = {name: replace(one, curve=draft) for name, one in trace.drafts.items()}
    return replace(trace, curve=target, drafts=drafts)


def played(traces: Sequence[Trace], shapes: Sequence[str]) -> dict[str, Any]:
    """What comes of each shape, on all texts in turns."""
    most = max(len(trace.texts) for trace in traces)
    texts = [(trace, i) for i in range(most) for trace in traces if i < len(trace.texts)]
    none = play_without([Part(texts)])
    cell: dict[str, Any] = {"texts": len(texts), "tokens": none.tokens, "shapes": {}}
    first: Sequence[float] | None = None
    for shape in shapes:
        expansion: Expansion | Literal["learned"] = "learned"
        if shape != "learned":
            expansion = Expansion.parse(shape)
        speculation = replace(traces[0].speculation, expansion=expansion, tree_size="cost")
        came = play([Part(texts)], cost_policy(traces[0], speculation), speculation=speculation)
        first = first or came.of_texts
        cell["shapes"][shape] = {
            "tokens_per_step": came.tokens_per_step,
            "nodes_per_step": came.nodes / came.steps,
            "draft_passes": sum(came.draft_passes.values()),
            "over_none": ratio(none.of_texts, came.of_texts),
            "over_first": ratio(first, came.of_texts),
        }
    return cell


def page(cells: Mapping[str, Any]) -> list[str]:
    """Markdown: a row for each machine and shape."""
    lines = [
        "# Shapes of drafts' trees",
        "",
        "The same texts in turns, played under the engine's policy by the curves of several machines; speeds",
        "with 95% intervals over texts.",
        "",
        row(
            "curves",
            "texts",
            "tokens",
            "shape",
            "tokens a step",
            "nodes",
            "passes",
            "over none",
            "over the first",
        ),
        row(*["---"] * 9),
    ]
    for name, cell in cells.items():
        for shape, came in cell["shapes"].items():
            speeds = ["{:.3f} [{:.3f}, {:.3f}]".format(*came[what]) for what in ("over_none", "over_first")]
            figures = f"{came['tokens_per_step']:.2f}", f"{came['nodes_per_step']:.2f}", came["draft_passes"]
            lines.append(row(name, cell["texts"], cell["tokens"], shape, *figures, *speeds))
    return lines


if __name__ == "__main__":
    run(main)
