"""Measures replicas of one model behind one server: speed, losses by kills, prefix reuse of second turns.

    python -m benchmarks.load.replicas --model smollm2-135m --dataset alpaca.jsonl
    python -m benchmarks.load.replicas ... --only kills --kills 200 --users 16
    python -m benchmarks.load.replicas ... --only plain --pinned
    python -m benchmarks.load.replicas ... --replicas 1 --tensor-parallel 2 --only rank-kills
    python -m benchmarks.load.replicas ... --only channel                         (with specinfer[cluster])

Every user holds conversations of two turns; each is a session, and each answer has its own seed. There are
four loads: one replica and several, alternating; several replicas with SIGKILL to one again and again;
and several whose engines are replaced (SIGUSR1) as often. A replica computes with `--threads` cores. After a
server has ended, the same requests are answered offline, and every text is compared: a lost or repeated token
gives a different text. A cell has twenty kills, so an interrupted run loses at most these. With ranks or
stages, rank-kills and rank-stops send SIGKILL or SIGSTOP to each rank in turn. For rank-cuts, one of two
ranks or stages runs in another network namespace, and each end of the link between them is taken down in turn
(needs root).

`--pinned` gives engines, server and users together as many cores as there are replicas: for a machine without
spare cores for users. The cost of a message from an engine to the server (channels.py) needs no load.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psutil

from benchmarks.load import channels
from benchmarks.load.replicas_page import draw, p95, page
from benchmarks.machines.two_nodes import MASTER, Nodes, call, enter, follower, two_nodes
from benchmarks.peers.process import Server, specinfer_server
from benchmarks.study import REQUIRED, Study, natural, parser, questions_of, run, settings_of
from specinfer import LLM, SamplingParams
from specinfer.bench.exchange import Exchange
from specinfer.bench.openai_client import RequestOptions, connect, first_model, send_request

_STARTING = 300.0  # seconds
_SILENT = 10  # seconds after which the server restarts an engine that does not respond: a stopped rank 0
_TEMPERATURES = (0.0, 0.8)  # alternating
_MORE = "Say more about the last part."  # the second turn
_KILLS = 20  # per cell
_KINDS = ("plain", "kills", "replacing", "channel")
_RANK_SIGNALS = {"rank-kills": signal.SIGKILL, "rank-stops": signal.SIGSTOP}
_CUTS = "rank-cuts"
_RANK_KINDS = (*_RANK_SIGNALS, _CUTS)
_FOUND = 0.5  # min share of the first turn's prompt in the cache for prefix reuse of a second turn


@dataclass
class Turn:
    """A question with the conversation before it, and its answer."""

    number: int  # also its seed
    messages: list[dict[str, str]]
    exchange: Exchange

    @property
    def is_second(self) -> bool:
        """True for the second turn of a conversation."""
        return len(self.messages) > 1


@dataclass
class Load:
    """The users' requests to a server, and its answers."""

    questions: Sequence[str]
    max_tokens: int
    turns: list[Turn] = field(default_factory=list)
    kills: int = 0
    killed: list[tuple[float, int]] = field(default_factory=list)  # time, and number of moved answers
    seconds: float = 0.0

    def params(self, number: int) -> SamplingParams:
        """Return the parameters of a request; its seed is its number."""
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
    options.add_argument("--users", type=natural, default=16, help="concurrent users (default 16)")
    options.add_argument(
        "--minutes", type=float, default=3.0, help="minutes of a load without kills (default 3)"
    )
    options.add_argument("--kills", type=natural, default=2 * _KILLS, help=f"(default {2 * _KILLS})")
    options.add_argument("--pinned", action="store_true", help="a core a replica, for users too")
    options.add_argument("--tensor-parallel", type=natural, default=1, help="ranks per layer (default 1)")
    options.add_argument("--pipeline-parallel", type=natural, default=1, help="stages (default 1)")
    options.add_argument(
        "--only",
        choices=[*_KINDS, *_RANK_KINDS],
        action="append",
        help="repeatable (default: all except rank-kills, rank-stops and rank-cuts)",
    )
    options.add_argument("--kill-every", type=float, default=3.0, metavar="SECONDS", help="(default 3)")
    options.add_argument("--kv-cache-memory", default="512MB", help="of a replica (default 512MB)")
    args = options.parse_args()
    study = Study("replicas", args.out, settings_of(args, without=["only"]))
    questions = questions_of(args.dataset, args.limit)
    for kind, count, number in cells(args):
        name = f"{kind}, {count}, {number}"
        if name in study.cells:
            continue
        if kind == "channel":
            study.keep(name, channels.measure("ray" if number else "process"))
            continue
        load = Load(questions, args.max_tokens)
        with cores(count if args.pinned else 0):
            asyncio.run(drive(load, args, count, kind))
        study.keep(name, figures(load) | {"different": different(load, args)})
    picture = study.out.with_suffix(".png")
    shown = ["", f"![Gaps of streams]({picture.name})"] if draw(study.cells, picture) else []
    print(study.write([*page(study.settings, study.cells), *shown], args.threads))


