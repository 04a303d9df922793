"""Runs a server for minutes with disconnecting clients and faults, and compares every text.

    python -m benchmarks.load.soak --model TARGET --dataset alpaca.jsonl --minutes 5 --clients 32
    python -m benchmarks.load.soak ... --minutes 10 --fault engine --every 6     an engine gets SIGKILL
    python -m benchmarks.load.soak ... --replicas 2 --fault replace              engines are replaced
    python -m benchmarks.load.soak ... --tensor-parallel 2 --fault stop          a rank gets SIGSTOP
    python -m benchmarks.load.soak ... --minutes 0 --aborts 10000

Every client holds conversations of two turns; each is a session, and each answer has its own parameters and
seed. After the server has ended, the same requests are answered offline, and every text is compared: a lost
or repeated token gives a different text. Memory is that of server and engines, before and after the load.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.load.client import Answer, Client, Messages
from benchmarks.peers.process import Server, free_port
from benchmarks.study import REQUIRED, Study, in_turn, natural, parser, run, table
from specinfer import LLM, SamplingParams
from specinfer.report.dataset import read_dataset

_STARTING = 300.0  # seconds
_LAWS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 1.0, "top_k": 0},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
)
_MORE = "Say more about the last part."  # the second turn
_FAULTS = ("engine", "rank", "stop", "replace")


@dataclass
class Load:
    """The clients' requests, their answers, and the faults."""

    questions: Sequence[str]
    max_tokens: int
    turns: dict[int, tuple[Messages, Answer]] = field(default_factory=dict)  # by number, which is the seed
    faults: list[tuple[float, int]] = field(default_factory=list)  # time, and number of moved answers

    def law(self, number: int) -> dict[str, Any]:
        """Return the parameters of a request."""
        return {**_LAWS[number % len(_LAWS)], "seed": number, "max_tokens": self.max_tokens}


def main() -> None:
    options = parser(__doc__, model=REQUIRED, draft=None, dataset=REQUIRED, limit=100, max_tokens=64)
    options.add_argument("--batch-size", type=natural, default=32, help="(default 32)")
    options.add_argument("--quantization", default="none", help="none, int8 or int4 (default none)")
    options.add_argument("--lookup", action="store_true", help="use lookups")
    options.add_argument("--clients", type=natural, default=32, help="that stream at once (default 32)")
    options.add_argument("--minutes", type=float, default=5.0, help="of load (default 5)")
    options.add_argument("--replicas", type=natural, default=1, help="(default 1)")
    options.add_argument("--tensor-parallel", type=natural, default=1, help="ranks per layer (default 1)")
    options.add_argument("--pipeline-parallel", type=natural, default=1, help="stages (default 1)")
    options.add_argument("--fault", choices=_FAULTS, help="again and again (default: none)")
    options.add_argument("--every", type=float, default=6.0, metavar="SECONDS", help="of faults (default 6)")
    options.add_argument("--aborts", type=int, default=0, help="streams that clients abort")
    options.add_argument("--kv-cache-memory", default="1GB", help="of a replica (default 1GB)")
    args = options.parse_args()
    settings = {name: value for name, value in vars(args).items() if name not in ("out", "dataset")}
    study = Study("soak", args.out, {**settings, "model": Path(args.model).name})
    if "soak" not in study.cells:
        rows = in_turn([read_dataset(path) for path in args.dataset], args.limit)
        load = Load([conversation.turns[0] for conversation in rows], args.max_tokens)
        with start(args) as server:
            figures = asyncio.run(drive(server, load, args))
        study.keep("soak", figures | compare(load, args))
    print(study.write(page(study.settings, study.cells["soak"])))


def start(args: Any) -> Server:
    """Return the running server."""
    flags = ["--lookup" if args.lookup else "--no-lookup", "--quantization", args.quantization]
    if args.draft:
        flags += ["--draft", args.draft, "--draft-quantization", args.quantization]
    for name in ("replicas", "tensor_parallel", "pipeline_parallel", "kv_cache_memory"):
        flags += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    flags += ["--max-batch-size", str(args.batch_size), "--max-waiting", str(4 * args.clients)]
    # A stopped rank 0 is found by this limit.
    flags += ["--max-context", "2048", "--engine-timeout", "10", "--log-level", "warning"]
    port = free_port()
    command = [sys.executable, "-m", "specinfer", "serve", args.model, "--port", str(port), *flags]
    server = Server(command, {}, port)
    server.wait_until_ready(_STARTING)
    return server


