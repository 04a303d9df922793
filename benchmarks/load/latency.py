"""Measures the time to the first token: alone, beside seven others, beside a prompt of 20,000 tokens.

    python -m benchmarks.load.latency --model qwen2.5-coder-1.5b-instruct-q4_k_m.gguf --quantization int8 \
        --dataset alpaca.jsonl --dataset gsm8k.jsonl

One server without speculation answers all loads. Each load has its own `cache_salt`, so that no prompt is
cached. The engine's prefill time is that of the first step offline, prompt by prompt.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np

from benchmarks.load.client import Client
from benchmarks.peers.process import Server, specinfer_server
from benchmarks.study import REQUIRED, Study, natural, parser, questions_of, row, run, settings_of
from specinfer import LLM, SamplingParams

_STARTING = 600.0  # seconds
_CONTEXT = 24_576


def main() -> None:
    options = parser(__doc__, model=REQUIRED, dataset=REQUIRED, limit=40, quantization="int8")
    options.add_argument("--users", type=natural, default=8, help="concurrent users (default 8)")
    options.add_argument("--long", type=natural, default=20_000, help="tokens of the long prompt")
    options.add_argument("--max-step-tokens", type=natural, default=512, help="as the server's (default 512)")
    args = options.parse_args()
    study = Study("latency", args.out, settings_of(args))
    questions = questions_of(args.dataset, args.limit)
    if "latency" not in study.cells:
        with start(args) as server:
            seconds = asyncio.run(drive(server, questions, args))
        study.keep("latency", seconds | {"prefill": prefill(args, questions)})
    print(study.write(page(study.settings, study.cells["latency"])))


def start(args: Any) -> Server:
    """Return the running server."""
    flags = ["--quantization", args.quantization, "--no-lookup", "--max-context", str(_CONTEXT)]
    flags += ["--max-step-tokens", str(args.max_step_tokens), "--kv-cache-memory", "2GB"]
    server = specinfer_server(args.model, *flags)
    server.wait_until_ready(_STARTING)
    return server


async def drive(server: Server, questions: Sequence[str], args: Any) -> dict[str, Any]:
    """Return seconds to the first token of every answer, load by load."""
    async with Client(server.url, 3600) as client, httpx.AsyncClient(base_url=server.url) as http:

        async def first_token(number: int, text: str, salt: str, tokens: int) -> float:
            asked: dict[str, Any] = {
                "temperature": 0,
                "seed": number,
                "max_tokens": tokens,
                "cache_salt": salt,
            }
            answer = await client.ask([{"role": "user", "content": text}], **asked)
            if answer.error:
                sys.exit(f"error: {answer.error}")
            return answer.first_seconds

        await first_token(0, questions[0], "warm", 4)
        alone = [await first_token(i, text, "alone", 1) for i, text in enumerate(questions)]
        print(f"alone: median {np.median(alone):.3f} s", flush=True)
        left = iter(enumerate(questions))
        beside: list[float] = []

        async def user(number: int) -> None:
            # All start together; the load continues after their first answers.
            await first_token(number, questions[number % len(questions)], f"first {number}", 8 + 4 * number)
            for other, text in left:
                beside.append(await first_token(other, text, "beside", 32))

        await asyncio.gather(*(user(number) for number in range(args.users)))
        print(f"{args.users} at once: median {np.median(beside):.3f} s", flush=True)
        long = asyncio.ensure_future(first_token(0, await long_text(http, args.long), "long", 1))
        await asyncio.sleep(2.0)
        behind: list[float] = []
        number = 0
        while len(behind) < 2 or not long.done():
            behind.append(await first_token(number, questions[number % len(questions)], f"b{number}", 1))
            number += 1
            await asyncio.sleep(0.37)  # varies the point within a step
        return {"alone": alone, "beside": beside, "behind": behind[:-1], "long": await long}


async def long_text(http: Any, tokens: int) -> str:
    """Return a text of about `tokens` tokens without repeated sentences."""
    words = [f"Item {i} of the list costs {i * 37 % 1009} coins." for i in range(tokens // 8)]
    count = (await http.post("/tokenize", json={"prompt": " ".join(words)}, timeout=60)).json()["count"]
    return " ".join(words[: int(len(words) * min(1.0, tokens / count))])


def prefill(args: Any, questions: Sequence[str]) -> list[float]:
    """Return seconds of the step that reads each prompt, one prompt at a time, offline."""
    with LLM(
        args.model,
        quantization=args.quantization,
        max_context=_CONTEXT,
        kv_cache_memory=2 << 30,
        lookup=False,
    ) as llm:
        took: list[float] = []
        for text in ["warm", *questions]:
            params = SamplingParams(temperature=0.0, max_tokens=1, cache_salt=f"{len(took)}")
            before = time.perf_counter()
            llm.chat([{"role": "user", "content": text}], params)
            took.append(time.perf_counter() - before)
    return took[1:]


def page(settings: Mapping[str, Any], cell: Mapping[str, Any]) -> list[str]:
    """Return the page, in Markdown."""

    def figures(name: str, seconds: Sequence[float]) -> str:
        return row(
            name,
            len(seconds),
            *(f"{1000 * np.percentile(seconds, p):.0f}" for p in (50, 90, 99)),
        )

    p99 = {name: np.percentile(cell[name], 99) for name in ("alone", "beside", "behind", "prefill")}
    return [
        f"# The first token: {settings['model']}, {settings['quantization']}",
        "",
        f"Without speculation; at most {settings['max_step_tokens']} rows a step. Milliseconds.",
        "",
        row("load", "requests", "median", "p90", "p99"),
        row("---", "---", "---", "---", "---"),
        figures("the engine alone, offline", cell["prefill"]),
        figures("one user", cell["alone"]),
        figures(f"{settings['users']} users at once, 32 tokens each", cell["beside"]),
        figures(f"one user, while {settings['long']:,} tokens are read", cell["behind"]),
        "",
        f"- {settings['users']} users over the engine's own, p99: {p99['beside'] / p99['prefill']:.2f}",
        f"- beside the long prompt over an idle server, p99: {p99['behind'] / p99['alone']:.2f}",
        f"- the long prompt's first token: {cell['long']:.1f} s",
    ]


if __name__ == "__main__":
    run(main)
