"""How much of its speed decoding keeps beside other programs that keep cores busy.

    python benchmarks/neighbour.py --model TARGET --quantization none,int8,int4

Rounds in turns: alone, then beside so many processes that do nothing but count. No speculation, one request,
greedy; tokens per second of decoding. With two cores and one neighbour two threads have two thirds of the
machine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from study import Study, natural, parser, row, run, settings_of

from specinfer import LLM, SamplingParams

PROMPT = list(range(100, 132))
BUSY = "while True: pass"
SETTLED = 0.5  # seconds until a neighbour counts


def main() -> None:
    options = parser(__doc__, model="smollm2-135m", quantization="int8", rounds=5, threads=None)
    options.add_argument("--neighbours", type=natural, default=1, help="processes that keep a core busy each")
    options.add_argument("--tokens", type=natural, default=128, help="of an answer")
    args = options.parse_args()
    study = Study("neighbour", args.out, settings_of(args, without=["quantization"]))
    for quantization in args.quantization.split(","):
        if quantization not in study.cells:
            study.keep(quantization, measure(args.model, quantization, args))
    print(study.write(page(study), args.threads))


def measure(model: str, quantization: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of every round, alone and beside the neighbours."""
    llm = LLM(model, quantization=quantization, threads=args.threads)
    tokens_per_second(llm, args.tokens)
    rates: dict[str, list[float]] = {"alone": [], "beside": []}
    for _ in range(args.rounds):
        rates["alone"].append(tokens_per_second(llm, args.tokens))
        with neighbours(args.neighbours):
            rates["beside"].append(tokens_per_second(llm, args.tokens))
    return rates


def tokens_per_second(llm: LLM, count: int) -> float:
    """Of the answer to one prompt, from its first token on."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    arrivals: list[float] = []
    llm.generate([PROMPT], params, on_output=lambda output: arrivals.append(time.perf_counter()))
    return (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """So many processes count while the block runs."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        time.sleep(SETTLED)
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def page(study: Study) -> list[str]:
    settings = study.settings
    lines = [
        f"# Decoding beside {settings['neighbours']} busy process(es): {settings['model']}",
        "",
        f"Tokens per second without speculation, medians of {settings['rounds']} rounds (least to most).",
        "",
        "| quantization | alone | beside | of it |",
        "|---|---|---|---|",
    ]
    for quantization, rates in study.cells.items():
        alone, beside = (statistics.median(rates[name]) for name in ("alone", "beside"))
        share = f"{beside / alone:.2f}"
        lines.append(row(quantization, _spread(rates["alone"]), _spread(rates["beside"]), share))
    return lines


def _spread(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"


if __name__ == "__main__":
    run(main)