async def drive(server: Server, load: Load, args: Any) -> dict[str, Any]:
    """Run the load on the server; return its figures, without the texts."""
    async with Client(server.url) as client, httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        await asyncio.gather(*(talk(client, load, count(10**6 + 2 * i)) for i in range(args.clients)))
        load.turns.clear()  # these warmed up
        before, used = memory(server), cpu_seconds(server)
        making = asyncio.ensure_future(make_faults(server, http, load, args))
        numbers, begun = count(), time.monotonic()

        async def user() -> None:
            while time.monotonic() < begun + 60 * args.minutes:
                await talk(client, load, numbers)

        await asyncio.gather(*(user() for _ in range(args.clients)))
        seconds = time.monotonic() - begun
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)
        await is_idle(http)  # wait for the engine after the last fault
        after_load, used = memory(server), cpu_seconds(server) - used
        await abort(client, load, args.aborts)
        idle = await is_idle(http)
    gaps = gaps_of(load)
    return {
        "seconds": seconds,
        "memory_before": before,
        "memory_after_load": after_load,
        "memory_after_aborts": memory(server),
        "faults": len(load.faults),
        "gap_p95": float(np.percentile(gaps, 95)) if gaps else 0.0,
        "gap_most": max(gaps, default=0.0),
        "server_cpu_seconds": used,
        "chunks": sum(len(answer.arrivals) for _, answer in load.turns.values()),
        "idle": idle,
    }


async def talk(client: Client, load: Load, numbers: Any) -> None:
    """Hold a conversation of two turns."""
    number = next(numbers)
    session = {"X-Session-Id": f"talk {number}"}
    messages = [{"role": "user", "content": load.questions[number % len(load.questions)]}]
    for turn in range(2):
        number = next(numbers) if turn else number
        answer = await client.ask(messages, session, **load.law(number))
        load.turns[number] = messages, answer
        if answer.error:
            return
        said = {"role": "assistant", "content": answer.text}
        messages = [*messages, said, {"role": "user", "content": _MORE}]


async def make_faults(server: Server, http: httpx.AsyncClient, load: Load, args: Any) -> None:
    """Kill, stop or replace engines or ranks, each time some seconds after all replicas accept work."""
    chance = random.Random(0)
    moved = await handed_on(http)
    while args.fault is not None:
        await asyncio.sleep(args.every)
        at = time.monotonic()
        engines = _children(psutil.Process(server.pid))
        if args.fault == "replace":
            os.kill(server.pid, signal.SIGUSR1)
        elif args.fault == "engine":
            chance.choice(engines).kill()
        else:
            ranks = [rank for engine in engines for rank in (engine, *_children(engine))]
            victim = ranks[len(load.faults) % len(ranks)]
            victim.send_signal(signal.SIGSTOP if args.fault == "stop" else signal.SIGKILL)
        await asyncio.sleep(1)
        while await serving(http) < args.replicas:
            await asyncio.sleep(0.1)
        now = await handed_on(http)
        load.faults.append((at, now - moved))
        moved = now


def _children(process: psutil.Process) -> list[psutil.Process]:
    """Return the children in the order in which they started."""
    return sorted(process.children(), key=lambda one: (one.create_time(), one.pid))


async def serving(http: httpx.AsyncClient) -> int:
    """Return the number of replicas that accept work."""
    answer = (await http.get("/ready")).json()
    return int(answer.get("serving", answer.get("status") == "ready"))


async def handed_on(http: httpx.AsyncClient) -> int:
    """Return the number of answers so far that another engine continued."""
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("specinfer:num_handed_on{"))


def gaps_of(load: Load) -> list[float]:
    """Return the longest gaps of streams at each fault, as many as the server moved."""
    found: list[float] = []
    spans = [pair for _, answer in load.turns.values() for pair in pairwise(answer.arrivals)]
    for at, moved in load.faults:
        open_then = sorted(later - earlier for earlier, later in spans if earlier <= at < later)
        found += open_then[len(open_then) - min(moved, len(open_then)) :]
    return found


async def abort(client: Client, load: Load, number: int) -> None:
    """Start streams and abort them, before the first chunk or after a few."""
    chance, room = random.Random(0), asyncio.Semaphore(64)

    async def one(question: str) -> None:
        patience, chunks = chance.random() * 0.5, chance.randrange(6)
        async with room:
            try:
                async with asyncio.timeout(60 if chunks else patience):
                    messages = [{"role": "user", "content": question}]
                    stream = await client.stream(messages, {}, {"max_tokens": 200})
                    async for _ in stream:
                        if (chunks := chunks - 1) <= 0:
                            break
                    await stream.close()
            except TimeoutError:
                pass

    await asyncio.gather(*(one(load.questions[n % len(load.questions)]) for n in range(number)))


