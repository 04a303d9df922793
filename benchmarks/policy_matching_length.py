"""Can matching lengths be predicted before anything is drawn, and what would deciding by that bring?

    python benchmarks/policy_matching_length.py --model TARGET --quantization int8 \\
        --train TRACE... --held-out TRACE... --out RESULT.md

SpecInfer's first version (arXiv 2305.09781v1) has a predictor that is asked before a draft is: from the
target's features at the root, how many tokens of each speculator's guess will be accepted. Here it is trained
on traces (`specinfer trace record`; --shape 3 is enough for --train) and compared with what the policy knows.

    hazard      P(level d of a speculator's guess holds the next token, given that the levels above did)
    inputs      cheap: what is known anyway of the last steps; final: the target's last hidden state that is
                known at the root, that of the row which chose the root; taps: those of two earlier layers
    predictors  linear, and MLPs of 16, 64, 256 and 64+64 units, one output a speculator and level
    counts      what the policy has instead: for a draft how often each level was right, fading; for guesses
                that cost nothing how often guesses as sure as these were

Held-out texts, of prompts nobody was trained on, give log-loss, AUC and calibration error, and are played
without a model under policies that take their hazards from predictors, from counts, or from the truth. All
is paired, with 95% intervals over prompts. Hidden states are computed by one pass over each text and kept
beside its trace.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from matching_length.places import LEVELS, Floats, Known, hear, hidden, joined, known
from matching_length.policies import ByHazards, guarded, truth
from matching_length.predictors import Predictor, fit, judged, microseconds, untrained
from numpy.typing import NDArray
from study import REQUIRED, Study, parser, row, run, settings_of

from specinfer.config import NO_SPECULATION
from specinfer.replay.baselines import play_oracle
from specinfer.replay.paired import speedup
from specinfer.replay.replay import Part, counting_policy, play
from specinfer.replay.trace import Trace
from specinfer.replay.trace_store import read_trace
from specinfer.speculate.policy.fixed_policy import FixedPolicy
from specinfer.speculate.policy.speculation_policy import SpeculationPolicy

SIZES: Final[dict[str, tuple[int, ...]]] = {
    "linear": (),
    "16": (16,),
    "64": (64,),
    "256": (256,),
    "64+64": (64, 64),
}  # hidden units
INPUTS: Final = ("cheap", "final", "cheap + final", "cheap + final + taps")
NAMES: Final = tuple(f"{inputs}, {size}" for inputs in INPUTS for size in SIZES)
RULES: Final[dict[str, dict[str, bool]]] = {
    "level by level": {"ahead": False, "lookups": False},
    "ahead": {"ahead": True, "lookups": False},
    "lookups": {"ahead": False, "lookups": True},
}


class Deciding(Protocol):
    """A policy that counts the steps it has decided: the ensemble goes on without one that fails."""

    steps: int


def main() -> None:
    options = parser(__doc__, model=REQUIRED, quantization="none")
    traces: dict[str, Any] = {"nargs": "+", "type": Path, "metavar": "TRACE", "required": True}
    options.add_argument("--train", help="traces that predictors learn from", **traces)
    options.add_argument(
        "--held-out", help="traces they are tried on, kind-00, kind-01, ...: one workload", **traces
    )
    args = options.parse_args()

    study = Study("matching-length", args.out, settings_of(args))
    hear(args.model, args.quantization, [*args.train, *args.held_out])
    held_out = {path.stem: read_trace(path) for path in args.held_out}
    asked = {text.prompt for trace in held_out.values() for text in trace.texts}
    train = joined([known(read_trace(path), hidden(path), without=asked) for path in args.train])
    pairs = zip(args.held_out, held_out.values(), strict=True)
    test = joined([known(trace, hidden(path)) for path, trace in pairs])
    if "times" not in study.cells:
        study.keep("times", {"us": times(test)})
    found: dict[str, tuple[Predictor, float]] = {}  # what was trained in this run

    def trained(name: str) -> tuple[Predictor, float]:
        if name not in found:
            inputs, size = name.rsplit(", ", 1)
            found[name] = fit(train, train.inputs(inputs), SIZES[size])
        return found[name]

    for name in NAMES:
        if f"predictor {name}" not in study.cells:
            predictor, validation = trained(name)
            cell = judged(predictor(test.inputs(name.rsplit(", ", 1)[0])), test, predictor.outputs)
            study.keep(f"predictor {name}", {**cell, "validation": validation, "weights": predictor.size})
            print(f"{name}: {cell['of']}", flush=True)
    for name, of_all in (("counts", test.counted), ("drawn", test.drawn)):
        if name not in study.cells:
            study.keep(name, judged(of_all, test, tuple(of_all)))
    if "data" not in study.cells:
        study.keep("data", {"train": sizes_of(train), "held-out": sizes_of(test)})
    for workload, parts in workloads(held_out).items():
        if workload not in study.cells:
            best = {name: trained(name)[0] for name in best_of(study.cells)}
            study.keep(workload, played(parts, held_out, test, best))
            print(workload, study.cells[workload]["ratios"], flush=True)
    study.write(page(study.cells, args))


def workloads(traces: Mapping[str, Trace]) -> dict[str, list[tuple[str, int]]]:
    """Texts by trace and number, in the order they are played: each kind alone, and all in turns.

    Traces are of one kind whose names differ in a number behind a dash alone.
    """
    kinds: dict[str, list[tuple[str, int]]] = {}
    for name, trace in traces.items():
        texts = [(name, i) for i in range(len(trace.texts))]
        kinds.setdefault(re.sub(r"-\d+$", "", name), []).extend(texts)
    turns = [text for turn in zip_longest(*kinds.values()) for text in turn if text is not None]
    together = len(kinds) > 1 and len({trace.engine for trace in traces.values()}) == 1
    return {**kinds, **({"all in turns": turns} if together else {})}


def played(
    order: Sequence[tuple[str, int]],
    traces: Mapping[str, Trace],
    test: Known,
    predictors: Mapping[str, Predictor],
) -> dict[str, Any]:
    """Seconds of each text under every policy, and each policy's speed over the present one's."""
    parts = [Part([(traces[name], number) for name, number in order])]
    first = traces[order[0][0]]
    wheres = _places_of(order, traces, test)

    def given(of: Mapping[str, Floats]) -> list[Mapping[str, Floats]]:
        padded = [
            {name: np.full((size, LEVELS), np.nan, dtype=np.float32) for name in of} for _, size in wheres
        ]
        for one, (rows, _) in zip(padded, wheres, strict=True):
            for name, values in of.items():
                one[name][1 : 1 + len(rows)] = values[rows]
        return list[Mapping[str, Floats]](padded)

    drafts = tuple(first.drafts)
    sources: dict[str, Mapping[str, Floats]] = {"counts": {}}
    sources |= {
        name: predictor(test.inputs(name.rsplit(", ", 1)[0])) for name, predictor in predictors.items()
    }
    sources["truth"] = {name: truth(hits) for name, hits in test.hits.items()}
    seconds: dict[str, list[float]] = {
        "none": seconds_of(parts, FixedPolicy(), plain=True),
        "present": seconds_of(parts, counting_policy(first, first.speculation)),
        "always": seconds_of(parts, FixedPolicy()),
    }
    for source, of in sources.items():
        for rule, kinds in RULES.items():
            if (source == "counts" and rule != "ahead") or (rule != "lookups" and not drafts):
                continue
            policy = ByHazards(first, given(of) if of else (), **kinds)
            seconds[f"{rule}: {source}"] = seconds_of(parts, guarded(policy), inner=policy)
    oracle = play_oracle(parts, first.speculation)
    return {
        "texts": len(order),
        "tokens": sum(len(traces[name].texts[number].output) for name, number in order),
        "seconds": {name: sum(each) for name, each in seconds.items()},
        "oracle": sum(seconds["present"]) / oracle.seconds,
        "ratios": {name: ratio(seconds["present"], each) for name, each in seconds.items()},
    }


def _places_of(
    order: Sequence[tuple[str, int]], traces: Mapping[str, Trace], test: Known
) -> list[tuple[NDArray[np.int64], int]]:
    """The rows of `test` that are of each text, and how many places the text has."""
    first, number = {}, 0
    for name, trace in traces.items():
        first[name] = number
        number += len(trace.texts)
    return [
        (np.flatnonzero(test.texts == first[name] + i), len(traces[name].texts[i].output))
        for name, i in order
    ]


def seconds_of(
    parts: Sequence[Part], policy: SpeculationPolicy, *, plain: bool = False, inner: Deciding | None = None
) -> list[float]:
    """Seconds of each text, played one after the other; `inner` has decided to the end."""
    came = play(parts, policy, speculation=NO_SPECULATION if plain else None)
    if inner is not None and inner.steps != came.passes:
        raise AssertionError(f"a policy decided {inner.steps} of {came.passes} steps, then it failed")
    return came.of_texts


def ratio(present: Sequence[float], other: Sequence[float]) -> tuple[float, float, float]:
    """How many times as quick the same texts are as under the present policy, with a 95% interval."""
    found = speedup(present, other)
    return found.ratio, found.low, found.high


def best_of(cells: Mapping[str, Any]) -> list[str]:
    """Of each kind of input the size that was best on texts it did not learn from, held-out ones unseen."""
    of = [[name for name in NAMES if name.rsplit(", ", 1)[0] == inputs] for inputs in INPUTS]
    return [min(names, key=lambda one: cells[f"predictor {one}"]["validation"]) for names in of]


def times(test: Known) -> dict[str, list[float]]:
    """Microseconds of a prediction for 1 request and for 8, by predictor: whatever its weights are."""
    found: dict[str, list[float]] = {}
    for name in NAMES:
        inputs, size = name.rsplit(", ", 1)
        x = test.inputs(inputs)
        predictor = untrained(x.shape[1], SIZES[size], tuple(test.hits))
        found[name] = [microseconds(predictor, x, rows) for rows in (1, 8)]
    return found


def sizes_of(known: Known) -> dict[str, Any]:
    return {
        "texts": len(np.unique(known.texts)),
        "places": len(known.texts),
        "features": {"cheap": known.cheap.shape[1], "hidden": known.hidden.shape[2]},
        "first_hits": {name: float(np.nanmean(hits[:, 0])) for name, hits in known.hits.items()},
    }


def page(cells: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """Markdown: what predictors know, and what deciding by them brings."""
    data = cells["data"]
    train, test = data["train"], data["held-out"]
    lines = [
        f"# Matching lengths, predicted before anything is drawn: {Path(args.model).stem}",
        "",
        f"Trained on {train['texts']} texts of {train['places']} places, tried on {test['texts']} of "
        f"{test['places']}, of other prompts. Right at the first level: "
        + ", ".join(f"{name} {rate:.2f}" for name, rate in test["first_hits"].items())
        + ". Log-loss, AUC and calibration error are those of all levels that were reached; in brackets by "
        "how much the log-loss is below that of the policy's own counts, with a 95% interval over texts. "
        "`drawn` is what a draft's first pass tells of its first level: what the policy looks at next.",
    ]
    for name in test["first_hits"]:
        lines += ["", f"## {name}", ""]
        lines += [
            row("inputs, predictor", "log-loss", "AUC", "AUC, level 1", "error", "weights", "us, batch 1, 8")
        ]
        lines += [row(*["---"] * 7)]
        for cell_name, cell in cells.items():
            if name in cell.get("of", {}):
                shown = cell_name.removeprefix("predictor ")
                lines.append(_judged_row(shown, cell, cell["of"][name], cells["times"]["us"].get(shown, ())))
    lines += ["", "## Played", ""]
    lines += [
        "Speed of the same texts over the present policy's, by the cost curves in the traces and without the "
        "time of a prediction, with a 95% interval over texts. `ahead`: the depth is settled before a draft "
        "draws; `level by level`: after each level, as the policy does; `lookups`: so, and guesses that cost "
        "nothing are hoped for by hazards, too.",
    ]
    for name, cell in cells.items():
        if "ratios" in cell:
            lines += ["", f"{name}, {cell['texts']} texts of {cell['tokens']} tokens; the oracle: "]
            lines[-1] += f"{cell['oracle']:.3f}"
            lines += ["", row("hazards", "over the present policy", "tokens/s"), row(*["---"] * 3)]
            for policy, (mean, low, high) in cell["ratios"].items():
                speed = cell["tokens"] / cell["seconds"][policy]
                lines.append(row(policy, f"{mean:.3f} ({low:.3f} to {high:.3f})", f"{speed:.2f}"))
    return lines


def _judged_row(
    name: str, cell: Mapping[str, Any], of: Mapping[str, Any], microseconds: Sequence[float]
) -> str:
    below = ""
    if "below_counts" in of and name != "counts":
        mean, low, high = of["below_counts"]
        below = f" ({mean:+.4f}, {low:+.4f} to {high:+.4f})"
    return row(
        name,
        f"{of['log_loss']:.4f}{below}",
        *(f"{of[key]:.3f}" for key in ("auc", "auc_first", "error")),
        cell.get("weights", ""),
        ", ".join(f"{one:.0f}" for one in microseconds),
    )


if __name__ == "__main__":
    run(main)
