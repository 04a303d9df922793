"""Ten workloads for policies of speculation: traces of six kinds of text, four more made of these.

    python benchmarks/policy_traces.py --model TARGET --draft DRAFT --quantization int8 \\
        --chat alpaca.jsonl --code humaneval.jsonl --maths gsm8k.jsonl --traces FOLDER --out RESULT.md

Recorded once (specinfer/replay/recorder.py), each kind in files of a few texts, so that an interrupted run
goes on behind the last file; nothing is loaded where all are there:

    chat, code, maths   the prompts of a data set each, greedy
    edits               benchmarks/code_edits, each with the old file as its prediction
    repeats             chat prompts, each asked three times in a row, at temperature 0.7
    adversarial         chat prompts and random tokens in turns, at temperature 1.5

Then everything is played, without a model, by the clock of the traces: these six, and

    mixed               chat, code, maths and edits in turns
    phases              all of chat, then of code, then of edits
    ramp                mixed, 1 text at once, then 2, 4, 8, 16, 8, 4, 2, 1
    neighbour           chat, while somebody else takes part of the machine every now and then

The page has the speed of each policy over no speculation, on the same texts. Traces hold token ids of prompts
and answers, and are not kept in git.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from prediction import LONGEST_PROMPT, read_edits
from study import REQUIRED, Study, natural, parser, row, run, settings_of

from specinfer import LLM, SamplingParams
from specinfer.engine.intake import Prompt
from specinfer.progress import ProgressBar
from specinfer.replay.baselines import best_fixed, play_oracle
from specinfer.replay.recorder import record
from specinfer.replay.replay import POLICIES, Part, Played, play, play_without
from specinfer.replay.trace import Trace
from specinfer.replay.trace_store import read_trace, write_trace
from specinfer.replay.workloads import disturbed, mixed, ramp, whole
from specinfer.report.dataset import Dataset, read_dataset
from specinfer.request import Request

PART: Final = 8  # texts of a file
RANDOM_TOKENS: Final = 48  # of a prompt that means nothing
COLUMNS: Final = ("fixed", "cost", "best fixed", "oracle")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt of a workload, and how it is answered."""

    prompt: str | Sequence[int]  # what a user says, or tokens as they stand
    params: SamplingParams


def main() -> None:
    options = parser(__doc__, model=REQUIRED, draft=[], quantization="none", max_tokens=160)
    for name in ("chat", "code", "maths"):
        options.add_argument(f"--{name}", type=Path, required=True, metavar="FILE.jsonl", help="prompts")
    options.add_argument("--traces", type=Path, required=True, metavar="FOLDER", help="where traces are kept")
    options.add_argument("--texts", type=natural, default=128, help="of each kind (default 128)")
    args = options.parse_args()

    study = Study("policies", args.out, settings_of(args, without=("traces",)))
    for name, parts in workloads(recorded(args)).items():
        if name not in study.cells:
            study.keep(name, measured(parts))
            print(row_of(name, study.cells[name]), flush=True)
    study.write(page(study.cells, args))


def recorded(args: argparse.Namespace) -> dict[str, list[Trace]]:
    """The traces of each kind, those recorded that are not in the folder yet."""
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
        trace = record(llm, requests_of(llm, asked, i), progress=ProgressBar())
        write_trace(files[kind][i], trace)
        print(f"{files[kind][i].name}: {trace.places} tokens", flush=True)
    return {kind: [read_trace(file) for file in of_kind] for kind, of_kind in files.items()}


def build(args: argparse.Namespace) -> LLM:
    """Everybody guesses: who of them is worth asking is what policies are to find out."""
    return LLM(
        args.model,
        drafts=tuple(args.draft),
        quantization=args.quantization,
        draft_quantization=args.quantization if args.draft else "none",
        ngram=True,
        suffix=True,
        max_context=LONGEST_PROMPT + args.max_tokens,
        max_batch_size=16,
    )


def questions_of(datasets: Mapping[str, Dataset], texts: int, max_tokens: int) -> dict[str, list[Question]]:
    """What is asked in each workload that is recorded."""
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
    """The requests of some questions, each with a seed of its own; random tokens within the vocabulary."""
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


def workloads(traces: Mapping[str, Sequence[Trace]]) -> dict[str, list[Part]]:
    """The ten workloads: six as they were recorded, four made of these."""
    several = [traces[kind] for kind in ("chat", "code", "maths", "edits")]
    return {
        **{kind: whole([of_kind]) for kind, of_kind in traces.items()},
        "mixed": mixed(several),
        "phases": whole([traces[kind] for kind in ("chat", "code", "edits")]),
        "ramp": ramp(several),
        "neighbour": disturbed(whole([traces["chat"]])),
    }


def measured(parts: Sequence[Part]) -> dict[str, Any]:
    """What each policy makes of a workload, as plain JSON values."""
    trace = parts[0].texts[0][0]
    speculation = trace.speculation
    plain = play_without(parts)
    played: dict[str, Played] = {
        name: play(parts, POLICIES[name](trace, speculation), speculation=speculation)
        for name in ("fixed", "cost")
    }
    choice, best = best_fixed(parts, speculation)
    if choice is not None and best is not None:
        played["best fixed"] = best
    played["oracle"] = play_oracle(parts, speculation)
    return {
        "tokens": plain.tokens,
        "plain_per_second": plain.tokens_per_second,
        "choice": None if choice is None else asdict(choice),
        "over_none": {name: plain.seconds / one.seconds for name, one in played.items()},
        "tokens_per_step": {name: one.tokens_per_step for name, one in played.items()},
    }


def page(cells: Mapping[str, Any], args: argparse.Namespace) -> list[str]:
    """Markdown: a row for each workload."""
    drafts = ", ".join(Path(draft).stem for draft in args.draft) or "no draft"
    return [
        f"# Policies of speculation on ten workloads: {Path(args.model).stem} with {drafts}",
        "",
        f"{args.quantization} weights, n-grams and suffix trees on, {args.max_tokens} tokens at most. Speed "
        "over no speculation by the cost curves in the traces, without the time that Python takes to guess; "
        "tokens per step in brackets.",
        "",
        row("workload", "tokens", "without, tok/s", *COLUMNS, "the best fixed choice"),
        row(*["---"] * (len(COLUMNS) + 4)),
        *(row_of(name, cell) for name, cell in cells.items()),
    ]


def row_of(name: str, cell: Mapping[str, Any]) -> str:
    """A workload's row of the table."""
    speeds = [
        f"{cell['over_none'][policy]:.3f} ({cell['tokens_per_step'][policy]:.2f})"
        if policy in cell["over_none"]
        else ""
        for policy in COLUMNS
    ]
    choice = cell["choice"]
    told = (
        ""
        if choice is None
        else f"{'+'.join(choice['speculators'])}, depth {choice['depth']}, {choice['nodes']} nodes"
    )
    return row(name, cell["tokens"], f"{cell['plain_per_second']:.1f}", *speeds, told)


if __name__ == "__main__":
    run(main)
