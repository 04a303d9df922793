"""Is greedy text the same with speculation? Counted on real prompts, each difference explained.

    python benchmarks/identity.py --model TARGET --draft SSM --dataset alpaca.jsonl ... --out RESULT.md

The same prompts run without speculation, with it, and again without, one data set after the other. The third
run shows how much of a difference is not speculation's: on a GPU the batch a request shares a step with
may turn a tie. At the first token that differs the target's logits are computed once more: a gap of at most
two bfloat16 steps at that size is rounding (specinfer/check/difference.py), anything more is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from provenance import provenance_lines

from specinfer import LLM, EngineConfig, RequestOutput, SamplingParams
from specinfer.check.difference import Difference, find_difference
from specinfer.check.target_alone import TargetAlone
from specinfer.report.dataset import Dataset, read_dataset


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the target: folder, GGUF file or name")
    parser.add_argument("--draft", action="append", default=[], help="a small speculative model; repeatable")
    parser.add_argument("--ngram", action="store_true", help="look guesses up in the text itself, too")
    parser.add_argument("--expansion", default="1,1,3,1,1")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16 or float32")
    parser.add_argument("--quantization", default="none", help="none, int8 or int4")
    parser.add_argument("--dataset", action="append", required=True, type=Path, metavar="FILE.jsonl")
    parser.add_argument("--limit", type=int, default=50, help="prompts of each data set (default 50)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument(
        "--repeat",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run without speculation a second time, in the other order (default: yes)",
    )
    parser.add_argument("--out", type=Path, required=True, help="Markdown file")
    args = parser.parse_args()
    if not args.draft and not args.ngram:
        parser.error("nobody speculates: give --draft or --ngram")

    shared = {
        "dtype": args.dtype,
        "quantization": args.quantization,
        "max_batch_size": args.batch_size,
        "max_context": 2048,
    }
    options = {
        "drafts": tuple(args.draft),
        "ngram": args.ngram,
        "expansion": tuple(int(k) for k in args.expansion.split(",")),
        "tree_size": "fixed",
        **shared,
    }
    datasets = [read_dataset(path).head(args.limit) for path in args.dataset]
    speculative = LLM(args.model, **options)
    plain = LLM.from_models(
        EngineConfig.from_options(args.model, shared), replace(speculative.models, drafts={})
    )
    target = TargetAlone(speculative.models.target)
    params = SamplingParams(temperature=0, seed=0, max_tokens=args.max_tokens)
    rows: list[str] = []
    found: list[tuple[str, Difference]] = []
    repeated: list[tuple[str, Difference]] = []
    total = 0
    for dataset in datasets:
        name = Path(dataset.name).name
        expected = _answers(plain, dataset, params)
        got = _answers(speculative, dataset, params)
        # In the other order, so that every request shares its steps with others.
        turned = replace(dataset, conversations=dataset.conversations[::-1])
        again = _answers(plain, turned, params)[::-1] if args.repeat else expected
        found += (here := _differences(name, target, params, expected, got))
        repeated += (noise := _differences(name, target, params, expected, again))
        total += len(expected)
        steps = sum(output.figures.steps for output in got)
        tokens = sum(output.figures.output_tokens for output in got)
        repeated_same = len(expected) - len(noise) if args.repeat else "not run"
        row = (name, len(expected), len(expected) - len(here), repeated_same)
        rows.append(f"| {' | '.join(map(str, row))} | {tokens / max(steps, 1):.2f} |")
        print(rows[-1], flush=True)
    wrong = [item for item in found if not item[1].explained]
    lines = [
        f"# Greedy texts with and without speculation: {Path(args.model).name}",
        "",
        f"- speculators: {', '.join([Path(d).name for d in args.draft] + ['n-gram'] * args.ngram)}, "
        f"expansion <{args.expansion}>, {str(target.model.dtype).removeprefix('torch.')}, batch size "
        f"{args.batch_size}, {args.max_tokens} tokens at most",
        f"- identical texts: {total - len(found)} of {total}",
        f"- different texts, explained by rounding of the target's logits: {len(found) - len(wrong)}",
        *(f"  - {where}, {difference}" for where, difference in found if difference.explained),
        f"- different texts, not explained: {len(wrong)}",
        *(f"  - {where}, {difference}" for where, difference in wrong),
        "- different texts when the run without speculation is repeated in the other order: "
        f"{len(repeated) if args.repeat else 'not run'}",
        *(f"  - {where}, {difference}" for where, difference in repeated),
        "",
        "| data set | prompts | identical with speculation | identical without, repeated | tokens per step |",
        "|---|---|---|---|---|",
        *rows,
        "",
        *provenance_lines(),
        "",
    ]
    args.out.write_text("\n".join(lines))
    print("\n".join(lines))
    raise SystemExit(1 if wrong else 0)


def _answers(llm: LLM, dataset: Dataset, params: SamplingParams) -> list[RequestOutput]:
    """The answers to the first turn of every conversation."""
    questions = [conversation.turns[0] for conversation in dataset.conversations]
    if llm.tokenizer.has_chat_template:
        return llm.chat([[{"role": "user", "content": text}] for text in questions], params)
    return llm.generate(questions, params)


def _differences(
    name: str,
    target: TargetAlone,
    params: SamplingParams,
    expected: Sequence[RequestOutput],
    got: Sequence[RequestOutput],
) -> list[tuple[str, Difference]]:
    pairs = enumerate(zip(expected, got, strict=True))
    found = [(number, find_difference(target, params, ours, theirs)) for number, (ours, theirs) in pairs]
    return [(f"{name} prompt {number}", difference) for number, difference in found if difference]


if __name__ == "__main__":
    main()
