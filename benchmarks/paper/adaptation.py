"""How the policy adapts: kinds of text in turn, its choices step by step, and the best ones in hindsight."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

from benchmarks.paper.lab import Lab
from benchmarks.paper.plots import INK
from benchmarks.paper.question import Cells, Figure, Figures, Verdict
from benchmarks.study import shown, table
from specinfer import LLM, SamplingParams
from specinfer.engine.steps import TreeEvent
from specinfer.errors import UserError
from specinfer.sampling_params import SpeculationParams

Asked = tuple[str | list[int], SamplingParams]

ASKS: Final = "Does the policy adapt when the kind of text switches?"
_POLICY: Final = "policy"
_FIXED: Final[Mapping[str, Mapping[str, Any]]] = {  # the same speculators and tree in every step
    "none": {"enabled": False},
    "lookups": {"speculators": ("lookup",), "max_nodes": 16},
    "draft 1,1": {"speculators": ("draft",), "expansion": "1,1"},
    "draft 1,1,1,1": {"speculators": ("draft",), "expansion": "1,1,1,1"},
    "draft 1,1,3,1,1": {"speculators": ("draft",), "expansion": "1,1,3,1,1"},
    "both 1,1,1,1": {"expansion": "1,1,1,1"},
}
_EDIT: Final = (
    "{ask}\n\nThis is {file}:\n\n```\n{source}```\n\nAnswer with the whole changed file and nothing else."
)
_FEW: Final = 10  # steps at the ends of a segment that are compared


def keys(lab: Lab) -> list[str]:
    return lab.pick(full=["draft", "head"], quick=["head"], toy=["draft"])


def measure(lab: Lab, key: str) -> Figures:
    names = (lab.target, lab.draft) if key == "draft" else (lab.small, "smollm2-135m-head")
    common: dict[str, Any] = {"lookup": True, "max_context": 4096}
    with (
        lab.llm(names[0], names[1:], tree_size="cost", **common) as chooses,
        lab.llm(names[0], names[1:], tree_size="fixed", **common) as fixed,
    ):
        texts = _texts(lab, chooses.models.target.config.vocab_size)
        kinds = lab.pick(full=2, quick=1, toy=1) * [*texts]
        steps = lab.pick(full=50, quick=50, toy=6)
        return {"segments": [_segment(chooses, fixed, kind, texts[kind], steps) for kind in kinds]}


def _texts(lab: Lab, vocab: int) -> dict[str, Iterator[Asked]]:
    """Return endless prompts of each kind, with their parameters."""
    edits = tomllib.loads(Path(__file__).with_name("code_edits.toml").read_text(encoding="utf-8"))["edit"]
    random = np.random.default_rng(0).integers(300, 20_000, (20, 48)) % vocab
    greedy, hot = SamplingParams(temperature=0, max_tokens=64), SamplingParams(temperature=1.5, max_tokens=64)
    return {
        "chat": cycle((text, greedy) for text in lab.questions("Alpaca", 20)),
        "edits": cycle((_EDIT.format(**edit), replace(greedy, max_tokens=512)) for edit in edits),
        "nonsense": cycle((tokens, replace(hot, seed=n)) for n, tokens in enumerate(random.tolist())),
    }


def _segment(chooses: LLM, fixed: LLM, kind: str, texts: Iterator[Asked], steps: int) -> dict[str, Any]:
    """Return the policy's steps in texts of this kind, and the seconds of every way for the same tokens."""
    trace, seconds, tokens = list[list[int]](), dict.fromkeys([_POLICY, *_FIXED], 0.0), 0
    while len(trace) < steps:
        prompt, params = next(texts)
        events, made = _run(chooses, prompt, params, 1 + steps - len(trace))
        seconds[_POLICY] += events[-1][0] - events[0][0]  # the first step is the prompt's
        trace += [_choice(event) for _, event in events[1:]]
        tokens += len(made) - 1
        for way, options in _FIXED.items():
            own = replace(params, max_tokens=len(made), speculation=SpeculationParams.of(options))
            own = replace(own, cache_salt=way)  # its own cache: it finds no answer of another way
            again, same = _run(fixed, prompt, own, len(made))
            if same != made:
                raise UserError(f"{kind}: the text of {way!r} is not the policy's")
            seconds[way] += again[-1][0] - again[0][0]
    return {"kind": kind, "tokens": tokens, "seconds": seconds, "trace": trace}