async def is_idle(http: httpx.AsyncClient) -> bool:
    """Return True if within half a minute the engines are idle with all blocks free."""
    for _ in range(60):
        ready = (await http.get("/ready")).is_success
        lines = (await http.get("/metrics")).text.splitlines()
        busy = [line for line in lines if "num_requests_running{" in line or "usage_perc{" in line]
        if ready and all(line.endswith(" 0.0") for line in busy):
            return True
        await asyncio.sleep(0.5)
    return False


def cpu_seconds(server: Server) -> float:
    """Return CPU seconds of the server's own process: HTTP, tokenizing, messages to the engine."""
    times = psutil.Process(server.pid).cpu_times()
    return float(times.user + times.system)


def memory(server: Server) -> int:
    """Return the resident bytes of the server and its engines; shared ones count for each."""
    parent = psutil.Process(server.pid)
    return sum(process.memory_info().rss for process in [parent, *parent.children(recursive=True)])


def compare(load: Load, args: Any) -> dict[str, Any]:
    """Answer the same requests offline; return the differing texts and the speed."""
    drafts = {"drafts": [args.draft], "draft_quantization": args.quantization} if args.draft else {}
    numbers = sorted(load.turns)
    asked = [list(load.turns[n][0]) for n in numbers]
    with LLM(
        args.model,
        quantization=args.quantization,
        lookup=args.lookup,
        max_batch_size=args.batch_size,
        kv_cache_memory=1 << 30,
        max_context=2048,
        **drafts,
    ) as llm:
        params = [SamplingParams(**load.law(n)) for n in numbers]
        llm.chat(asked[:4], params[:4])
        begun = time.monotonic()
        outputs = llm.chat(asked, params)
        seconds = time.monotonic() - begun
    pairs = [(n, load.turns[n][1], output) for n, output in zip(numbers, outputs, strict=True)]
    wrong = [pair for pair in pairs if pair[1].error or pair[1].text != pair[2].text]
    for number, answer, output in wrong[:5]:
        print(f"{number}: {answer.error or answer.text!r}, offline {output.text!r}", flush=True)
    good = [(answer, output) for _, answer, output in pairs if not answer.error]
    return {
        "requests": len(numbers),
        "failed": len(numbers) - len(good),
        "different": sum(answer.text != output.text for answer, output in good),
        "tokens": sum(answer.tokens for answer, _ in good),
        "offline_tokens": sum(len(output.token_ids) for output in outputs),
        "offline_seconds": seconds,
    }


def page(settings: Mapping[str, Any], cell: Mapping[str, Any]) -> list[str]:
    """Return the page, in Markdown."""
    server = cell["tokens"] / cell["seconds"] if cell["seconds"] else 0.0
    offline = cell["offline_tokens"] / cell["offline_seconds"]
    before = cell["memory_before"]
    chunk_ms = 1000 * cell["server_cpu_seconds"] / max(1, cell["chunks"])
    engines = "{replicas} replicas of {tensor_parallel} x {pipeline_parallel} ranks".format(**settings)
    figures = {
        "requests; failed": f"{cell['requests']}; {cell['failed']}",
        "texts that differ from the offline text of their seed": cell["different"],
        f"faults ({settings['fault'] or 'none'})": cell["faults"],
        "gap of streams that went on elsewhere, s: 95th percentile; most": f"{cell['gap_p95']:.2f}; "
        f"{cell['gap_most']:.2f}",
        "output tokens/s: server; the same requests offline; ratio": f"{server:.1f}; {offline:.1f}; "
        f"{server / offline:.3f}",
        "CPU time of the server's own process for a chunk, ms": f"{chunk_ms:.2f}",
        "memory before, MiB": before >> 20,
        "memory after the load, over before": f"{cell['memory_after_load'] / before:.3f}",
        f"memory after {settings['aborts']} aborted requests": f"{cell['memory_after_aborts'] / before:.3f}",
        "all blocks free when idle": "yes" if cell["idle"] else "no",
    }
    return [
        f"# A server under load: {settings['model']}, {settings['quantization']}",
        "",
        f"{settings['clients']} clients hold conversations of two turns for {settings['minutes']:g} minutes "
        f"with {engines}, batch {settings['batch_size']}, {settings['max_tokens']} tokens at most; laws in "
        "turn: greedy, T = 0.8, T = 0.8 with top_p and top_k.",
        "",
        *table("what | figure", figures.items()),
    ]


if __name__ == "__main__":
    run(main)
