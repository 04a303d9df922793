"""Replays policies on ten workloads: traces of six kinds of text, and four combinations of them.

    python -m benchmarks.speculation.policy_traces --model TARGET --draft DRAFT --quantization int8 \
        --chat alpaca.jsonl --code humaneval.jsonl --maths gsm8k.jsonl --traces FOLDER --out RESULT.md

Traces are recorded once (benchmarks/replay/recorder.py), each kind in files of a few texts, so that an
interrupted run continues after the last file. Nothing is loaded if all exist:

    chat, code, maths   the prompts of a data set each, greedy
    edits               benchmarks/code_edits.toml, each with the old file as its prediction
    repeats             chat prompts, each sent three times in a row, at temperature 0.7
    adversarial         chat prompts and random tokens, alternating, at temperature 1.5

They are replayed without a model, on the clock of the traces, and so are

    mixed               chat, code, maths and edits, alternating
    phases              all of chat, then of code, then of edits
    ramp                mixed, 1 text at once, then 2, 4, 8, 16, 8, 4, 2, 1
    neighbour           chat, while another process takes a part of the machine from time to time

The page has each policy's speedup over no speculation on the same texts, that of the engine's policy over the
best fixed choice in hindsight, 95% intervals over texts, and its choices. Traces hold token ids of prompts
and answers, and are not kept in git.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.replay.baselines import best_fixed
from benchmarks.replay.choices import Choices, mean_choices
from benchmarks.replay.oracle import play_oracle
from benchmarks.replay.recorder import record
from benchmarks.replay.replay import (
    POLICIES,
    Kind,
    Phase,
    Played,
    mixed,
    play,
    play_without,
    speculation_of,
    speedup,
    whole,
)
from benchmarks.replay.trace import Trace, read_trace, write_trace
from benchmarks.speculation.prediction import LONGEST_PROMPT, read_edits
from benchmarks.study import REQUIRED, Study, natural, parser, row, run, settings_of
from specinfer import LLM, SamplingParams
from specinfer.engine.intake import Prompt
from specinfer.progress import ProgressBar
from specinfer.report.dataset import Dataset, read_dataset
from specinfer.request import Request
from specinfer.speculate.drafts.growth import Shape
from specinfer.tree.expansion import Expansion

PART: Final = 8  # texts per file
RANDOM_TOKENS: Final = 48  # length of a random prompt
COLUMNS: Final = ("fixed", "cost", "best fixed", "oracle")
SETTLED: Final = 200  # steps after which a policy should have learned its workload


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of a workload, and its parameters."""

    prompt: str | Sequence[int]  # a user's message, or token ids
    params: SamplingParams


def main() -> None:
    options = parser(__doc__, model=REQUIRED, draft=[], quantization="none", max_tokens=160)
    for name in ("chat", "code", "maths"):
        options.add_argument(f"--{name}", type=Path, required=True, metavar="FILE.jsonl", help="prompts")
    options.add_argument("--traces", type=Path, required=True, metavar="FOLDER", help="folder of the traces")
    options.add_argument(
        "--shape",
        type=Expansion.parse,
        action="append",
        default=[],
        metavar="K1,K2,...",
        help="recorded shape of drafts' trees; repeatable (default: two, 8 levels deep)",
    )
    options.add_argument("--texts", type=natural, default=128, help="of each kind (default 128)")
    args = options.parse_args()

    study = Study("policies", args.out, settings_of(args, without=("traces", "shape")))
    for name, parts in workloads(recorded(args)).items():
        if name not in study.cells:
            study.keep(name, measured(parts))
            print(row_of(name, study.cells[name]), flush=True)
    study.write(page(study.cells, args))


def recorded(args: argparse.Namespace) -> dict[str, list[Trace]]:
    """Return the traces of each kind; records those missing in the folder."""
    datasets = {name: read_dataset(getattr(args, name)) for name in ("chat", "code", "maths")}
    questions = questions_of(datasets, args.texts, args.max_tokens)
    args.traces.mkdir(parents=True, exist_ok=True)
    files = {
        kind: [args.traces / f"{kind}-{first // PART:02}.npz" for first in range(0, len(asked), PART)]
        for kind, asked in questions.items()
    }
    missing = [
        (kind, i) for kind, of_kind in files.items() for i, file in enumerate(of_kind) if not file.exists()
    ]
    llm = build(args) if missing else None
    for kind, i in missing:
        assert llm is not None
        asked = questions[kind][i * PART : (i + 1) * PART]
        requests = requests_of(llm, asked, i)
        rule = llm.config.speculation.draw_rule
        trace = record(
            llm, requests, shapes=[Shape(plan, rule) for plan in args.shape], progress=ProgressBar()
        )
        write_trace(files[kind][i], trace)
        print(f"{files[kind][i].name}: {trace.places} tokens", flush=True)
    return {kind: [read_trace(file) for file in of_kind] for kind, of_kind in files.items()}