def _run(
    llm: LLM, prompt: str | list[int], params: SamplingParams, steps: int
) -> tuple[list[tuple[float, TreeEvent]], tuple[int, ...]]:
    """Return the first steps of an answer, each with the time of its end, and their tokens."""
    events: list[tuple[float, TreeEvent]] = []
    llm.on_tree = lambda event: events.append((time.perf_counter(), event))
    chats = isinstance(prompt, str) and llm.tokenizer.has_chat_template
    message = {"role": "user", "content": prompt}
    outputs = llm.stream_chat([message], params) if chats else llm.stream(prompt, params)
    for output in outputs:
        count = sum(1 + len(event.acceptance.path) for _, event in events[:steps])
        if len(events) >= steps and len(output.token_ids) >= count:
            break
    outputs.close()
    return events[:steps], output.token_ids[:count]


def _choice(event: TreeEvent) -> list[int]:
    """Return the verified nodes of the draft, those of lookups alone, and the tokens of a step."""
    drafted = {draw.node for draw in event.tree.draws if draw.speculator == "draft"}
    return [len(drafted), event.tree.num_nodes - 1 - len(drafted), 1 + len(event.acceptance.path)]


def page(cells: Cells) -> list[str]:
    rows, said = [], []
    for key, cell in cells.items():
        for one in cell["segments"]:
            best, none, policy = _best(one["seconds"]), one["seconds"]["none"], one["seconds"][_POLICY]
            ends = one["trace"][:_FEW], one["trace"][-_FEW:]
            nodes = [", ".join(shown((fmean(step[n] for step in part) for part in ends), 1)) for n in (0, 1)]
            over = f"{none / policy:.2f}", f"{none / one['seconds'][best]:.2f} ({best})"
            rows.append((f"{key}, lookups", one["kind"], f"{one['tokens'] / none:.1f}", *over, *nodes))
        hindsight, single, way = _gains(cell)
        said += [
            f"With the {key} the policy makes {hindsight:.2f} times the tokens/s of the best fixed choice of "
            f"each segment, known only afterwards, and {single:.2f} times those of the best of all, {way}.",
            "",
        ]
    return [
        "The kind of text switches every 50 steps: chat, edits of code, and answers to random tokens at "
        "temperature 1.5. Each fixed choice makes the same tokens in turn with the policy, which chooses "
        "speculators and nodes in every step. The target's reading of prompts is not timed. As always, the "
        "policy starts with the costs and rates that earlier runs on the machine have learned.",
        *table(
            "speculators | text | none, tokens/s | policy over none | best fixed choice over none | draft's "
            f"nodes, first {_FEW} steps and last | lookups'",
            rows,
        ),
        *said,
    ]


def _best(seconds: Mapping[str, float]) -> str:
    return min(_FIXED, key=seconds.__getitem__)


def _gains(cell: Figures) -> tuple[float, float, str]:
    """Return the policy's speed over the best fixed choice of each segment, and over the best one of all."""
    segments = [one["seconds"] for one in cell["segments"]]
    whole = {way: sum(seconds[way] for seconds in segments) for way in segments[0]}
    hindsight, one = sum(seconds[_best(seconds)] for seconds in segments), _best(whole)
    return hindsight / whole[_POLICY], whole[one] / whole[_POLICY], one


def plot(cells: Cells, figure: Figure) -> None:
    for (key, cell), [axes] in zip(cells.items(), figure.subplots(len(cells), 1, squeeze=False), strict=True):
        steps = [step for one in cell["segments"] for step in one["trace"]]
        places, drafted, looked_up, tokens = range(len(steps)), *zip(*steps, strict=True)
        axes.bar(places, drafted, width=1, label="the draft's nodes")
        axes.bar(places, looked_up, width=1, bottom=drafted, label="lookups'")
        axes.plot(places, tokens, ".", markersize=3, color=INK, label="tokens")
        for number, one in enumerate(cell["segments"]):
            axes.annotate(one["kind"], (number * len(one["trace"]), 1), xycoords=("data", "axes fraction"))
        axes.set(xlabel="step", ylabel=f"nodes, {key}")
    figure.axes[0].legend()


def verdict(cells: Cells) -> Verdict:
    each = [f"{_gains(cell)[0]:.2f} with the {key}" for key, cell in cells.items()]
    return Verdict(f"speed over the best choices in hindsight: {', '.join(each)}")
