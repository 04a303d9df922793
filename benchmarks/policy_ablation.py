"""What do drafts, lookups, their order and learned shapes bring?

    python benchmarks/policy_ablation.py --traces TRACE... --out RESULT.md
        [--curves "avx2: 1:85,4:135,16:310,128:2200 | 1:28,4:45,16:100,128:730"]

Traces are files of kinds, kind-00, kind-01, ... (benchmarks/policy_traces.py records them). All their texts
are played in turns under the engine's policy, one at a time and several at once, by the traces' own curves
and by given ones: rows and milliseconds of the target's passes, a bar, and the same of the draft's. Then they
are played once more without each piece. The same texts are paired, with 95% intervals over texts: above 1 a
piece brings something. The clock is the curves', so costs that are measured have no part in it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

from study import Study, natural, parser, row, run, settings_of

from specinfer.config import SWITCHES, SpeculationConfig
from specinfer.replay import simulated_engine
from specinfer.replay.paired import speedup
from specinfer.replay.replay import Part, Played, cost_policy, play, play_without
from specinfer.replay.trace import Trace
from specinfer.replay.trace_store import read_trace
from specinfer.runtime.cost_curve import CostCurve
from specinfer.tree.expansion import Expansion

OWN: Final = "the traces' own"
Curves = tuple[str, CostCurve, CostCurve]  # a machine's name, its target's curve and its draft's
Without = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Piece:
    """Something that can be left out: by what is patched, or by another trace."""

    without: Without = nullcontext
    other: Callable[[Trace], Trace] = lambda trace: trace


def pieces() -> dict[str, Piece]:
    """By what is left out; the first is nothing."""
    return {
        "nothing": Piece(),
        "drafts": Piece(other=lambda trace: replace(trace, drafts={})),
        "lookups": Piece(other=without_lookups),
        "lookups asked before drafts": Piece(drafts_first),
        "learned shapes (1,1,3,1,1)": Piece(other=with_fixed_shapes),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--traces", nargs="+", type=Path, required=True, help="kind-00, kind-01, ...")
    options.add_argument(
        "--curves", action="append", type=curves_of, default=[], help="of a machine; repeatable"
    )
    options.add_argument("--at-once", type=natural, default=4, help="texts (default 4)")
    args = options.parse_args()
    study = Study("policy-ablation", args.out, settings_of(args, without=("curves",)))
    traces = {path.stem: read_trace(path) for path in args.traces}
    machines: list[Curves | None] = [None, *args.curves]
    for curves in machines:
        name = OWN if curves is None else curves[0]
        known = {stem: one if curves is None else at(one, curves) for stem, one in traces.items()}
        if name not in study.cells:
            study.keep(name, played(known, args.at_once))
            print(name, study.cells[name], flush=True)
            study.write(page(study.cells, args.at_once))
    study.write(page(study.cells, args.at_once))


def played(traces: Mapping[str, Trace], at_once: int) -> dict[str, Any]:
    """What each piece brings: kind by kind, in turns, and several at once; and what all of them bring."""
    kinds, texts = in_turns(traces)
    cell: dict[str, Any] = {"texts": len(texts), "pieces": {}}
    base: tuple[Played, Played] | None = None
    for name, piece in pieces().items():
        came = (of_piece(piece, Part(texts)), of_piece(piece, Part(texts, at_once=at_once)))
        if base is None:
            base = came
            none = (play_without([Part(texts)]), play_without([Part(texts, at_once=at_once)]))
            cell["over_none"] = compared(kinds, none, base)
            cell["tokens"] = none[0].tokens
        else:
            cell["pieces"][name] = compared(kinds, came, base)
    return cell


def of_piece(piece: Piece, part: Part) -> Played:
    """What comes of playing these texts without it."""
    others = {id(trace): piece.other(trace) for trace, _ in part.texts}
    part = replace(part, texts=[(others[id(trace)], number) for trace, number in part.texts])
    trace = part.texts[0][0]
    speculation = replace(trace.speculation, tree_size="cost")
    with piece.without():
        return play([part], cost_policy(trace, speculation), speculation=speculation)


def without_lookups(trace: Trace) -> Trace:
    """The trace as if nobody looked anything up, in texts or in predictions."""
    texts = tuple(replace(text, prediction=()) for text in trace.texts)
    switches: dict[str, Any] = dict.fromkeys(SWITCHES, False)
    return replace(trace, texts=texts, speculation=replace(trace.speculation, **switches))


def with_fixed_shapes(trace: Trace) -> Trace:
    """The trace where drafts' trees have the shape that they had before it was learned."""
    return replace(trace, speculation=replace(trace.speculation, expansion=Expansion((1, 1, 3, 1, 1))))


