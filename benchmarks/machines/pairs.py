"""Compares ways of running one model on one machine: seconds of loading, tokens per second, texts.

    python -m benchmarks.machines.pairs --model MODEL --dataset alpaca.jsonl \
        --way quantization=int8 --way quantization=int8,model_impl=transformers

A way is a list of engine options. Every way is loaded twice with an empty cache folder: the first load
prepares the weights, the second finds them. Then all ways stay in memory and answer the same greedy prompts
in turns, the first way first in every second round: without speculation, and with prompt lookup. Ratios are
over the first way, in the same round. The ways share threads, so no other program may run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.study import (
    REQUIRED,
    Study,
    ask,
    natural,
    parser,
    questions_of,
    row,
    run,
    settings_of,
    spread,
)
from benchmarks.study import without_speculation as plain
from specinfer import LLM, SamplingParams
from specinfer.files import cache_dir
from specinfer.hub import resolve
from specinfer.kernels.choice import choose_kernels

GUESSES: Mapping[str, Callable[[LLM], LLM]] = {
    "plain": plain,
    "lookup": lambda llm: llm.variant(lookup=True, drafts=()),
}


def main() -> None:
    options = parser(
        __doc__,
        model=REQUIRED,
        dataset=REQUIRED,
        limit=8,
        max_tokens=64,
        rounds=5,
        threads=None,
    )
    options.add_argument("--way", action="append", required=True, metavar="OPTION=VALUE[,...]")
    options.add_argument("--batch-sizes", type=natural, nargs="+", default=[1], help="(default 1)")
    args = options.parse_args()
    study = Study("pairs", args.out, settings_of(args, without=("rounds",)))
    resolve(args.model)  # a model of the catalogue lies in the cache folder
    for way in args.way:
        if (name := f"load|{way}") not in study.cells:
            study.keep(name, loading(args, way))
            print(name, study.cells[name], flush=True)
    missing = [n for n in range(args.rounds) if f"round|{n}" not in study.cells]
    with ExitStack() as stack:
        loaded = {way: stack.enter_context(load(args, way)) for way in args.way} if missing else {}
        if missing:
            answer_all(args, loaded)  # warm-up
        for number in missing:
            study.keep(f"round|{number}", answer_all(args, loaded, backwards=number % 2 == 1))
            print(f"round {number + 1}/{args.rounds}", flush=True)
    print(study.write(page(study), args.threads))


def load(args: argparse.Namespace, way: str) -> LLM:
    """Return the model with the options of a way."""
    pairs = (part.partition("=") for part in way.split(","))
    options: dict[str, Any] = {name: int(text) if text.isdecimal() else text for name, _, text in pairs}
    sizes = {"max_batch_size": max(args.batch_sizes), "prefix_reuse": False}
    return LLM(args.model, threads=args.threads, drafts=(), **sizes, **options)


def loading(args: argparse.Namespace, way: str) -> dict[str, float]:
    """Return the seconds of the first load, which prepares weights, and of the second.

    Kernels that the first load would compile are compiled before.
    """
    choose_kernels("auto", torch.device("cpu"))
    model = str(resolve(args.model).path)
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        if (kernels := cache_dir() / "kernels").exists():
            shutil.copytree(kernels, Path(folder) / "kernels")
        named = argparse.Namespace(**{**vars(args), "model": model})
        seconds = {}
        with patch.dict(os.environ, {"SPECINFER_CACHE": folder}):
            for which in ("first", "later"):
                begun = time.perf_counter()
                with load(named, way):
                    seconds[which] = time.perf_counter() - begun
    return seconds


def answer_all(
    args: argparse.Namespace, loaded: Mapping[str, LLM], *, backwards: bool = False
) -> dict[str, Any]:
    """Return tokens per second, and the tokens: way, then `GUESSES|batch size`."""
    questions = questions_of(args.dataset, args.limit)
    found: dict[str, Any] = {way: {} for way in loaded}
    for guesses, variant in GUESSES.items():
        for size in args.batch_sizes:
            for way in list(loaded)[:: -1 if backwards else 1]:
                with variant(loaded[way]) as llm:
                    found[way][f"{guesses}|{size}"] = answers(llm, questions, size, args.max_tokens)
    return found


def answers(llm: LLM, questions: Sequence[str], size: int, max_tokens: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    tokens, begun = [], time.perf_counter()
    for first in range(0, len(questions), size):
        group = questions[first : first + size]
        tokens += [output.token_ids for output in ask(llm, group, params)]
    seconds = time.perf_counter() - begun
    return {"speed": sum(map(len, tokens)) / seconds, "tokens": tokens}


def page(study: Study) -> list[str]:
    """Return the page: a table of loading, and one of speeds for each kind of guesses and batch size."""
    settings, ways = study.settings, study.settings["way"]
    rounds = [cell for name, cell in study.cells.items() if name.startswith("round|")]
    lines = [
        f"# Ways of running {settings['model']}",
        "",
        f"{settings['limit']} prompts, {settings['max_tokens']} tokens each, greedy, end of text ignored; "
        f"{len(rounds)} rounds in turns, medians [least - most]. Ratios are over the first way in the same "
        "round. Tokens per second include prefill.",
        "",
        row("options", "first load, s", "later load, s"),
        row(*["---"] * 3),
    ]
    for way in ways:
        seconds = study.cells[f"load|{way}"]
        lines.append(row(f"`{way}`", f"{seconds['first']:.1f}", f"{seconds['later']:.1f}"))
    heading = ("options", "guesses", "batch", "tokens/s", "over the first way", "texts as without guesses")
    lines += ["", row(*heading), row(*["---"] * len(heading))]
    for guesses in GUESSES:
        for size in settings["batch_sizes"]:
            for way in ways:
                at = f"{guesses}|{size}"
                speeds = [cell[way][at]["speed"] for cell in rounds]
                ratios = [cell[way][at]["speed"] / cell[ways[0]][at]["speed"] for cell in rounds]
                same = all(cell[way][at]["tokens"] == cell[way][f"plain|{size}"]["tokens"] for cell in rounds)
                shown = (f"`{way}`", guesses, size, spread(speeds, 1), spread(ratios, 3))
                lines.append(row(*shown, "" if guesses == "plain" else "yes" if same else "NO"))
    return lines


if __name__ == "__main__":
    run(main)
