"""Measures the share of a step outside of forward passes: scheduling, proposing, verifying, detokenizing.

    python -m benchmarks.speculation.overhead --model TARGET --dataset alpaca.jsonl

There are two loads, each without speculation and with lookups: one greedy request at a time, and a batch of
requests sampled with penalties. Shares are of the wall time of the whole run, including time between steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.study import (
    REQUIRED,
    Study,
    ask,
    parser,
    questions_of,
    row,
    run,
    settings_of,
    total_figures,
    without_speculation,
)
from specinfer import LLM, SamplingParams
from specinfer.engine.steps import Stage

GREEDY: Mapping[str, Any] = {"temperature": 0.0}
SAMPLED: Mapping[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.95,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
}


def main() -> None:
    options = parser(
        __doc__,
        model=REQUIRED,
        dtype="auto",
        quantization="int8",
        dataset=REQUIRED,
        limit=16,
        max_tokens=64,
        batch_size=8,
    )
    args = options.parse_args()
    questions = questions_of(args.dataset, args.limit)
    study = Study("overhead", args.out, settings_of(args))
    for batch, kind, asked in ((1, "greedy", GREEDY), (args.batch_size, "sampling, penalties", SAMPLED)):
        name = f"batch {batch}, {kind}"
        if f"{name}, lookups" in study.cells:
            continue
        guessing = LLM(
            args.model, dtype=args.dtype, quantization=args.quantization, max_batch_size=batch, lookup=True
        )
        params = [SamplingParams(**asked, seed=i, max_tokens=args.max_tokens) for i in range(len(questions))]
        for speculation, llm in (("none", without_speculation(guessing)), ("lookups", guessing)):
            study.keep(f"{name}, {speculation}", measure(llm, questions, params))
    print(study.write(page(study.settings, study.cells)))


def measure(llm: LLM, questions: Sequence[str], params: Sequence[SamplingParams]) -> dict[str, Any]:
    """Return the time of answering by stage, after a warm-up."""
    ask(llm, questions[:2], params[:2])
    before, began = llm.statistics(), time.perf_counter()
    outputs = ask(llm, questions, params)
    wall = time.perf_counter() - began
    done = llm.statistics().since(before)
    figures = total_figures(outputs)
    return {
        "seconds": wall,
        "steps": done.steps,
        "output_tokens": sum(len(output.token_ids) for output in outputs),
        "tokens_per_step": figures.tokens_per_step,
        "stages": {str(stage): done.stage_seconds[stage] for stage in Stage},
    }


def page(settings: Mapping[str, Any], cells: Mapping[str, Any]) -> list[str]:
    names = [str(stage) for stage in Stage]
    columns = ["load", "tokens/s", "tokens per step", "ms per step", *names, "outside", "all but forwards"]
    return [
        f"# What is not a forward pass: {settings['model']}, {settings['quantization']}",
        "",
        f"{settings['limit']} prompts, {settings['max_tokens']} tokens at most.",
        "",
        row(*columns),
        "|" + "---|" * len(columns),
        *(row_of(name, cell, names) for name, cell in cells.items()),
    ]


def row_of(name: str, cell: Mapping[str, Any], stages: Sequence[str]) -> str:
    wall, spent = cell["seconds"], cell["stages"]
    outside = wall - sum(spent.values())
    shares = [f"{spent[stage] / wall:.1%}" for stage in stages]
    return row(
        name,
        f"{cell['output_tokens'] / wall:.1f}",
        f"{cell['tokens_per_step']:.2f}",
        f"{1000 * wall / cell['steps']:.2f}",
        *shares,
        f"{outside / wall:.1%}",
        f"{1 - spent[Stage.FORWARD] / wall:.1%}",
    )


if __name__ == "__main__":
    run(main)