def compared(
    kinds: Sequence[str], before: tuple[Played, Played], after: tuple[Played, Played]
) -> dict[str, tuple[float, float, float]]:
    """How many times as quick texts are now: each kind of those in turns, all of them, several at once."""
    (first, several), (now, several_now) = before, after
    found = {
        kind: ratio(*([one.of_texts[i] for i, of in enumerate(kinds) if of == kind] for one in (first, now)))
        for kind in dict.fromkeys(kinds)
    }
    found["in turns"] = ratio(first.of_texts, now.of_texts)
    found["at once"] = ratio(several.of_texts, several_now.of_texts)
    return found


def in_turns(traces: Mapping[str, Trace]) -> tuple[list[str], list[tuple[Trace, int]]]:
    """The texts of all kinds in turns, and which kind each is of."""
    kinds: dict[str, list[tuple[Trace, int]]] = {}
    for name, trace in traces.items():
        of_kind = kinds.setdefault(re.sub(r"-\d+$", "", name), [])
        of_kind.extend((trace, i) for i in range(len(trace.texts)))
    named = [[(kind, text) for text in of_kind] for kind, of_kind in kinds.items()]
    turns = [one for turn in zip_longest(*named) for one in turn if one is not None]
    return [kind for kind, _ in turns], [text for _, text in turns]


@contextmanager
def drafts_first() -> Iterator[None]:
    """Drafts are asked before speculators that cost nothing, of whose guesses nobody knows then."""
    usual = simulated_engine.speculators_of

    def sorted_otherwise(
        speculation: SpeculationConfig, trace: Trace, drafts: Mapping[str, Any]
    ) -> list[Any]:
        return sorted(usual(speculation, trace, drafts), key=lambda one: one.name not in drafts)

    with patch("specinfer.replay.replay.speculators_of", sorted_otherwise):
        yield


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


def ratio(before: Sequence[float], after: Sequence[float]) -> tuple[float, float, float]:
    """How many times as quick the same texts are now, with a 95% interval."""
    found = speedup(before, after)
    return found.ratio, found.low, found.high


def page(cells: Mapping[str, Any], at_once: int) -> list[str]:
    """Markdown: a table for each pair of curves, a row for each piece."""
    lines = [
        "# What each piece of the policy brings",
        "",
        f"The same texts in turns, and {at_once} at once, by cost curves: how many times as quick they are",
        "with a piece as without it, with 95% intervals over texts; in the first row all pieces over none.",
    ]
    for name, cell in cells.items():
        columns = [*cell["over_none"]]
        lines += [
            *("", f"## By curves of {name}", "", f"{cell['texts']} texts, {cell['tokens']} tokens.", ""),
            row("without", *columns),
            row(*["---"] * (1 + len(columns))),
            row("any of it", *map(told, cell["over_none"].values())),
            *(row(piece, *map(told, brought.values())) for piece, brought in cell["pieces"].items()),
        ]
    return lines


def told(found: tuple[float, float, float]) -> str:
    """A ratio and its interval."""
    return "{:.3f} [{:.3f}, {:.3f}]".format(*found)


if __name__ == "__main__":
    run(main)
