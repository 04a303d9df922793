"""Who asks a server when: users who wait for their answers, or arrivals that wait for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from specinfer.bench.exchange import Exchange
from specinfer.errors import ConfigError
from specinfer.report.dataset import Conversation

Messages: TypeAlias = list[dict[str, str]]
Ask: TypeAlias = Callable[[int, Messages], Awaitable[Exchange]]  # number of the request, conversation so far


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Either so many users, each with one conversation at a time, or so many conversations a second."""

    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0  # of the arrivals

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ConfigError("traffic has a concurrency or a rate: give one of --concurrency and --rate")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}; allowed: an integer >= 1")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate is {self.rate}; allowed: a number of conversations per second, above 0")


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which conversations arrive: a Poisson process with `count` / `rate` seconds.

    The last one arrives at that time exactly, as in `vllm bench serve`, so that chance does not change the
    mean rate of a short run. The same seed gives the same pattern at every rate.
    """
    gaps = np.random.default_rng(seed).exponential(size=count)
    return [float(time) for time in np.cumsum(gaps) * (count / rate / gaps.sum())]


async def send(
    conversations: Sequence[Conversation],
    traffic: Traffic,
    ask: Ask,
    on_request: Callable[[], None] = lambda: None,
) -> tuple[list[Exchange], float]:
    """Hold all conversations; returns every request's exchange, in the data set's order, and the seconds.

    Each turn follows the answer to the one before; behind a failed turn the others of its conversation fail
    unasked. `on_request` is called when a request is over. The clock is the event loop's.
    """
    loop = asyncio.get_running_loop()
    first = list(accumulate((len(c.turns) for c in conversations), initial=0))
    exchanges: dict[int, Exchange] = {}
    began = loop.time()

    async def hold(index: int) -> None:
        messages: Messages = []
        failed = 0
        for turn, question in enumerate(conversations[index].turns, start=1):
            number = first[index] + turn - 1
            if failed:
                now = loop.time()
                exchanges[number] = Exchange(now, ended=now, error=f"not asked, as turn {failed} failed")
            else:
                messages.append({"role": "user", "content": question})
                exchanges[number] = answer = await ask(number, messages)
                messages.append({"role": "assistant", "content": answer.text})
                failed = turn if answer.error else 0
            on_request()

    async def user(queue: list[int]) -> None:
        while queue:
            await hold(queue.pop())

    async with asyncio.TaskGroup() as tasks:
        if traffic.concurrency is not None:
            queue = list(reversed(range(len(conversations))))
            for _ in range(min(traffic.concurrency, len(conversations))):
                tasks.create_task(user(queue))
        elif traffic.rate is not None:
            times = arrival_times(len(conversations), traffic.rate, traffic.seed)
            for index, time in enumerate(times):
                await asyncio.sleep(began + time - loop.time())
                tasks.create_task(hold(index))
    return [exchanges[number] for number in sorted(exchanges)], loop.time() - began
