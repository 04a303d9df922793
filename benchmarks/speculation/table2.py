"""Measures tokens per step by tree width: Table 2 of the SpecInfer paper on a real pair of models.

    python -m benchmarks.speculation.table2 --model TARGET --draft SSM --dataset alpaca=alpaca.jsonl ...

Runs expansion <1,1,w,1,1,1,1,1> for w = 1..5 on the first prompts of each data set: greedy, and at T = 1 with
the coupled rule and with multi-step speculative sampling. A JSON file beside the Markdown keeps every
finished cell, so an interrupted run continues; the Markdown is rewritten after each.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.study import REQUIRED, Study, ask, parser, row, run, total_figures
from specinfer import LLM, SamplingParams
from specinfer.report.dataset import read_dataset
from specinfer.tree.token_tree import Expansion

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
    options = parser(__doc__, model=REQUIRED, limit=40, max_tokens=64, batch_size=8)
    options.add_argument("--draft", required=True, help="the small speculative model")
    options.add_argument("--dataset", action="append", required=True, metavar="NAME=FILE.jsonl")
    options.add_argument("--widths", default="5,4,3,2,1", help="in this order (default 5,4,3,2,1)")
    options.add_argument("--modes", default=",".join(MODES), help=f"of: {', '.join(MODES)}")
    args = options.parse_args()

    settings = {"limit": args.limit, "model": Path(args.model).name, "draft": Path(args.draft).name}
    study = Study("table2", args.out, settings)
    named = dict(item.split("=", 1) for item in args.dataset)
    datasets = {name: read_dataset(Path(path)).head(args.limit) for name, path in named.items()}
    base: LLM | None = None
    for width in map(int, args.widths.split(",")):
        for mode in args.modes.split(","):
            for name, dataset in datasets.items():
                key = f"{mode}|{name}|{width}"
                if key in study.cells:
                    continue
                base = base or LLM(
                    args.model,
                    drafts=(args.draft,),
                    tree_size="fixed",
                    lookup=False,
                    max_batch_size=args.batch_size,
                    max_context=2048,
                )
                speculation = replace(
                    base.config.speculation,
                    expansion=Expansion((1, 1, width, 1, 1, 1, 1, 1)),
                    verifier=MODES[mode]["verifier"],
                )
                llm = LLM.from_models(replace(base.config, speculation=speculation), base.models)
                prompts = [conversation.turns[0] for conversation in dataset.conversations]
                cell = measure(llm, prompts, MODES[mode]["temperature"], args.max_tokens)
                study.keep(key, cell)
                print(f"{key}: {cell['tokens_per_step']:.3f} in {cell['seconds']:.0f} s", flush=True)
                study.write(page(study, list(datasets)))


def measure(llm: LLM, prompts: Sequence[str], temperature: float, max_tokens: int) -> dict[str, Any]:
    began = time.perf_counter()
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
        for seed in range(len(prompts))
    ]
    total = total_figures(ask(llm, prompts, params))
    return {
        "tokens_per_step": total.tokens_per_step,
        "steps": total.steps,
        "max_tokens": max_tokens,
        "accepted_per_depth": total.accepted_per_depth,
        "seconds": time.perf_counter() - began,
    }


def page(study: Study, datasets: Sequence[str]) -> list[str]:
    settings = study.settings
    return [
        f"# Tokens per step by tree width: {settings['model']} with {settings['draft']}",
        "",
        f"Expansion <1,1,w,1,1,1,1,1>, {settings['limit']} prompts of each set through the chat template. "
        "The first token, which comes with the prefill, is not counted; the last step of a text is, though "
        "max_tokens cuts it short. The paper's rows are LLaMA-7B with a 68M SSM.",
        "",
        "| data set | | max_tokens | w=1 | 2 | 3 | 4 | 5 |",
        "|---|---|---|---|---|---|---|---|",
        *(line for name in datasets for line in _rows(name, study.cells)),
    ]


def _rows(name: str, all_cells: Mapping[str, Any]) -> list[str]:
    """Return the rows of one data set, by mode, and the paper's."""
    lines = []
    for mode in MODES:
        cells = [all_cells.get(f"{mode}|{name}|{w}") for w in WIDTHS]
        if any(cells):
            tokens = sorted({str(cell["max_tokens"]) for cell in cells if cell})
            figures = (f"{cell['tokens_per_step']:.2f}" if cell else "" for cell in cells)
            lines.append(row(name, mode, ", ".join(tokens), *figures))
    papers = [(law, rows[name]) for law, rows in PAPER.items() if name in rows]
    return lines + [row(name, f"paper, {law}", "", *(f"{x:.2f}" for x in figures)) for law, figures in papers]


if __name__ == "__main__":
    run(main)
