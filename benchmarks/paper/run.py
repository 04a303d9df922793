"""Answers the questions of the SpecInfer paper on this machine: `make paper`.

    python -m benchmarks.paper.run --prompts DIR            all cells, hours; writes docs/paper
    python -m benchmarks.paper.run --prompts DIR --quick    fewer and smaller cells
    python -m benchmarks.paper.run --prompts DIR --only table2
    python -m benchmarks.paper.run --pages                  only pages and plots, from the cells that exist

Every cell is a JSON file in OUT/cells/QUESTION, written once it is measured: an interrupted run continues.
Cells of another machine or of other models are measured again, but for those with a `source`, which are
figures of older pages.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.lab import DATASETS, Lab, Size
from benchmarks.paper.pages import write_index, write_page
from benchmarks.paper.question import Cells, Question, name_of
from benchmarks.paper.questions import QUESTIONS
from benchmarks.study import parser, run
from specinfer.errors import UserError

_DOCS = Path(__file__).parents[2] / "docs" / "paper"
_QUICK = Path(__file__).parents[2] / "build" / "paper-quick"
_MODELS = Path.home() / ".cache" / "specinfer-bench"


def main(arguments: Sequence[str] | None = None) -> None:
    args = _options().parse_args(arguments)
    size: Size = "toy" if args.toy else "quick" if args.quick else "full"
    out = args.out or (_DOCS if size == "full" else _QUICK)
    if not args.pages:
        _check(args)
    lab = Lab(size=size, target=args.target, draft=args.draft, small=args.small, prompts=args.prompts)
    found = [(one, Cells(out / "cells" / name_of(one), size, one.keys(lab))) for one in QUESTIONS]
    try:
        for question, cells in found:
            if not args.only or name_of(question) in args.only:
                if not args.pages:
                    _measure(lab, question, cells)
                if cells:
                    write_page(out, question, cells)
    finally:
        lab.close()
    write_index(out, found)


def _check(args: argparse.Namespace) -> None:
    """Exit if a model or a data set is missing, as hours may pass before it is read."""
    models = [Path(name) for name in (args.target, args.draft, args.small)]
    needed = [*models, *(args.prompts / f"{name}.jsonl" for name in (*DATASETS.values(), "humaneval"))]
    if missing := [str(path) for path in needed if not path.exists()]:
        sys.exit(f"error: not found: {', '.join(missing)}; docs/benchmarks.md says what `make paper` needs")


def _measure(lab: Lab, question: Question, cells: Cells) -> None:
    for key in question.keys(lab):
        if cells.has(key, lab.known()):
            continue
        began = time.perf_counter()
        try:
            figures = question.measure(lab, key)
        except UserError as error:
            print(f"{name_of(question)} {key}: not measured: {error}", flush=True)
            continue
        cells.keep(key, figures, lab.models())
        print(f"{name_of(question)} {key}: {time.perf_counter() - began:.0f} s", flush=True)


def _options() -> argparse.ArgumentParser:
    options = parser(__doc__)
    size = options.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer and smaller cells, in build/paper-quick")
    size.add_argument("--toy", action="store_true", help="the smallest cells, for tests")
    names = [*map(name_of, QUESTIONS)]
    options.add_argument("--only", nargs="+", choices=names, metavar="QUESTION", help="%(choices)s")
    options.add_argument("--pages", action="store_true", help="measure nothing")
    options.add_argument("--out", type=Path, help="folder of pages, plots and cells (default docs/paper)")
    # The pages' words are for these models.
    options.add_argument("--target", default=str(_MODELS / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"))
    options.add_argument("--draft", default=str(_MODELS / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"))
    options.add_argument("--small", default=str(_MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    options.add_argument("--prompts", type=Path, default="prompts", help="folder with NAME.jsonl of each set")
    return options


if __name__ == "__main__":
    run(main)
