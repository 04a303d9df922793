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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from provenance import default_result, provenance_lines

from specinfer import LLM, SamplingParams
from specinfer.errors import SpecInferError

PROMPT = list(range(100, 132))
BUSY = "while True: pass"
SETTLED = 0.5  # seconds until a neighbour counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m", help="folder, GGUF file or name")
    parser.add_argument("--quantization", default="int8", help="none,int8,int4")
    parser.add_argument("--neighbours", type=int, default=1, help="processes that keep a core busy each")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: physical cores")
    parser.add_argument("--out", type=Path, help="Markdown file")
    args = parser.parse_args()
    found: dict[str, Mapping[str, Sequence[float]]] = {}
    try:
        for quantization in args.quantization.split(","):
            found[quantization] = measure(args.model, quantization, args)
    except SpecInferError as error:
        sys.exit(f"error: {error}")
    page = markdown(args, found)
    print(page)
    out = args.out or default_result("neighbour", Path(args.model).stem)
    out.write_text(page)


def measure(model: str, quantization: str, args: argparse.Namespace) -> Mapping[str, list[float]]:
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


def markdown(args: argparse.Namespace, found: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    lines = [
        f"# Decoding beside {args.neighbours} busy process(es): {Path(args.model).stem}",
        "",
        f"Tokens per second without speculation, medians of {args.rounds} rounds (least to most).",
        "",
        "| quantization | alone | beside | of it |",
        "|---|---|---|---|",
    ]
    for quantization, rates in found.items():
        alone, beside = (statistics.median(rates[name]) for name in ("alone", "beside"))
        cells = [quantization, _spread(rates["alone"]), _spread(rates["beside"]), f"{beside / alone:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *provenance_lines(args.threads), ""])


def _spread(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"


if __name__ == "__main__":
    main()
