"""Runs a server for minutes with disconnecting clients and killed engines, and compares every text.

    python -m benchmarks.load.soak --model TARGET --dataset alpaca.jsonl --minutes 5 --clients 32
    python -m benchmarks.load.soak ... --minutes 10 --kill-every 6   the engine gets SIGKILL every 6 seconds
    python -m benchmarks.load.soak ... --minutes 0 --aborts 10000

Every client streams one answer after the other, each with its own parameters and seed. After the server has
ended, the same requests are answered offline, and every text is compared: a lost or repeated token gives a
different text. Memory is that of server and engine, before and after the load.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.peers.process import Server, specinfer_server
from benchmarks.study import REQUIRED, Study, ask, natural, parser, questions_of, row, run, settings_of
from specinfer import LLM, SamplingParams
from specinfer.bench.exchange import Exchange
from specinfer.bench.openai_client import RequestOptions, connect, first_model, send_request

_STARTING = 300.0  # seconds
_LAWS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
)


@dataclass
class Load:
    """The clients' requests and the answers."""

    questions: Sequence[str]
    max_tokens: int
    exchanges: dict[int, Exchange] = field(default_factory=dict)  # by number
    seconds: float = 0.0

    def params(self, number: int) -> SamplingParams:
        """Return the parameters of a request; its seed is its number."""
        return SamplingParams(**_LAWS[number % len(_LAWS)], seed=number, max_tokens=self.max_tokens)

    def question(self, number: int) -> str:
        """Return a request's question."""
        return self.questions[number % len(self.questions)]


def main() -> None:
    options = parser(
        __doc__,
        model=REQUIRED,
        dataset=REQUIRED,
        limit=100,
        max_tokens=64,
        batch_size=32,
        quantization="none",
    )
    options.add_argument("--draft", help="a draft model")
    options.add_argument("--lookup", "--ngram", action="store_true", help="use lookups")
    options.add_argument("--clients", type=natural, default=32, help="that stream at once (default 32)")
    options.add_argument("--minutes", type=float, default=5.0, help="of load (default 5)")
    options.add_argument("--kill-every", type=float, metavar="SECONDS", help="SIGKILL for the engine")
    options.add_argument("--aborts", type=int, default=0, help="streams that clients abort")
    options.add_argument("--kv-cache-memory", default="1GB", help="(default 1GB)")
    args = options.parse_args()
    study = Study("soak", args.out, settings_of(args))
    questions = questions_of(args.dataset, args.limit)
    if "soak" not in study.cells:
        load = Load(questions, args.max_tokens)
        with start(args) as server:
            counts = asyncio.run(drive(server, load, args))
        study.keep("soak", counts | compare(load, args))
    print(study.write(page(study.settings, study.cells["soak"])))


def start(args: Any) -> Server:
    """Return the running server."""
    flags = ["--lookup" if args.lookup else "--no-lookup", "--quantization", args.quantization]
    if args.draft:
        flags += ["--draft", args.draft, "--draft-quantization", args.quantization]
    flags += ["--max-batch-size", str(args.batch_size), "--max-waiting", str(4 * args.clients)]
    flags += ["--kv-cache-memory", args.kv_cache_memory, "--max-context", "2048"]
    server = specinfer_server(args.model, *flags)
    server.wait_until_ready(_STARTING)
    return server


async def drive(server: Server, load: Load, args: Any) -> dict[str, Any]:
    """Run the load on the server; return its figures, without the texts."""
    async with connect(server.url, None) as http:
        model = await first_model(http, 60)

        async def one(number: int) -> Exchange:
            params = load.params(number)
            body = {"top_p": params.top_p, "top_k": params.top_k}
            request_options = RequestOptions(
                params=SamplingParams(temperature=params.temperature, max_tokens=args.max_tokens), body=body
            )
            messages = [{"role": "user", "content": load.question(number)}]
            return await send_request(http, request_options, model, number, messages)

        warm = [10**6 + i for i in range(2 * args.clients)]  # warm-up requests, which are not compared
        await asyncio.gather(*(one(number) for number in warm))
        before = memory(server)
        print(f"memory before: {before >> 20} MiB", flush=True)
        done, spent = asyncio.Event(), cpu_seconds(server)
        killer = asyncio.ensure_future(kill(server, args.kill_every or 1e9, done))
        numbers = iter(range(10**6))
        begun = time.monotonic()
        until = begun + 60 * args.minutes

        async def client() -> None:
            while time.monotonic() < until:
                number = next(numbers)
                load.exchanges[number] = await one(number)

        await asyncio.gather(*(client() for _ in range(args.clients)))
        load.seconds = time.monotonic() - begun
        done.set()
        kills = await killer
        await wait_idle(http)  # wait for the engine after the last kill
        after_load, spent = memory(server), cpu_seconds(server) - spent
        print(f"memory after the load: {after_load >> 20} MiB", flush=True)
        await abort(http, model, load, args.aborts)
        idle = await wait_idle(http)
        return {
            "memory_before": before,
            "memory_after_load": after_load,
            "memory_after_aborts": memory(server),
            "kills": kills,
            "server_cpu_seconds": spent,
            "chunks": sum(len(exchange.arrivals) for exchange in load.exchanges.values()),
            "idle": idle,
        }


