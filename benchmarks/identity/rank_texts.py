"""Counts on real prompts whether texts are the same for every number of ranks and stages.

    python -m benchmarks.identity.rank_texts --model TARGET --draft SSM --dataset alpaca.jsonl

Each layout answers the same prompts without speculation and with it, singly and in batches, greedily and at
temperature 0.8 with a seed for each prompt. Every answer is compared, token by token, with the answer of one
process without speculation, one prompt at a time. Float weights are added with `sum_parts=8`.

A JSON file beside the Markdown keeps finished layouts, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, Final

from benchmarks.machines.ranks import ONE, Layout
from benchmarks.study import REQUIRED, Study, digest, parser, questions_of, row, settings_of
from specinfer import LLM, SamplingParams
from specinfer.speculation_config import NO_SPECULATION
from specinfer.tokenizer.chat_encoder import ChatEncoder

_SUM_PARTS: Final = 8
_TEMPERATURES: Final = (0.0, 0.8)


def main() -> None:
    options = parser(
        __doc__,
        model=REQUIRED,
        draft=REQUIRED,
        dataset=REQUIRED,
        limit=200,
        max_tokens=6,
        batch_size=8,
        quantization="int8",
    )
    options.add_argument(
        "--layouts",
        nargs="+",
        default=["2x1", "1x2", "2x2"],
        metavar="TPxPP",
        help="tensor-parallel ranks x pipeline stages (default 2x1 1x2 2x2)",
    )
    options.add_argument("--draft-quantization", default="int4", help="of the draft (default int4)")
    args = options.parse_args()
    study = Study("rank-texts", args.out, settings_of(args, without=("layouts",)))
    questions = questions_of(args.dataset, args.limit)
    layouts = [ONE, *map(Layout.of, args.layouts)]
    for layout in layouts:
        if str(layout) not in study.cells:
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # its memory is freed at its end
                study.keep(str(layout), pool.submit(answers, args, layout, questions).result())
        print(layout, counts(study.cells, str(layout)), flush=True)
    print(study.write(page(study.settings, study.cells, [str(layout) for layout in layouts]), 1))
    raise SystemExit(
        any(same < args.limit for one in layouts for same in counts(study.cells, str(one)).values())
    )


def answers(
    args: argparse.Namespace, layout: Layout, questions: Sequence[str]
) -> dict[str, dict[str, list[str]]]:
    """Return a digest of each answer's tokens, by temperature, engine and batch size."""
    with LLM(
        args.model,
        tensor_parallel=layout.tensor,
        pipeline_parallel=layout.stages,
        quantization=args.quantization,
        drafts=tuple(args.draft),
        draft_quantization=args.draft_quantization,
        sum_parts=1 if args.quantization == "int8" else _SUM_PARTS,
        max_batch_size=args.batch_size,
        max_context=2048,
    ) as llm:
        plain = llm.variant(replace(llm.config, speculation=NO_SPECULATION))
        chat = ChatEncoder(llm.tokenizer)
        prompts = [chat.token_ids([{"role": "user", "content": text}]) for text in questions]
        found = {}
        for name, engine in (("plain", plain), ("drafts", llm)):
            for temperature in _TEMPERATURES:
                params = [
                    SamplingParams(temperature=temperature, seed=number, max_tokens=args.max_tokens)
                    for number in range(len(prompts))
                ]
                for batch in (args.batch_size, 1):
                    found[f"T={temperature:g} {name} {batch}"] = [
                        digest(list(output.token_ids))
                        for i in range(0, len(prompts), batch)
                        for output in engine.generate(prompts[i : i + batch], params[i : i + batch])
                    ]
        return {"texts": found}


def counts(cells: Mapping[str, Mapping[str, Any]], layout: str) -> dict[str, int]:
    """Return the number of answers equal to those of one process without speculation, one at a time."""
    counted = {}
    for name, texts in cells[layout]["texts"].items():
        expected = cells[str(ONE)]["texts"][f"{name.split()[0]} plain 1"]
        counted[name] = sum(a == b for a, b in zip(texts, expected, strict=True))
    return counted


def page(settings: Mapping[str, Any], cells: Mapping[str, Any], layouts: Sequence[str]) -> list[str]:
    names = list(cells[layouts[0]]["texts"])
    lines = [f"# Texts by ranks and stages: {settings['model']}, {settings['quantization']}", ""]
    lines += ["Answers equal to those of one process without speculation, one at a time:", ""]
    lines += [row("layout", *names), row("---", *["---"] * len(names))]
    lines += [row(layout, *counts(cells, layout).values()) for layout in layouts]
    return [*lines, ""]


if __name__ == "__main__":
    main()