def cells(args: Any) -> list[tuple[str, int, int]]:
    """Return the cells: the kind of load, replicas, the round."""
    found = [("plain", count, number) for number in range(args.rounds) for count in (1, args.replicas)]
    rounds = range(-(-args.kills // _KILLS))
    for kind in ("kills", *_RANK_SIGNALS):
        found += [(kind, args.replicas, number) for number in rounds]
    found += [("replacing", args.replicas, 0), ("channel", 1, 0), ("channel", 1, 1)]
    found += [(_CUTS, 1, number) for number in rounds]  # last: this process then stays on a node
    return [cell for cell in found if cell[0] in (args.only or _KINDS)]


@contextmanager
def cores(count: int) -> Iterator[None]:
    """Limit this process and those it starts to `count` cores in the block; 0: no limit."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[: count or None])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def start(args: Any, count: int, nodes: Nodes | None) -> Server:
    """Return the running server, on the first of the nodes if its ranks are on two."""
    flags = ["--replicas", str(count), "--threads", str(args.threads), "--quantization", args.quantization]
    flags += ["--max-batch-size", str(args.batch_size), "--max-waiting", str(4 * args.users)]
    flags += ["--tensor-parallel", str(args.tensor_parallel)]
    flags += ["--pipeline-parallel", str(args.pipeline_parallel)]
    flags += ["--kv-cache-memory", args.kv_cache_memory, "--max-context", "2048"]
    flags += ["--engine-timeout", str(_SILENT)]
    if nodes is not None:
        flags += ["--master", MASTER, "--key-file", nodes.key_file]
    server = specinfer_server(args.model, *flags)
    server.wait_until_ready(_STARTING)
    return server


async def drive(load: Load, args: Any, count: int, kind: str) -> None:
    """Run the load on a new server, with kills if the kind has them."""
    with ExitStack() as stack:
        nodes: Nodes | None = None
        if kind == _CUTS:
            nodes = stack.enter_context(two_nodes())
            stack.enter_context(follower(nodes, args.model, max(os.sched_getaffinity(0))))
            enter(nodes.here)
        server = stack.enter_context(start(args, count, nodes))
        async with connect(server.url, None) as http:
            model = await first_model(http, 60)
            await all_serve(http, count)
        numbers = iter(range(10**6))
        begun = time.monotonic()

        def goes_on() -> bool:
            if kind == "kills" or kind in _RANK_KINDS:
                return load.kills < _KILLS
            return bool(time.monotonic() < begun + 60 * args.minutes)

        async def user(who: int) -> None:
            chance = random.Random(who)
            async with connect(server.url, None) as http:
                while goes_on():
                    http.headers["X-Session-Id"] = f"user {who}, talk {time.monotonic()}"
                    await talk(http, load, model, chance.choice(load.questions), numbers)

        async with trouble(server, load, kind, args.kill_every, count, nodes):
            await asyncio.gather(*(user(who) for who in range(args.users)))
        load.seconds = time.monotonic() - begun


async def talk(http: Any, load: Load, model: str, question: str, numbers: Any) -> None:
    """Hold a conversation of two turns."""
    messages = [{"role": "user", "content": question}]
    for _ in range(2):
        number = next(numbers)
        temperature = load.params(number).temperature
        request_options = RequestOptions(
            params=SamplingParams(temperature=temperature, max_tokens=load.max_tokens)
        )
        exchange = await send_request(http, request_options, model, number, messages)
        load.turns.append(Turn(number, messages, exchange))
        if exchange.error:
            return
        messages = [
            *messages,
            {"role": "assistant", "content": exchange.text},
            {"role": "user", "content": _MORE},
        ]


async def handed_on(http: Any) -> int:
    """Return the number of answers so far that another engine continued."""
    lines = (await http.get("/metrics", timeout=60)).text.splitlines()
    [number] = [line.split()[-1] for line in lines if line.startswith("specinfer:num_handed_on{")]
    return int(float(number))


async def one_is_lost(http: Any, count: int) -> None:
    """Wait until fewer than this number of replicas accept work."""
    while (await http.get("/ready", timeout=60)).json().get("serving") == count:
        await asyncio.sleep(0.05)


async def all_serve(http: Any, count: int) -> None:
    """Wait until this number of replicas accept work."""
    while (await http.get("/ready", timeout=60)).json().get("serving") != count:
        await asyncio.sleep(0.1)


def victim(server: int, number: int) -> psutil.Process:
    """Return the process of a server that fault `number` is for: each rank of each engine in turn."""
    ranks: list[psutil.Process] = []
    for engine in _children(psutil.Process(server)):
        ranks += [engine, *_children(engine)]
    return ranks[number % len(ranks)]


def _children(process: psutil.Process) -> list[psutil.Process]:
    """Return the children in the order in which they started."""
    return sorted(process.children(), key=lambda one: (one.create_time(), one.pid))


@asynccontextmanager
async def trouble(
    server: Server, load: Load, kind: str, every: float, count: int, nodes: Nodes | None
) -> AsyncIterator[None]:
    """In the block, kill engines or ranks one by one, cut the nodes' link, or have engines replaced.

    Each event comes `every` seconds after all replicas accept work.
    """

    async def make() -> None:
        chance = random.Random(time.monotonic())
        async with connect(server.url, None) as http:
            await all_serve(http, count)
            before = await handed_on(http)
            while True:
                await asyncio.sleep(every)
                at = time.monotonic()
                if kind == "replacing":
                    os.kill(server.pid, signal.SIGUSR1)
                    await asyncio.sleep(1)
                elif kind == "kills":
                    chance.choice(psutil.Process(server.pid).children()).kill()
                elif nodes is not None:
                    end = load.kills % 2
                    link = ("ip", "-n", (nodes.here, nodes.there)[end], "link", "set", f"end{end}")
                    call(*link, "down")
                    await one_is_lost(http, count)
                    call(*link, "up")
                else:
                    victim(server.pid, load.kills).send_signal(_RANK_SIGNALS[kind])
                    await one_is_lost(http, count)
                await all_serve(http, count)
                now = await handed_on(http)
                load.killed.append((at, now - before))
                before = now
                load.kills += 1

    making = asyncio.ensure_future(asyncio.sleep(0) if kind == "plain" else make())
    try:
        yield
    finally:
        making.cancel()
        await asyncio.gather(making, return_exceptions=True)


def gaps_of(load: Load) -> list[float]:
    """Return the longest gaps of the streams that another engine continued.

    After a kill, takes the longest gaps of the open streams, as many as the server moved; the other streams
    had none.
    """
    found: list[float] = []
    for at, moved in load.killed:
        spans = [pair for turn in load.turns for pair in pairwise(turn.exchange.arrivals)]
        open_then = sorted(later - earlier for earlier, later in spans if earlier <= at < later)
        found += open_then[len(open_then) - min(moved, len(open_then)) :]
    return found


def figures(load: Load) -> dict[str, Any]:
    """Return the figures of a load."""
    good = [turn for turn in load.turns if not turn.exchange.error]
    for turn in [turn for turn in load.turns if turn.exchange.error][:5]:
        print(turn.number, turn.exchange.error, flush=True)
    gaps = gaps_of(load) if load.killed else [gap for turn in good for gap in turn.exchange.itls]
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
        "gap_p95": p95(gaps),
        "gap_most": max(gaps, default=0.0),
        "gaps": [round(gap, 3) for gap in gaps] if load.killed else [],
        "second_turns": len(second),
        "found": sum(found),
    }


def different(load: Load, args: Any) -> int:
    """Return the number of texts that differ from those of the same requests offline."""
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


if __name__ == "__main__":
    run(main)
