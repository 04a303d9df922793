"""Suffix speculation against n-gram against none: edits of code, and traffic that repeats itself.

    python benchmarks/suffix.py --model TARGET --dataset humaneval.jsonl --out RESULT.md

The data set's lines hold "prompt" (the head of a function) and "reference" (its body). Edits: the whole
function stands in the prompt with one asked change, so the answer repeats most of it. Traffic: each prompt is
asked, then again with another seed, then again with a small change; the texts of later rounds differ from
those before. The suffix speculator starts empty for the edits and for the traffic, keeps what it has seen
from round to round, and sees nothing of another row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from study import REQUIRED, Study, ask, digest, in_turn, parser, row, run, settings_of, total_figures

from specinfer import LLM, SamplingParams
from specinfer.errors import DatasetError
from specinfer.kernels.library import Library
from specinfer.report.dataset import Conversation, read_dataset
from specinfer.speculate.lookups.ngram import NgramSpeculator
from specinfer.speculate.lookups.suffix import SuffixSpeculator
from specinfer.speculate.speculator import Speculator

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


def main() -> None:
    options = parser(
        __doc__, model=REQUIRED, dataset=REQUIRED, limit=40, max_tokens=256, batch_size=1, dtype="auto"
    )
    options.add_argument("--temperature", type=float, default=0.7, help="of the traffic; edits are greedy")
    args = options.parse_args()

    study = Study("suffix", args.out, settings_of(args))
    functions = read_functions(in_turn([read_dataset(path) for path in args.dataset], args.limit))
    workloads = [
        [edits(functions, args.max_tokens)],
        traffic([head for head, _ in functions], args.max_tokens, args.temperature),
    ]
    base: LLM | None = None
    for rounds in workloads:
        for name in SPECULATORS:
            # The rounds of a workload share a speculator: it runs as a whole, or is there as a whole.
            if all(key(asked, name) in study.cells for asked in rounds):
                continue
            base = base or LLM(
                args.model,
                dtype=args.dtype,
                max_batch_size=args.batch_size,
                max_context=4096,
                tree_size="fixed",
                ngram=False,
            )
            llm = LLM.from_models(
                base.config, base.models, speculators_named(name, base.models.target.kernels.library)
            )
            ask(llm, ["Hi"], SamplingParams(temperature=0, max_tokens=4, cache_salt="warm-up"))
            for asked in rounds:
                cell = measure(llm, asked)
                study.keep(key(asked, name), cell)
                print(f"{asked.name}, {name}: {cell['tokens_per_step']:.2f} tokens per step", flush=True)
    names = [asked.name for rounds in workloads for asked in rounds]
    print(study.write(page(study, names, len(functions))))


def key(asked: Round, speculator: str) -> str:
    return f"{asked.name}|{speculator}"


def read_functions(conversations: Sequence[Conversation]) -> list[tuple[str, str]]:
    """Heads and bodies of functions; raises DatasetError for a row without a body."""
    for conversation in conversations:
        if conversation.reference is None:
            raise DatasetError(f'row {conversation.name} has no "reference"; give the body of its function')
    return [(c.turns[0], c.reference or "") for c in conversations]


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


def speculators_named(name: str, library: Library | None) -> list[Speculator]:
    if name == "ngram":
        return [NgramSpeculator(shortest=1, longest=4, branches=2, depth=15, library=library)]
    return [SuffixSpeculator(library=library)] if name == "suffix" else []


def measure(llm: LLM, asked: Round) -> dict[str, Any]:
    """What one speculator made of one round."""
    began = time.perf_counter()
    outputs = ask(llm, asked.prompts, asked.params)
    seconds = time.perf_counter() - began
    figures = total_figures(outputs)
    return {
        "tokens_per_step": figures.tokens_per_step,
        "steps": figures.steps,
        "drafted": figures.drafted_tokens,
        "tokens": sum(len(output.token_ids) for output in outputs),
        "seconds": seconds,
        "texts": [digest(output.token_ids) for output in outputs],
    }


def page(study: Study, names: Sequence[str], functions: int) -> list[str]:
    settings = study.settings
    lines = [
        f"# Suffix speculation, n-gram speculation and none: {settings['model']}",
        "",
        f"{functions} functions, at most {settings['max_tokens']} tokens each, batch "
        f"{settings['batch_size']}; edits are greedy, traffic has temperature {settings['temperature']:g}. "
        "n-gram: 2 branches of 15. Tokens per step leave the prefill out; tokens/s includes it. Drafted: "
        "nodes per step beside the root. Same text: answers equal to those without speculation, token by "
        "token.",
        "",
        "| workload | speculator | tokens per step | drafted | tokens/s | speed | same text |",
        "|---|---|---|---|---|---|---|",
    ]
    for round_name in names:
        plain = study.cells[f"{round_name}|none"]
        plain_speed = plain["tokens"] / plain["seconds"]
        for name in SPECULATORS:
            cell = study.cells[f"{round_name}|{name}"]
            speed = cell["tokens"] / cell["seconds"]
            same = sum(a == b for a, b in zip(cell["texts"], plain["texts"], strict=True))
            figures = f"{cell['tokens_per_step']:.2f}", f"{cell['drafted'] / max(cell['steps'], 1):.1f}"
            rates = f"{speed:.1f}", f"{speed / plain_speed:.2f}x"
            lines.append(row(round_name, name, *figures, *rates, f"{same} of {len(cell['texts'])}"))
    return lines


if __name__ == "__main__":
    run(main)