async def kill(server: Server, every: float, done: asyncio.Event) -> int:
    """Kill the engine every `every` seconds until `done`; return the number of kills."""
    kills = 0
    while not done.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(every):
                await done.wait()
                break
        for process in psutil.Process(server.pid).children():
            process.kill()
            kills += 1
    return kills


async def abort(http: Any, model: str, load: Load, count: int) -> None:
    """Start streams and abort them, before the first chunk or after a few."""
    chance = random.Random(0)
    room = asyncio.Semaphore(64)

    async def one(number: int) -> None:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": load.question(number)}],
            "max_tokens": 200,
            "stream": True,
        }
        async with room:
            patience, chunks = chance.random() * 0.5, chance.randrange(6)
            try:
                async with asyncio.timeout(patience if chunks == 0 else 60):
                    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
                        async for _ in answer.aiter_bytes():
                            if (chunks := chunks - 1) <= 0:
                                return
            except TimeoutError:
                pass

    for begin in range(0, count, 500):
        await asyncio.gather(*(one(number) for number in range(begin, min(begin + 500, count))))
        print(f"{min(begin + 500, count)} aborted", flush=True)


async def wait_idle(http: Any) -> bool:
    """Return True if within half a minute an engine is idle with all blocks free."""
    for _ in range(60):
        ready = (await http.get("/ready", timeout=60)).is_success
        text = (await http.get("/metrics", timeout=60)).text
        busy = [
            line for line in text.splitlines() if "num_requests_running{" in line or "usage_perc{" in line
        ]
        if ready and all(line.endswith(" 0.0") for line in busy):
            return True
        await asyncio.sleep(0.5)
    return False


def cpu_seconds(server: Server) -> float:
    """Return CPU seconds of the server's own process: HTTP, tokenizing, messages to the engine."""
    times = psutil.Process(server.pid).cpu_times()
    return float(times.user + times.system)


def memory(server: Server) -> int:
    """Return the resident bytes of the server and its engine; shared ones count for each."""
    parent = psutil.Process(server.pid)
    return sum(process.memory_info().rss for process in [parent, *parent.children(recursive=True)])


def compare(load: Load, args: Any) -> dict[str, Any]:
    """Answer the same requests offline; return the differing texts and the speed."""
    drafts = {"drafts": [args.draft], "draft_quantization": args.quantization} if args.draft else {}
    with LLM(
        args.model,
        quantization=args.quantization,
        lookup=args.lookup,
        max_batch_size=args.batch_size,
        kv_cache_memory=1 << 30,
        max_context=2048,
        **drafts,
    ) as llm:
        numbers = sorted(load.exchanges)
        ask(llm, [load.question(n) for n in numbers[:4]], [load.params(n) for n in numbers[:4]])
        begun = time.monotonic()
        outputs = ask(llm, [load.question(n) for n in numbers], [load.params(n) for n in numbers])
        seconds = time.monotonic() - begun
    failed = [n for n in numbers if load.exchanges[n].error]
    different = [
        n
        for n, output in zip(numbers, outputs, strict=True)
        if n not in failed and load.exchanges[n].text != output.text
    ]
    for number in [*failed, *different][:5]:
        print(
            number, json.dumps(load.exchanges[number].error or load.exchanges[number].text)[:300], flush=True
        )
    good = [load.exchanges[n] for n in numbers if n not in failed]
    tokens = sum(exchange.output_tokens for exchange in good)
    offline = sum(len(output.token_ids) for output in outputs)
    return {
        "requests": len(numbers),
        "failed": len(failed),
        "different": len(different),
        "tokens": tokens,
        "seconds": load.seconds,
        "offline_tokens": offline,
        "offline_seconds": seconds,
    }


def page(settings: Mapping[str, Any], cell: Mapping[str, Any]) -> list[str]:
    """Return the page, in Markdown."""
    server = cell["tokens"] / cell["seconds"] if cell["seconds"] else 0.0
    offline = cell["offline_tokens"] / cell["offline_seconds"] if cell["offline_seconds"] else 0.0
    ratio = server / offline if offline else 0.0
    before = cell["memory_before"]
    return [
        f"# A server under load: {settings['model']}, {settings['quantization']}",
        "",
        f"{settings['clients']} clients stream for {settings['minutes']:g} minutes, "
        f"batch {settings['batch_size']}, {settings['max_tokens']} tokens at most; laws in turn: greedy, "
        "T = 0.8, T = 0.8 with top_p and top_k.",
        "",
        row("what", "figure"),
        row("---", "---"),
        row("requests; failed", f"{cell['requests']}; {cell['failed']}"),
        row("texts that differ from the offline text of their seed", cell["different"]),
        row("times the engine was killed", cell["kills"]),
        row(
            "output tokens/s: server; the same requests offline; ratio",
            f"{server:.1f}; {offline:.1f}; {ratio:.3f}",
        ),
        row(
            "CPU time of the server's own process for a chunk, ms",
            f"{1000 * cell['server_cpu_seconds'] / max(1, cell['chunks']):.2f}",
        ),
        row("memory before, MiB", before >> 20),
        row("memory behind the load, over before", f"{cell['memory_after_load'] / before:.3f}"),
        row(
            f"memory behind {settings['aborts']} aborted requests",
            f"{cell['memory_after_aborts'] / before:.3f}",
        ),
        row("all blocks free when idle", "yes" if cell["idle"] else "no"),
    ]


if __name__ == "__main__":
    run(main)
