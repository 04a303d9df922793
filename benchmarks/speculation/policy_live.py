"""Compares all speculators under the policy with each alone and with none, live.

    python -m benchmarks.speculation.policy_live --model TARGET --draft DRAFT --quantization int8 \
        --chat alpaca.jsonl --code humaneval.jsonl --maths gsm8k.jsonl --out RESULT.md

Measured in wall time: each text of six kinds (see speculation/policy_traces.py) is generated in every way
before the next one, in a varying order, so that a slow hour of the machine affects all ways. Texts must be
equal. Each way is an engine that has learned from the same texts; engines share their weights, and the first
text of a kind does not count.

    none      no speculation
    lookup    lookups in the text and in earlier answers
    lookups   these, and the caller's predictions
    draft     the draft
    all       all of these
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.replay.replay import speedup
from benchmarks.speculation.policy_traces import Question, build, questions_of, ratio_text
from benchmarks.study import REQUIRED, Study, natural, parser, row, run, settings_of, without_speculation
from specinfer import LLM, RequestOutput
from specinfer.engine.intake import Prompt
from specinfer.errors import UserError
from specinfer.report.dataset import read_dataset
from specinfer.speculation_config import SpeculationConfig

WAYS: Final = ("none", "lookup", "lookups", "draft", "all")


def main() -> None:
    options = parser(__doc__, model=REQUIRED, draft=[], quantization="none", max_tokens=64)
    for name in ("chat", "code", "maths"):
        options.add_argument(f"--{name}", type=Path, required=True, metavar="FILE.jsonl", help="prompts")
    options.add_argument(
        "--texts", type=natural, default=8, help="texts of each kind, and one more (default 8)"
    )
    args = options.parse_args()
    study = Study("policy-live", args.out, settings_of(args))
    datasets = {name: read_dataset(getattr(args, name)) for name in ("chat", "code", "maths")}
    asked = questions_of(datasets, args.texts + 1, args.max_tokens)
    ways: dict[str, LLM] = {}
    for kind, questions in asked.items():
        if kind not in study.cells:
            ways = ways or engines(build(args), drafted=bool(args.draft))
            study.keep(kind, measured(ways, questions))
            print(row_of(kind, study.cells[kind]), flush=True)
            study.write(page(study.cells, args))


def engines(everybody: LLM, *, drafted: bool) -> dict[str, LLM]:
    """Return an engine for each way; without a draft they use only lookups."""
    config, speculation = everybody.config, everybody.config.speculation
    others = {"lookup": SpeculationConfig(lookup=True)}
    if drafted:
        others["lookups"] = SpeculationConfig(lookup=True)
        others["draft"] = replace(speculation, lookup=False)
    found = {name: everybody.variant(replace(config, speculation=one)) for name, one in others.items()}
    return {"none": without_speculation(everybody), **found, "all": everybody}


def measured(ways: Mapping[str, LLM], questions: list[Question]) -> dict[str, Any]:
    """Return seconds of every text but the first, in every way; raises UserError if texts differ."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    steps, tokens = dict.fromkeys(ways, 0), 0
    for number, question in enumerate(questions):
        texts = dict[str, tuple[int, ...]]()
        first = number % len(ways)
        for name in [*ways][first:] + [*ways][:first]:
            began = time.perf_counter()
            output = answer(ways[name], question, number, predicted=name in ("lookups", "all"))
            taken = time.perf_counter() - began
            texts[name] = tuple(output.token_ids)
            if number:
                seconds[name].append(taken)
                steps[name] += output.figures.steps
        if len({*texts.values()}) > 1:
            raise UserError(f"text {number} is another one in some way: {texts}")
        tokens += len(texts["none"]) if number else 0
    return {
        "texts": len(questions) - 1,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_step": {name: tokens / count for name, count in steps.items()},
    }


def answer(llm: LLM, question: Question, seed: int, *, predicted: bool) -> RequestOutput:
    """Return one answer, with the caller's prediction if `predicted`."""
    params = replace(question.params, seed=seed)
    if not predicted:
        params = replace(params, prediction=None)
    if isinstance(question.prompt, str) and llm.tokenizer.has_chat_template:
        return llm.chat([[{"role": "user", "content": question.prompt}]], params)[0]
    prompt: Prompt = question.prompt
    if not isinstance(prompt, str):
        prompt = [token % llm.models.target.config.vocab_size for token in prompt]
    return llm.generate([prompt], params)[0]


def page(cells: Mapping[str, Any], args: Any) -> list[str]:
    drafts = ", ".join(Path(draft).stem for draft in args.draft) or "no draft"
    ways = [name for name in WAYS if any(name in cell["seconds"] for cell in cells.values())]
    return [
        f"# Everybody together, live: {Path(args.model).stem} with {drafts}",
        "",
        f"{args.quantization} weights, one request at a time, {args.max_tokens} tokens at most, each text in "
        "every way before the next one; speed over no speculation, tokens a step in brackets, and over the "
        "best of the others, with 95% intervals over texts, which are paired. All texts were the same.",
        "",
        row("kind", "texts", "tokens", "without, tok/s", *ways[1:], "all over the best of them alone"),
        row(*["---"] * (len(ways) + 4)),
        *(row_of(kind, cell) for kind, cell in cells.items()),
    ]


def row_of(kind: str, cell: Mapping[str, Any]) -> str:
    seconds = cell["seconds"]
    ratios = [
        f"{over(seconds['none'], seconds[name])} ({cell['tokens_per_step'][name]:.2f})"
        for name in seconds
        if name != "none"
    ]
    alone = [name for name in seconds if name not in ("none", "all")]
    best = min(alone, key=lambda name: sum(seconds[name]), default=None)
    beside = "" if best is None else f"{over(seconds[best], seconds['all'])} ({best})"
    rate = cell["tokens"] / sum(seconds["none"])
    return row(kind, cell["texts"], cell["tokens"], f"{rate:.1f}", *ratios, beside)


def over(before: list[float], after: list[float]) -> str:
    """Return a ratio of seconds with its interval, as text."""
    found = speedup(before, after)
    return ratio_text([found.ratio, found.low, found.high])


if __name__ == "__main__":
    run(main)
