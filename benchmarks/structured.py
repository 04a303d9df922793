"""Does every answer have the form it was asked for, with trees and without, and what do grammars guess?

    python benchmarks/structured.py --model M --questions json_wikiquestions.jsonl --out RESULT.md

Two sets: the questions, each to be answered by {"answerable": boolean, "answer": string}, and our 100 schemas
(tests/unit/grammar/schemas.json), for each of which an example is asked. The same requests run without
speculation and with the n-gram speculator and the grammar's own guesses. An answer that max_tokens cut is a
beginning, and counted apart; every other one is parsed and validated by jsonschema.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from provenance import provenance_lines

from specinfer import LLM, EngineConfig, RequestOutput, SamplingParams, SpeculationFigures
from specinfer.report.dataset import read_dataset

SCHEMAS = Path(__file__).parents[1] / "tests" / "unit" / "grammar" / "schemas.json"
ANSWER = {
    "type": "object",
    "properties": {"answerable": {"type": "boolean"}, "answer": {"type": "string", "maxLength": 300}},
    "required": ["answerable", "answer"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Task:
    """One request: what is asked, and the schema of the answer."""

    prompt: str
    schema: Any


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", type=Path, help="JSON lines with a prompt each")
    parser.add_argument("--limit", type=int, default=1000, help="requests of each set")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True, help="Markdown file")
    args = parser.parse_args()

    sets = {"our schemas": our_schemas()}
    if args.questions is not None:
        rows = read_dataset(args.questions).conversations
        sets[args.questions.name] = [Task(row.turns[0], ANSWER) for row in rows]
    shared = {"max_batch_size": args.batch_size, "max_context": 2048}
    speculative = LLM(args.model, ngram=True, tree_size="fixed", **shared)
    plain = LLM.from_models(EngineConfig.from_options(args.model, shared), speculative.models)
    lines = [
        "| set | requests | valid | cut at max_tokens | broken | identical without speculation "
        "| tokens per step | guessed by the grammar, right |",
        "|---|---|---|---|---|---|---|---|",
    ]
    broken = 0
    for name, tasks in sets.items():
        tasks = tasks[: args.limit]
        params = [form(task, args.max_tokens) for task in tasks]
        got = ask(speculative, tasks, params)
        # The grammar's own guesses are speculation, too.
        off = [replace(p, speculation=False) for p in params]
        expected = ask(plain, tasks, off)
        verdicts = Counter(verdict(task, output) for task, output in zip(tasks, got, strict=True))
        broken += verdicts["broken"]
        figures = SpeculationFigures()
        for output in got:
            figures.add(output.figures)
        same = sum(a.token_ids == b.token_ids for a, b in zip(got, expected, strict=True))
        guessed, right = figures.drafted.get("grammar", 0), figures.credit.get("grammar", 0)
        lines.append(
            f"| {name} | {len(tasks)} | {verdicts['valid']} | {verdicts['cut']} | {verdicts['broken']} "
            f"| {same} | {figures.tokens_per_step:.2f} | {guessed}, {right} |"
        )
        print(lines[-1], flush=True)
    page = [
        f"# Structured output: {Path(args.model).name}",
        "",
        f"Greedy, {args.max_tokens} tokens at most, batch size {args.batch_size}.",
        "",
        *lines,
        "",
        *provenance_lines(),
        "",
    ]
    args.out.write_text("\n".join(page))
    raise SystemExit(1 if broken else 0)


def our_schemas() -> list[Task]:
    """Our schemas, with a request for an example of each."""
    rows = json.loads(SCHEMAS.read_text())
    return [
        Task(
            f"Give a short example of JSON that follows this schema: {json.dumps(row['schema'])}",
            row["schema"],
        )
        for row in rows
    ]


def form(task: Task, max_tokens: int) -> SamplingParams:
    """The parameters that ask for the task's schema."""
    schema = {"name": "answer", "schema": task.schema}
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        response_format={"type": "json_schema", "json_schema": schema},
    )


def ask(llm: LLM, tasks: Sequence[Task], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """The answers, through the chat template where there is one."""
    prompts = [task.prompt for task in tasks]
    if llm.tokenizer.has_chat_template:
        return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    return llm.generate(prompts, params)


def verdict(task: Task, output: RequestOutput) -> str:
    """valid, cut or broken."""
    if output.finish_reason == "length":
        return "cut"
    try:
        Draft202012Validator(task.schema).validate(json.loads(output.text))
    except (json.JSONDecodeError, ValidationError) as error:
        print(f"broken: {output.text!r}: {error}")
        return "broken"
    return "valid"


if __name__ == "__main__":
    main()