def build(args: argparse.Namespace) -> LLM:
    """Return an LLM with all speculators; policies choose among them."""
    return LLM(
        args.model,
        drafts=tuple(args.draft),
        quantization=args.quantization,
        draft_quantization=args.quantization if args.draft else "auto",
        lookup=True,
        max_context=LONGEST_PROMPT + args.max_tokens,
        max_batch_size=16,
    )


def questions_of(datasets: Mapping[str, Dataset], texts: int, max_tokens: int) -> dict[str, list[Question]]:
    """Return the questions of each recorded workload."""
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    asked = {
        name: [Question(one.turns[0], greedy) for one in dataset.conversations[:texts]]
        for name, dataset in datasets.items()
    }
    chat = asked["chat"]
    warm, hot = replace(greedy, temperature=0.7), replace(greedy, temperature=1.5)
    tokens = np.random.default_rng(0).integers(300, 20_000, (len(chat), RANDOM_TOKENS)).tolist()
    adversarial = [Question(nonsense if i % 2 else chat[i].prompt, hot) for i, nonsense in enumerate(tokens)]
    return {
        **asked,
        "edits": [Question(edit.prompt, replace(greedy, prediction=edit.source)) for edit in read_edits()][
            :texts
        ],
        "repeats": [Question(one.prompt, warm) for one in chat[: -(-texts // 3)] for _ in range(3)],
        "adversarial": adversarial,
    }


def requests_of(llm: LLM, asked: Sequence[Question], part: int) -> list[Request]:
    """Return the requests of some questions, each with its own seed; random tokens are in the vocabulary."""
    requests: list[Request] = []
    for i, question in enumerate(asked):
        params = replace(question.params, seed=part * PART + i)
        prompt: Prompt = question.prompt
        if isinstance(prompt, str) and llm.tokenizer.has_chat_template:
            [[admitted]] = llm.intake.conversations([[{"role": "user", "content": prompt}]], params)
        else:
            if not isinstance(prompt, str):
                prompt = [token % llm.models.target.config.vocab_size for token in prompt]
            [[admitted]] = llm.intake.prompts([prompt], params)
        requests.append(admitted.request)
    return requests


def workloads(traces: Mapping[str, Sequence[Trace]]) -> dict[str, list[Phase]]:
    """Return the ten workloads: six recorded ones and four combinations."""
    several = [traces[kind] for kind in ("chat", "code", "maths", "edits")]
    return {
        **{kind: whole([of_kind]) for kind, of_kind in traces.items()},
        "mixed": mixed(several),
        "phases": whole([traces[kind] for kind in ("chat", "code", "edits")]),
        "ramp": ramp(several),
        "neighbour": disturbed(whole([traces["chat"]])),
    }


def ramp(kinds: Sequence[Kind], sizes: Sequence[int] = (1, 2, 4, 8, 16, 8, 4, 2, 1)) -> list[Phase]:
    """Return texts of all kinds, alternating, in parts of about equal length with these batch sizes."""
    [turns] = mixed(kinds)
    ends = [len(turns.texts) * i // len(sizes) for i in range(len(sizes) + 1)]
    parts = zip(sizes, pairwise(ends), strict=True)
    return [Phase(turns.texts[start:end], size) for size, (start, end) in parts if start < end]


def disturbed(parts: Sequence[Phase], slowdown: float = 1.8, texts: int = 4) -> list[Phase]:
    """Return the parts with a slowdown during every other group of `texts` texts."""
    return [
        Phase(part.texts[start : start + texts], part.at_once, slowdown if turn % 2 else 1.0)
        for part in parts
        for turn, start in enumerate(range(0, len(part.texts), texts))
    ]


def measured(parts: Sequence[Phase]) -> dict[str, Any]:
    """Return the result of each policy on a workload, as plain JSON values; ratios with intervals."""
    trace = parts[0].texts[0][0]
    speculation, fixed = (speculation_of(name, trace.speculation) for name in ("cost", "fixed"))
    choices = Choices()
    plain = play_without(parts)
    played: dict[str, Played] = {
        "fixed": play(parts, POLICIES["fixed"](trace, fixed), speculation=fixed),
        "cost": play(parts, POLICIES["cost"](trace, speculation), speculation=speculation, on_step=choices),
    }
    choice, best = best_fixed(parts, speculation)
    if choice is not None and best is not None:
        played["best fixed"] = best
    played["oracle"] = oracle = play_oracle(parts, speculation)
    cell: dict[str, Any] = {
        "texts": len(plain.of_texts),
        "tokens": plain.tokens,
        "plain_per_second": plain.tokens_per_second,
        "over_none": {name: interval(plain.of_texts, one.of_texts) for name, one in played.items()},
        "tokens_per_step": {name: one.tokens_per_step for name, one in played.items()},
        "chosen": asdict(mean_choices(choices.steps)),
    }
    if choice is not None and best is not None:
        cost, first = played["cost"], settled(choices)
        gap = best.seconds - oracle.seconds
        cell |= {
            "choice": asdict(choice),
            "over_best": interval(best.of_texts, cost.of_texts),
            "over_best_settled": interval(best.of_texts[first:], cost.of_texts[first:]),
            "gap_closed": (best.seconds - cost.seconds) / gap if gap > 0 else None,
        }
    return cell


def interval(before: Sequence[float], after: Sequence[float]) -> list[float] | None:
    """Return a ratio of seconds and its 95% interval; None without texts."""
    if not before:
        return None
    found = speedup(before, after)
    return [found.ratio, found.low, found.high]


def settled(choices: Choices) -> int:
    """Return the first text that starts after SETTLED steps."""
    return max(step.text for step in choices.steps[:SETTLED]) + 1


def page(cells: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """Return Markdown: tables with a row per workload."""
    drafts = ", ".join(Path(draft).stem for draft in args.draft) or "no draft"
    return [
        f"# Policies of speculation on ten workloads: {Path(args.model).stem} with {drafts}",
        "",
        f"{args.quantization} weights, lookups on, {args.max_tokens} tokens at most. Speed "
        "over no speculation by the cost curves in the traces, without the time that Python takes to guess, "
        "with the 95% interval over texts, which are paired.",
        "",
        row("workload", "texts", "tokens", "without, tok/s", *COLUMNS),
        row(*["---"] * (len(COLUMNS) + 4)),
        *(row_of(name, cell) for name, cell in cells.items()),
        "",
        "The engine's own policy over the best fixed choice in hindsight: all texts, those that begin behind "
        f"{SETTLED} steps, and the part of the way from there to the oracle, which knows the texts.",
        "",
        row("workload", "cost over best fixed", "settled", "of the way", "the best fixed choice"),
        row(*["---"] * 5),
        *(over_best(name, cell) for name, cell in cells.items() if "choice" in cell),
        "",
        "What it has chosen, an average step, and in how many of the steps whose guesses were verified:",
        "",
        row("workload", "tokens", "nodes", "passes of drafts", "guesses of"),
        row(*["---"] * 5),
        *(chosen(name, cell["chosen"]) for name, cell in cells.items()),
    ]


def row_of(name: str, cell: Mapping[str, Any]) -> str:
    """Return a workload's row of the first table: ratio, interval, tokens per step in brackets."""
    speeds = [
        f"{ratio_text(cell['over_none'][policy])} ({cell['tokens_per_step'][policy]:.2f})"
        if policy in cell["over_none"]
        else ""
        for policy in COLUMNS
    ]
    return row(name, cell["texts"], cell["tokens"], f"{cell['plain_per_second']:.1f}", *speeds)


def over_best(name: str, cell: Mapping[str, Any]) -> str:
    """Return a workload's row of the second table."""
    choice, part = cell["choice"], cell["gap_closed"]
    best = f"{'+'.join(choice['speculators'])}, depth {choice['depth']}, {choice['nodes']} nodes"
    of_the_way = "" if part is None else f"{100 * part:.0f}%"
    return row(name, ratio_text(cell["over_best"]), ratio_text(cell["over_best_settled"]), of_the_way, best)


def chosen(name: str, average: Mapping[str, Any]) -> str:
    """Return a workload's row of the third table."""
    by = ", ".join(f"{who} {100 * part:.0f}%" for who, part in average["by"].items())
    figures = (f"{average[what]:.2f}" for what in ("tokens", "nodes", "passes"))
    return row(name, *figures, by)


def ratio_text(found: Sequence[float] | None) -> str:
    """Return a ratio and its interval, as text."""
    return "" if found is None else f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}]"


if __name__ == "__main__":
    run(main)
