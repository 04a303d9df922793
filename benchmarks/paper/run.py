"""Answers the questions of the SpecInfer paper on this machine: `make paper`.

    python -m benchmarks.paper.run --prompts DIR    all cells, hours; writes docs/paper
    python -m benchmarks.paper.run --quick          fewer cells, at most 20 minutes on 2 cores
    python -m benchmarks.paper.run --only table2    one question
    python -m benchmarks.paper.run --pages          only pages and plots, from the cells that exist

Every cell is a JSON file in OUT/cells/QUESTION, written once it is measured: an interrupted run continues,
and a deleted file is measured again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper.lab import Lab, Size
from benchmarks.paper.pages import write_index, write_page
from benchmarks.paper.question import Cells, NotHereError, Question
from benchmarks.paper.questions import QUESTIONS
from benchmarks.study import run

_DOCS = Path(__file__).parents[2] / "docs" / "paper"
_QUICK = Path(__file__).parents[2] / "build" / "paper-quick"
_MODELS = Path.home() / ".cache" / "specinfer-bench"


def main(arguments: Sequence[str] | None = None) -> None:
    args = _options().parse_args(arguments)
    size: Size = "toy" if args.toy else "quick" if args.quick else "full"
    out = args.out or (_DOCS if size == "full" else _QUICK)
    lab = Lab(size=size, target=args.target, draft=args.draft, small=args.small, prompts=args.prompts)
    chosen = [one for one in QUESTIONS if not args.only or one.name in args.only]
    try:
        for question in chosen:
            cells = Cells(out / "cells" / question.name, size)
            if not args.pages:
                _measure(lab, question, cells)
            if cells:
                write_page(out, question, cells)
    finally:
        lab.close()
    write_index(out, [(one, Cells(out / "cells" / one.name, size)) for one in QUESTIONS])


def _measure(lab: Lab, question: Question, cells: Cells) -> None:
    for key in question.keys(lab):
        if key in cells:
            continue
        began = time.perf_counter()
        try:
            figures = question.measure(lab, key)
        except NotHereError as error:
            print(f"{question.name} {key}: not measured: {error}", flush=True)
            continue
        cells.keep(key, figures, lab.models())
        print(f"{question.name} {key}: {time.perf_counter() - began:.0f} s", flush=True)


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = options.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer and smaller cells, in build/paper-quick")
    size.add_argument("--toy", action="store_true", help="the smallest cells, for tests")
    options.add_argument(
        "--only", nargs="+", choices=[one.name for one in QUESTIONS], metavar="QUESTION", help="%(choices)s"
    )
    options.add_argument("--pages", action="store_true", help="measure nothing")
    options.add_argument("--out", type=Path, help="folder of pages, plots and cells (default docs/paper)")
    options.add_argument("--target", default=str(_MODELS / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"))
    options.add_argument("--draft", default=str(_MODELS / "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"))
    options.add_argument("--small", default=str(_MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    options.add_argument(
        "--prompts", type=Path, required=True, help="folder with NAME.jsonl of each data set"
    )
    return options


if __name__ == "__main__":
    run(main)
