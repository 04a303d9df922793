"""Tokens per step by tree width: the paper's Table 2 on a real pair of models.

    python benchmarks/table2.py --model TARGET --draft SSM --dataset alpaca=prompts/alpaca.jsonl ...

Runs expansion <1,1,w,1,1,1,1,1> for w = 1..5 on the first prompts of each data set: greedy, and at T = 1
with the coupled rule and with multi-step speculative sampling. Every finished cell is kept in a JSON file
beside the Markdown, so an interrupted run goes on where it was; the Markdown is written anew after each.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from provenance import provenance_lines

from specinfer import LLM, EngineConfig, SamplingParams, SpeculationFigures

PAPER = {  # tokens per step for w = 1..5, SpecInfer, Table 2: LLaMA-7B with a 68M SSM
    "greedy": {
        "alpaca": (2.95, 3.07, 3.21, 3.33, 3.43),
        "chatgpt_prompts": (2.58, 3.24, 3.46, 3.59, 3.69),
        "webquestions": (2.27, 2.69, 2.86, 2.98, 3.07),
        "piqa": (2.18, 2.80, 2.97, 3.10, 3.21),
    },
    "stochastic": {
        "alpaca": (1.79, 2.11, 2.26, 2.32, 2.38),
        "chatgpt_prompts": (1.69, 1.99, 2.15, 2.23, 2.28),
        "webquestions": (1.64, 1.93, 2.08, 2.15, 2.21),
        "piqa": (1.67, 1.93, 2.08, 2.15, 2.21),
    },
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "verifier": "coupled"},
    "T=1 coupled": {"temperature": 1.0, "verifier": "coupled"},
    "T=1 mss": {"temperature": 1.0, "verifier": "mss"},
}
WIDTHS = (1, 2, 3, 4, 5)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the target: folder, GGUF file or name")
    parser.add_argument("--draft", required=True, help="the small speculative model")
    parser.add_argument("--dataset", action="append", required=True, metavar="NAME=FILE.jsonl")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each data set (default 40)")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8, help="tokens per step do not depend on it")
    parser.add_argument("--widths", default="5,4,3,2,1", help="in this order (default 5,4,3,2,1)")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of: {', '.join(MODES)}")
    parser.add_argument(
        "--out", type=Path, required=True, help="Markdown file; its cells lie beside it as .json"
    )
    args = parser.parse_args()

    cells_file = args.out.with_suffix(".json")
    settings = {"limit": args.limit, "model": Path(args.model).name, "draft": Path(args.draft).name}
    cells = _read_cells(cells_file, settings)
    datasets = dict(item.split("=", 1) for item in args.dataset)
    base: LLM | None = None
    for width in map(int, args.widths.split(",")):
        for mode in args.modes.split(","):
            for name, path in datasets.items():
                key = f"{mode}|{name}|{width}"
                if key in cells:
                    continue
                options = {
                    "drafts": (args.draft,),
                    "expansion": (1, 1, width, 1, 1, 1, 1, 1),
                    "tree_size": "fixed",
                    "verifier": MODES[mode]["verifier"],
                    "max_batch_size": args.batch_size,
                    "max_context": 2048,
                }
                if base is None:
                    base = LLM(args.model, **options)
                llm = LLM.from_models(EngineConfig.from_options(args.model, options), base.models)
                cells[key] = _cell(llm, _prompts(Path(path), args.limit), MODES[mode], args.max_tokens)
                print(
                    f"{key}: {cells[key]['tokens_per_step']:.3f} in {cells[key]['seconds']:.0f} s", flush=True
                )
                _write(cells_file, json.dumps({"settings": settings, "cells": cells}, indent=1) + "\n")
                _write(args.out, _markdown(cells, list(datasets), settings))


def _cell(llm: LLM, prompts: list[str], mode: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    began = time.perf_counter()
    params = [
        SamplingParams(temperature=mode["temperature"], seed=seed, max_tokens=max_tokens)
        for seed in range(len(prompts))
    ]
    outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    total = SpeculationFigures()
    for output in outputs:
        total.add(output.figures)
    return {
        "tokens_per_step": total.tokens_per_step,
        "steps": total.steps,
        "max_tokens": max_tokens,
        "accepted_per_depth": total.accepted_per_depth,
        "seconds": time.perf_counter() - began,
    }


def _prompts(path: Path, limit: int) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(next(file))["prompt"] for _ in range(limit)]


def _read_cells(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    if stored["settings"] != settings:
        raise SystemExit(f"{path} holds cells of {stored['settings']}, not {settings}; give another --out")
    cells: dict[str, Any] = stored["cells"]
    return cells


def _write(path: Path, text: str) -> None:
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text)
    os.replace(partial, path)


def _markdown(cells: dict[str, Any], datasets: list[str], settings: dict[str, Any]) -> str:
    lines = [
        f"# Tokens per step by tree width: {settings['model']} with {settings['draft']}",
        "",
        f"Expansion <1,1,w,1,1,1,1,1>, {settings['limit']} prompts of each set through the chat template. "
        "The first token, which comes with the prefill, is not counted; the last step of a text is, though "
        "max_tokens cuts it short. The paper's rows are LLaMA-7B with a 68M SSM.",
        "",
        "| data set | | max_tokens | w=1 | 2 | 3 | 4 | 5 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in datasets:
        for mode in MODES:
            row = [cells.get(f"{mode}|{name}|{w}") for w in WIDTHS]
            if any(row):
                figures = " | ".join(f"{cell['tokens_per_step']:.2f}" if cell else "" for cell in row)
                tokens = sorted({str(cell["max_tokens"]) for cell in row if cell})
                lines.append(f"| {name} | {mode} | {', '.join(tokens)} | {figures} |")
        for law, rows in PAPER.items():
            if name in rows:
                lines.append(f"| {name} | paper, {law} | | {' | '.join(f'{x:.2f}' for x in rows[name])} |")
    return "\n".join([*lines, "", *provenance_lines(), ""])


if __name__ == "__main__":
    main()
