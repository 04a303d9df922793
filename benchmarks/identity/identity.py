"""Counts on real prompts whether greedy text is the same with speculation, and explains differences.

    python -m benchmarks.identity.identity --model TARGET --draft SSM --dataset alpaca.jsonl ... --out RESULT

The same prompts run without speculation, with it, and again without, one data set after the other. The third
run shows differences without speculation: on a GPU the other requests of a batch may decide a tie. At the
first different token the target's logits are computed again: a gap of at most two bfloat16 steps at that size
is rounding (specinfer/check/difference.py), a larger one is an error.

A JSON file beside the Markdown keeps finished data sets, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.study import (
    SPECULATING,
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
from specinfer.check.difference import PlainTarget, find_difference
from specinfer.report.dataset import read_dataset
from specinfer.speculation_config import DEFAULT_EXPANSION


def main() -> None:
    options = parser(__doc__, **SPECULATING, quantization="none", limit=50)
    options.add_argument("--lookup", action="store_true", help="also use lookups")
    options.add_argument(
        "--repeat",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run without speculation a second time, in the other order (default: yes)",
    )
    args = options.parse_args()
    if not args.draft and not args.lookup:
        options.error("no speculator is on: give --draft or --lookup")

    datasets = {path.name: read_dataset(path).head(args.limit) for path in args.dataset}
    study = Study("identity", args.out, settings_of(args, without=["dataset"]))
    speculative: LLM | None = None
    for name, dataset in datasets.items():
        if name in study.cells:
            continue
        speculative = speculative or LLM(
            args.model,
            dtype=args.dtype,
            quantization=args.quantization,
            max_batch_size=args.batch_size,
            drafts=tuple(args.draft),
            lookup=args.lookup,
            expansion=args.expansion,
            tree_size="fixed",
            max_context=2048,
        )
        questions = [conversation.turns[0] for conversation in dataset.conversations]
        study.keep(name, measure(speculative, questions, args.max_tokens, repeat=args.repeat))
        print(row_of(name, study.cells[name], repeat=args.repeat), flush=True)
    cells = {name: study.cells[name] for name in datasets}
    print(study.write(page(study.settings, cells)))
    raise SystemExit(1 if any(not d["explained"] for c in cells.values() for d in c["differences"]) else 0)


def measure(speculative: LLM, questions: Sequence[str], max_tokens: int, *, repeat: bool) -> dict[str, Any]:
    """Run one data set without speculation, with it, and without again."""
    plain, target = without_speculation(speculative), PlainTarget(speculative.models.target)
    params = SamplingParams(temperature=0, seed=0, max_tokens=max_tokens)
    expected, got = ask(plain, questions, params), ask(speculative, questions, params)
    # In the other order, so that every request shares its steps with others.
    again = ask(plain, questions[::-1], params)[::-1] if repeat else expected
    figures = total_figures(got)

    def differences(theirs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        pairs = zip(expected, theirs, strict=True)
        found = [find_difference(target, params, *pair) for pair in pairs]
        named = [(f"prompt {number}, {d}", d) for number, d in enumerate(found) if d is not None]
        return [{"text": text, "explained": difference.explained} for text, difference in named]

    return {
        "dtype": str(target.model.dtype).removeprefix("torch."),
        "prompts": len(questions),
        "tokens_per_step": figures.tokens_per_step,
        "differences": differences(got),
        "repeated": differences(again),
    }


def page(settings: Mapping[str, Any], cells: Mapping[str, Any]) -> list[str]:
    found, repeated = (
        [{**d, "text": f"  - {name} {d['text']}"} for name, cell in cells.items() for d in cell[kind]]
        for kind in ("differences", "repeated")
    )
    explained, wrong = ([d["text"] for d in found if d["explained"] == is_so] for is_so in (True, False))
    total = sum(cell["prompts"] for cell in cells.values())
    return [
        f"# Greedy texts with and without speculation: {settings['model']}",
        "",
        f"- speculators: {', '.join(settings['draft'] + ['lookup'] * settings['lookup'])}, expansion "
        f"<{settings['expansion'] or DEFAULT_EXPANSION}>, {next(iter(cells.values()))['dtype']}, batch size "
        f"{settings['batch_size']}, {settings['max_tokens']} tokens at most",
        f"- identical texts: {total - len(found)} of {total}",
        f"- different texts, explained by rounding of the target's logits: {len(explained)}",
        *explained,
        f"- different texts, not explained: {len(wrong)}",
        *wrong,
        "- different texts when the run without speculation is repeated in the other order: "
        f"{len(repeated) if settings['repeat'] else 'not run'}",
        *(d["text"] for d in repeated),
        "",
        "| data set | prompts | identical with speculation | identical without, repeated | tokens per step |",
        "|---|---|---|---|---|",
        *(row_of(name, cell, repeat=settings["repeat"]) for name, cell in cells.items()),
    ]


def row_of(name: str, cell: Mapping[str, Any], *, repeat: bool) -> str:
    same, same_again = (cell["prompts"] - len(cell[kind]) for kind in ("differences", "repeated"))
    shown = same_again if repeat else "not run"
    return row(name, cell["prompts"], same, shown, f"{cell['tokens_per_step']:.2f}")


if __name__ == "__main__":
    run(main)
