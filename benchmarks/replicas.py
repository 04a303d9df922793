"""Replicas of one model behind one server: how much faster, what kills lose, whether second turns are cached.

    python benchmarks/replicas.py --model smollm2-135m --dataset alpaca.jsonl
    python benchmarks/replicas.py ... --minutes 10 --kill-every 3 --users 16

Every user holds talks of two turns, each talk a session of its own, each answer with a seed of its own: with
one replica and with several in turns, then with several of which one gets SIGKILL, again and again, then with
several whose engines are replaced (SIGUSR1) as often. A replica computes with `--threads` cores. When a
server has ended, the same requests are answered offline, and every text is compared: a token that is lost or
comes twice is a different text.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
from peers.process import Server, free_port
from study import REQUIRED, Study, in_turn, natural, parser, row, run, settings_of

from specinfer import LLM, SamplingParams
from specinfer.bench.exchange import Exchange
from specinfer.bench.openai_client import Asking, ask, connect, first_model
from specinfer.report.dataset import read_dataset

_STARTING = 300.0  # seconds
_TEMPERATURES = (0.0, 0.8)  # in turns
_MORE = "Say more about the last part."  # the second turn
_FOUND = 0.5  # of the first turn's prompt, in the cache, for a second turn to have found its prefix


@dataclass
class Turn:
    """A question with what was said before it, and its answer."""

    number: int  # also its seed
    messages: list[dict[str, str]]
    exchange: Exchange

    @property
    def is_second(self) -> bool:
        """Whether it is the second of its talk."""
        return len(self.messages) > 1


@dataclass
class Load:
    """What users asked a server, and what they got."""

    questions: Sequence[str]
    max_tokens: int
    turns: list[Turn] = field(default_factory=list)
    kills: int = 0
    seconds: float = 0.0

    def params(self, number: int) -> SamplingParams:
        """The parameters of a request; its seed is its number."""
        return SamplingParams(temperature=_TEMPERATURES[number % 2], seed=number, max_tokens=self.max_tokens)


def main() -> None:
    options = parser(
        __doc__,
        model=REQUIRED,
        dataset=REQUIRED,
        limit=100,
        max_tokens=64,
        batch_size=16,
        quantization="int8",
        rounds=2,
        threads=1,
    )
    options.add_argument("--replicas", type=natural, default=2, help="against one (default 2)")
    options.add_argument("--users", type=natural, default=16, help="that talk at once (default 16)")
    options.add_argument("--minutes", type=float, default=3.0, help="of each load (default 3)")
    options.add_argument("--kill-every", type=float, default=3.0, metavar="SECONDS", help="(default 3)")
    options.add_argument("--kv-cache-memory", default="512MB", help="of a replica (default 512MB)")
    args = options.parse_args()
    study = Study("replicas", args.out, settings_of(args))
    questions = [c.turns[0] for c in in_turn([read_dataset(path) for path in args.dataset], args.limit)]
    for kind, count, number in cells(args.rounds, args.replicas):
        name = f"{kind}, {count}, {number}"
        if name not in study.cells:
            load = Load(questions, args.max_tokens)
            asyncio.run(drive(load, args, count, kind))
            study.keep(name, figures(load) | {"different": different(load, args)})
    print(study.write(page(study.settings, study.cells), args.threads))


def cells(rounds: int, replicas: int) -> list[tuple[str, int, int]]:
    """What is measured: the kind of load, replicas, the round."""
    speed = [("plain", count, number) for number in range(rounds) for count in (1, replicas)]
    return [*speed, ("kills", replicas, 0), ("replacing", replicas, 0)]


def start(args: Any, count: int) -> Server:
    """The server, listening."""
    port = free_port()
    flags = ["--replicas", str(count), "--threads", str(args.threads), "--quantization", args.quantization]
    flags += ["--max-batch-size", str(args.batch_size), "--max-waiting", str(4 * args.users)]
    flags += ["--kv-cache-memory", args.kv_cache_memory, "--max-context", "2048", "--log-level", "warning"]
    command = [sys.executable, "-m", "specinfer", "serve", args.model, "--port", str(port), *flags]
    server = Server(command, {}, port)
    server.wait_until_ready(_STARTING)
    return server


async def drive(load: Load, args: Any, count: int, kind: str) -> None:
    """Put the load on a server of its own, in the presence of kills where the kind says so."""
    with start(args, count) as server:
        async with connect(server.url, None) as http:
            model = await first_model(http, 60)
            await all_serve(http, count)
        numbers = iter(range(10**6))
        begun = time.monotonic()
        until = begun + 60 * args.minutes

        async def user(who: int) -> None:
            chance = random.Random(who)
            async with connect(server.url, None) as http:
                while time.monotonic() < until:
                    http.headers["X-Session-Id"] = f"user {who}, talk {time.monotonic()}"
                    await talk(http, load, model, chance.choice(load.questions), numbers)

        async with trouble(server, load, kind, args.kill_every, count):
            await asyncio.gather(*(user(who) for who in range(args.users)))
        load.seconds = time.monotonic() - begun


async def talk(http: Any, load: Load, model: str, question: str, numbers: Any) -> None:
    """A talk of two turns."""
    messages = [{"role": "user", "content": question}]
    for _ in range(2):
        number = next(numbers)
        temperature = load.params(number).temperature
        asking = Asking(params=SamplingParams(temperature=temperature, max_tokens=load.max_tokens))
        exchange = await ask(http, asking, model, number, messages)
        load.turns.append(Turn(number, messages, exchange))
        if exchange.error:
            return
        messages = [
            *messages,
            {"role": "assistant", "content": exchange.text},
            {"role": "user", "content": _MORE},
        ]


async def all_serve(http: Any, count: int) -> None:
    """Return when so many replicas take work."""
    while (await http.get("/ready", timeout=60)).json().get("serving") != count:
        await asyncio.sleep(0.1)


@asynccontextmanager
async def trouble(server: Server, load: Load, kind: str, every: float, count: int) -> AsyncIterator[None]:
    """A block in which engines are killed, one by one, or the server is told to replace them.

    Each time `every` seconds after all replicas took work.
    """

    async def make() -> None:
        chance = random.Random(0)
        async with connect(server.url, None) as http:
            while True:
                await all_serve(http, count)
                await asyncio.sleep(every)
                if kind == "replacing":
                    os.kill(server.pid, signal.SIGUSR1)
                    await asyncio.sleep(1)
                else:
                    chance.choice(psutil.Process(server.pid).children()).kill()
                load.kills += 1

    making = asyncio.ensure_future(asyncio.sleep(0) if kind == "plain" else make())
    try:
        yield
    finally:
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)


def figures(load: Load) -> dict[str, Any]:
    """What a load came to."""
    good = [turn for turn in load.turns if not turn.exchange.error]
    for turn in [turn for turn in load.turns if turn.exchange.error][:5]:
        print(turn.number, turn.exchange.error, flush=True)
    gaps = sorted(gap for turn in good for gap in turn.exchange.itls)
    second = [turn for turn in good if turn.is_second]
    first = {
        turn.messages[0]["content"]: turn.exchange.prompt_tokens or 0 for turn in good if not turn.is_second
    }
    found = [
        (turn.exchange.cached_tokens or 0) >= _FOUND * first[turn.messages[0]["content"]] for turn in second
    ]
    return {
        "requests": len(load.turns),
        "failed": len(load.turns) - len(good),
        "kills": load.kills,
        "seconds": load.seconds,
        "tokens": sum(turn.exchange.output_tokens for turn in good),
        "gap_p95": gaps[int(0.95 * len(gaps))] if gaps else 0.0,
        "gap_most": gaps[-1] if gaps else 0.0,
        "second_turns": len(second),
        "found": sum(found),
    }


def different(load: Load, args: Any) -> int:
    """How many texts are not those of the same requests offline."""
    good = [turn for turn in load.turns if not turn.exchange.error]
    with LLM(
        args.model,
        quantization=args.quantization,
        max_batch_size=32,
        kv_cache_memory=1 << 30,
        max_context=2048,
    ) as llm:
        outputs = llm.chat([turn.messages for turn in good], [load.params(turn.number) for turn in good])
    return sum(turn.exchange.text != output.text for turn, output in zip(good, outputs, strict=True))


def page(settings: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The page, Markdown."""
    count = settings["replicas"]
    speed = {
        n: statistics.median(
            cell["tokens"] / cell["seconds"]
            for name, cell in found.items()
            if name.startswith(f"plain, {n},") and cell["seconds"]
        )
        for n in (1, count)
    }
    lines = [
        f"# Replicas: {settings['model']}, {settings['quantization']}",
        "",
        f"{settings['users']} users hold talks of two turns for {settings['minutes']:g} minutes, each with a "
        f"session of its own; a replica has {settings['threads']} threads and batches of "
        f"{settings['batch_size']}; answers have {settings['max_tokens']} tokens at most, greedy and T = 0.8 "
        f"in turn. Trouble is SIGKILL for one engine, or SIGUSR1 for the server, each time "
        f"{settings['kill_every']:g} s after all replicas took work.",
        "",
        f"Output tokens/s, {count} replicas over one, medians: {speed[count] / speed[1]:.2f}.",
        "",
        row(
            *("load", "replicas", "requests; failed", "other texts than offline", "troubles", "tokens/s"),
            *("gap p95, s", "longest", "second turns that found their prefix"),
        ),
        row(*["---"] * 9),
    ]
    for name, cell in found.items():
        kind, replicas, _ = name.split(", ")
        lines.append(
            row(
                *(kind, replicas, f"{cell['requests']}; {cell['failed']}", cell["different"], cell["kills"]),
                f"{cell['tokens'] / cell['seconds']:.1f}" if cell["seconds"] else "-",
                *(f"{cell['gap_p95']:.3f}", f"{cell['gap_most']:.2f}"),
                f"{cell['found']} of {cell['second_turns']}",
            )
        )
    return lines


if __name__ == "__main__":
    run(main)
