"""Checks the form of structured answers with and without trees, and counts the grammar's proposals.

    python -m benchmarks.speculation.structured --model M --questions json_wikiquestions.jsonl --out RESULT.md

There are two sets: the questions, each answered by {"answerable": boolean, "answer": string}, and an example
for each of our 100 schemas (tests/unit/grammar/schemas.json). The same requests run without speculation, and
with lookups and the grammar's proposals. An answer truncated by max_tokens is counted separately; every other
one is parsed and validated by jsonschema.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

from benchmarks.study import (
    REQUIRED,
    Study,
    ask,
    parser,
    row,
    run,
    settings_of,
    total_figures,
    without_speculation,
)
from specinfer import LLM, RequestOutput, SamplingParams
from specinfer.report.dataset import read_dataset
from specinfer.sampling_params import SpeculationParams

SCHEMAS = Path(__file__).parents[2] / "tests" / "unit" / "grammar" / "schemas.json"
ANSWER = {
    "type": "object",
    "properties": {"answerable": {"type": "boolean"}, "answer": {"type": "string", "maxLength": 300}},
    "required": ["answerable", "answer"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Task:
    """One request: the question and the schema of the answer."""

    prompt: str
    schema: Any


def main() -> None:
    options = parser(__doc__, model=REQUIRED, limit=1000, max_tokens=256, batch_size=8)
    options.add_argument("--questions", type=Path, help="JSON lines with a prompt each")
    args = options.parse_args()

    sets = {"our schemas": our_schemas()}
    if args.questions is not None:
        rows = read_dataset(args.questions).conversations
        sets[args.questions.name] = [Task(row.turns[0], ANSWER) for row in rows]
    study = Study("structured", args.out, settings_of(args, without=["questions"]))
    llm: LLM | None = None
    for name, tasks in sets.items():
        if name not in study.cells:
            context = {"max_batch_size": args.batch_size, "max_context": 2048}
            llm = llm or LLM(args.model, lookup=True, tree_size="fixed", **context)
            study.keep(name, measure(llm, tasks[: args.limit], args.max_tokens))
            print(row_of(name, study.cells[name]), flush=True)
    study.write(page(study, list(sets)))
    raise SystemExit(1 if any(study.cells[name]["broken"] for name in sets) else 0)


def measure(llm: LLM, tasks: Sequence[Task], max_tokens: int) -> dict[str, int | float]:
    """Run one set with speculation and without."""
    prompts, params = [task.prompt for task in tasks], [form(task, max_tokens) for task in tasks]
    got = ask(llm, prompts, params)
    # The grammar's proposals are speculation, too.
    alone = [replace(p, speculation=SpeculationParams.of(False)) for p in params]
    expected = ask(without_speculation(llm), prompts, alone)
    verdicts = Counter(verdict(task, output) for task, output in zip(tasks, got, strict=True))
    figures = total_figures(got)
    return {
        "requests": len(tasks),
        **{name: verdicts[name] for name in ("valid", "cut", "broken")},
        "identical": sum(a.token_ids == b.token_ids for a, b in zip(got, expected, strict=True)),
        "tokens_per_step": figures.tokens_per_step,
        "guessed": figures.proposed_by.get("grammar", 0),
        "right": figures.accepted_by.get("grammar", 0),
    }


def page(study: Study, names: Sequence[str]) -> list[str]:
    settings = study.settings
    return [
        f"# Structured output: {settings['model']}",
        "",
        f"Greedy, {settings['max_tokens']} tokens at most, batch size {settings['batch_size']}.",
        "",
        "| set | requests | valid | cut at max_tokens | broken | identical without speculation "
        "| tokens per step | guessed by the grammar, right |",
        "|---|---|---|---|---|---|---|---|",
        *(row_of(name, study.cells[name]) for name in names),
    ]


def row_of(name: str, cell: Mapping[str, Any]) -> str:
    counts = (cell[key] for key in ("requests", "valid", "cut", "broken", "identical"))
    return row(name, *counts, f"{cell['tokens_per_step']:.2f}", f"{cell['guessed']}, {cell['right']}")


def our_schemas() -> list[Task]:
    """Return our schemas, with a request for an example of each."""
    rows = json.loads(SCHEMAS.read_text())
    return [
        Task(
            f"Give a short example of JSON that follows this schema: {json.dumps(row['schema'])}",
            row["schema"],
        )
        for row in rows
    ]


def form(task: Task, max_tokens: int) -> SamplingParams:
    """Return the parameters with the task's schema."""
    schema = {"name": "answer", "schema": task.schema, "strict": True}
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        response_format={"type": "json_schema", "json_schema": schema},
    )


def verdict(task: Task, output: RequestOutput) -> str:
    """Return valid, cut or broken."""
    if output.finish_reason == "length":
        return "cut"
    try:
        Draft202012Validator(task.schema).validate(json.loads(output.text))
    except (json.JSONDecodeError, ValidationError) as error:
        print(f"broken: {output.text!r}: {error}")
        return "broken"
    return "valid"


if __name__ == "__main__":
    run(main)
