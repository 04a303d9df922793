"""Suffix speculation against n-gram against none: edits of code, and traffic that repeats itself.

    python benchmarks/suffix.py --model TARGET --dataset humaneval.jsonl --out RESULT.md

The data set's lines hold "prompt" (the head of a function) and "reference" (its body). Edits: the whole
function stands in the prompt with one asked change, so the answer repeats most of it. Traffic: each prompt is
asked, then again with another seed, then again with a small change; the texts of later rounds differ from
those before. The suffix speculator starts empty for the edits and for the traffic, keeps what it has seen
from round to round, and sees nothing of another row.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from provenance import provenance_lines

from specinfer import LLM, EngineConfig, RequestOutput, SamplingParams, SpeculationFigures
from specinfer.speculate.ngram import NgramSpeculator
from specinfer.speculate.speculator import Speculator
from specinfer.speculate.suffix import SuffixSpeculator

CHANGES = (  # one edit each, in turn
    "Rename the first parameter of the function to `value`, everywhere.",
    "Add a line at the beginning of the function body that prints its name.",
    "Remove the docstring.",
    "Raise a TypeError at the beginning of the body when the first argument is None.",
    "Change the indentation of the body to two spaces.",
)
SMALL_CHANGE = "Use short variable names."
SPECULATORS = ("none", "ngram", "suffix")


@dataclass(frozen=True)
class Round:
    """Some prompts and how they are sampled; the rounds of one workload share a speculator."""

    name: str
    prompts: list[str]
    params: list[SamplingParams]


@dataclass(frozen=True)
class Cell:
    """What one speculator made of one round."""

    figures: SpeculationFigures
    tokens: int
    seconds: float
    texts: list[tuple[int, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the target: folder, GGUF file or name")
    parser.add_argument("--dataset", required=True, type=Path, metavar="FILE.jsonl")
    parser.add_argument("--limit", type=int, default=40, help="functions of the data set (default 40)")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.7, help="of the traffic; edits are greedy")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    parser.add_argument("--out", type=Path, required=True, help="Markdown file")
    args = parser.parse_args()

    functions = read_functions(args.dataset, args.limit)
    workloads = [
        [edits(functions, args.max_tokens)],
        traffic([head for head, _ in functions], args.max_tokens, args.temperature),
    ]
    options = {"dtype": args.dtype, "max_batch_size": args.batch_size, "max_context": 4096}
    config = EngineConfig.from_options(args.model, options | {"tree_size": "fixed"})
    models = LLM(args.model, **options).models
    cells: dict[tuple[str, str], Cell] = {}
    for rounds in workloads:
        for name in SPECULATORS:
            llm = LLM.from_models(config, models, speculators_named(name))
            warm_up = SamplingParams(temperature=0, max_tokens=4, cache_salt="warm-up")
            llm.chat([{"role": "user", "content": "Hi"}], warm_up)
            for asked in rounds:
                cell = cells[asked.name, name] = run(llm, asked)
                print(f"{asked.name}, {name}: {cell.figures.tokens_per_step:.2f} tokens per step", flush=True)
    names = [asked.name for rounds in workloads for asked in rounds]
    args.out.write_text(markdown(cells, names, len(functions), args), encoding="utf-8")


def read_functions(path: Path, limit: int) -> list[tuple[str, str]]:
    """Heads and bodies of the first functions; exits with a line for a row that has neither."""
    functions: list[tuple[str, str]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        if not {"prompt", "reference"} <= row.keys():
            raise SystemExit(f'{path} line {number} needs "prompt" and "reference", has {sorted(row)}')
        functions.append((row["prompt"], row["reference"]))
    return functions[:limit]


def edits(functions: Sequence[tuple[str, str]], max_tokens: int) -> Round:
    prompts = [
        f"{CHANGES[i % len(CHANGES)]} Answer with the whole changed code and nothing else.\n\n"
        f"```python\n{head}{body}```"
        for i, (head, body) in enumerate(functions)
    ]
    params = SamplingParams(temperature=0, seed=0, max_tokens=max_tokens)
    return Round("edits", prompts, [params] * len(prompts))


def traffic(heads: Sequence[str], max_tokens: int, temperature: float) -> list[Round]:
    prompts = [f"Complete this function.\n\n```python\n{head}```" for head in heads]
    changed = [f"{prompt}\n{SMALL_CHANGE}" for prompt in prompts]

    def seeded(first: int) -> list[SamplingParams]:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
        return [replace(params, seed=first + i) for i in range(len(prompts))]

    return [
        Round("traffic, asked first", prompts, seeded(0)),
        Round("again, another seed", prompts, seeded(10_000)),
        Round("again, changed a little", changed, seeded(20_000)),
    ]


def speculators_named(name: str) -> list[Speculator]:
    if name == "ngram":
        return [NgramSpeculator(shortest=1, longest=4, branches=2, depth=15)]
    return [SuffixSpeculator()] if name == "suffix" else []


def run(llm: LLM, asked: Round) -> Cell:
    began = time.perf_counter()
    conversations = [[{"role": "user", "content": prompt}] for prompt in asked.prompts]
    outputs: list[RequestOutput] = llm.chat(conversations, asked.params)
    seconds = time.perf_counter() - began
    total = SpeculationFigures()
    for output in outputs:
        total.add(output.figures)
    texts = [output.token_ids for output in outputs]
    return Cell(total, sum(map(len, texts)), seconds, texts)


def markdown(
    cells: dict[tuple[str, str], Cell], names: Sequence[str], functions: int, args: argparse.Namespace
) -> str:
    lines = [
        f"# Suffix speculation, n-gram speculation and none: {Path(args.model).name}",
        "",
        f"{functions} functions, at most {args.max_tokens} tokens each, batch {args.batch_size}; edits are "
        f"greedy, traffic has temperature {args.temperature:g}. n-gram: 2 branches of 15. Tokens per step "
        "leave the prefill out; tokens/s includes it. Drafted: nodes per step beside the root. Same text: "
        "answers equal to those without speculation, token by token.",
        "",
        "| workload | speculator | tokens per step | drafted | tokens/s | speed | same text |",
        "|---|---|---|---|---|---|---|",
    ]
    for round_name in names:
        plain = cells[round_name, "none"]
        for name in SPECULATORS:
            cell = cells[round_name, name]
            speed, plain_speed = cell.tokens / cell.seconds, plain.tokens / plain.seconds
            same = sum(a == b for a, b in zip(cell.texts, plain.texts, strict=True))
            lines.append(
                f"| {round_name} | {name} | {cell.figures.tokens_per_step:.2f} "
                f"| {cell.figures.drafted_tokens / max(cell.figures.steps, 1):.1f} "
                f"| {speed:.1f} | {speed / plain_speed:.2f}x | {same} of {len(cell.texts)} |"
            )
    return "\n".join([*lines, "", *provenance_lines(), ""])


if __name__ == "__main__":
    main()
