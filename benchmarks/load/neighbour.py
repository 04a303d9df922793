"""Measures interference by other programs that keep cores busy, or by other large requests.

    python -m benchmarks.load.neighbour --model TARGET --quantization none,int8,int4
    python -m benchmarks.load.neighbour --model TARGET --beside requests

Programs: rounds alternate between alone and beside processes that only count. One greedy request decodes
without speculation; the figure is tokens per second. With two cores and one such process, two threads get two
thirds of the machine.

Requests: a server with default options gets one large request at a time and a sequence of short ones beside
it. The figures are their times to the first token, and the server's memory before and after.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import httpx
import psutil

from benchmarks.peers.process import Server, specinfer_server
from benchmarks.study import Study, natural, parser, row, run, settings_of
from specinfer import LLM, SamplingParams

PROMPT = list(range(100, 132))
BUSY = "while True: pass"
SETTLED = 0.5  # seconds until a started process counts
ORDINARY: Final = "an ordinary prompt"
# Parameters of one request, without its prompt.
LARGE: Final[Mapping[str, Mapping[str, Any]]] = {
    ORDINARY: {},
    "prompt_logprobs 20": {"prompt_logprobs": 20},
    f"{ORDINARY}, n 16": {"n": 16},
    "prompt_logprobs 20, n 16": {"prompt_logprobs": 20, "n": 16},
    "a prediction of 2 MiB, n 16": {"prediction": "several words " * 149_797, "n": 16},
}
STARTING: Final = 600.0  # seconds


def main() -> None:
    options = parser(__doc__, model="smollm2-135m", quantization="int8", rounds=5, threads=None)
    options.add_argument("--neighbours", type=natural, default=1, help="processes that keep a core busy each")
    options.add_argument("--tokens", type=natural, default=128, help="of an answer")
    options.add_argument("--beside", choices=["programs", "requests"], default="programs")
    options.add_argument("--prompt-tokens", type=natural, default=4000, help="of the large requests")
    args = options.parse_args()
    if args.beside == "requests":
        beside_requests(args)
    else:
        beside_programs(args)


def beside_programs(args: argparse.Namespace) -> None:
    """Measure decoding beside programs that keep cores busy."""
    settings = settings_of(args, without=["quantization", "beside", "prompt_tokens"])
    study = Study("neighbour", args.out, settings)
    for quantization in args.quantization.split(","):
        if quantization not in study.cells:
            study.keep(quantization, measure(args.model, quantization, args))
    print(study.write(page(study), args.threads))


def measure(model: str, quantization: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return tokens per second of every round, alone and beside the other programs."""
    llm = LLM(model, quantization=quantization, threads=args.threads, lookup=False)
    tokens_per_second(llm, args.tokens)
    rates: dict[str, list[float]] = {"alone": [], "beside": []}
    for _ in range(args.rounds):
        rates["alone"].append(tokens_per_second(llm, args.tokens))
        with neighbours(args.neighbours):
            rates["beside"].append(tokens_per_second(llm, args.tokens))
    return rates


def tokens_per_second(llm: LLM, count: int) -> float:
    """Return tokens per second of one answer, after its first token."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    arrivals: list[float] = []
    llm.generate([PROMPT], params, on_output=lambda output: arrivals.append(time.perf_counter()))
    return (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run this number of counting processes during the block."""
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


def beside_requests(args: argparse.Namespace) -> None:
    """Measure times to the first token beside large requests."""
    settings = settings_of(args, without=["beside", "neighbours", "tokens"])
    study = Study("neighbour-requests", args.out, settings)
    left = [name for name in LARGE if name not in study.cells]
    if left:
        server = specinfer_server(args.model, "--quantization", args.quantization)
        try:
            server.wait_until_ready(STARTING)
            for name in left:
                study.keep(name, asyncio.run(drive(server, LARGE[name], args)))
        finally:
            server.close()
    print(study.write(page_of_requests(study), args.threads))


async def drive(server: Server, large: Mapping[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Return times to the first token of short requests beside a large one, and bytes of memory around it."""
    numbers = random.Random(0)
    seconds: list[float] = []
    async with httpx.AsyncClient(base_url=f"{server.url}/v1", timeout=None) as http:

        async def ask(tokens: int, **more: Any) -> float:
            # No two begin alike, so that none is found in the cache.
            prompt = [numbers.randrange(1000, 30_000) for _ in range(tokens)]
            begun = time.perf_counter()
            answer = await http.post("/completions", json={"prompt": prompt, "temperature": 0, **more})
            if answer.status_code != 200:
                sys.exit(f"error: {answer.text[:200]}")
            return time.perf_counter() - begun

        await ask(16, max_tokens=1)
        before = memory_of(server)
        for _ in range(args.rounds):
            asked = asyncio.create_task(ask(args.prompt_tokens, max_tokens=8, **large))
            await asyncio.sleep(0.1)  # it is in a step, or will be in the next one
            while not asked.done():
                seconds.append(await ask(16, max_tokens=1))
            await asked
        after = memory_of(server)
    return {"seconds": seconds, "memory_before": before, "memory_after": after}


def memory_of(server: Server) -> int:
    """Return the resident bytes of the server's processes."""
    process = psutil.Process(server.pid)
    return sum(int(one.memory_info().rss) for one in (process, *process.children(recursive=True)))


def page_of_requests(study: Study) -> list[str]:
    settings = study.settings
    lines = [
        f"# First tokens beside one large request: {settings['model']}",
        "",
        f"Short requests one after the other beside one of {settings['prompt_tokens']:,} prompt tokens, "
        f"{settings['rounds']} rounds, {settings['quantization']}.",
        "",
        "| beside | median s | longest s | of beside an ordinary one of its n | MiB before | after |",
        "|---|---|---|---|---|---|",
    ]
    for name, cell in study.cells.items():
        usual = study.cells[f"{ORDINARY}, n 16" if "n" in LARGE[name] else ORDINARY]
        times = [(f(cell["seconds"]), f(usual["seconds"])) for f in (statistics.median, max)]
        memory = [f"{cell[key] / 2**20:,.0f}" for key in ("memory_before", "memory_after")]
        ratios = ", ".join(f"{own / other:.2f}" for own, other in times)
        lines.append(row(name, *(f"{own:.2f}" for own, _ in times), ratios, *memory))
    return lines


def _spread(rates: Sequence[float]) -> str:
    return f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"


if __name__ == "__main__":
    run(main)
