"""Load test of a server: send a data set's conversations and collect the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from specinfer.bench.exchange import Exchange
from specinfer.bench.load_figures import figures
from specinfer.bench.openai_client import (
    ENDPOINTS,
    RequestOptions,
    connect,
    first_model,
    send_request,
    server_root,
)
from specinfer.errors import ConfigError
from specinfer.report.dataset import Conversation, Dataset
from specinfer.version import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """The server, the request options, the traffic and the warm-up."""

    url: str
    request: RequestOptions
    traffic: Traffic
    model: str | None = None  # None: the first model that the server lists
    api_key: str | None = None
    warm_up: int = 1  # uncounted requests at the start
    save_texts: bool = False

    def __post_init__(self) -> None:
        if self.warm_up < 0:
            raise ConfigError(f"warm-up is {self.warm_up}; allowed: an integer >= 0")


def first_requests(dataset: Dataset, count: int | None) -> Dataset:
    """Return the conversations that make the first `count` requests, the last one cut short; None for all.

    Raises ConfigError if the data set is smaller: a repeated question would be answered from caches.
    """
    if count is None:
        return dataset
    if not 1 <= count <= dataset.num_turns:
        raise ConfigError(
            f"the number of requests is {count}; {dataset.name} has {dataset.num_turns}, and repeated ones "
            "would be answered from caches: give fewer, or a larger --dataset"
        )
    selected: list[Conversation] = []
    for conversation in dataset.conversations:
        if count > 0:
            selected.append(replace(conversation, turns=conversation.turns[:count]))
            count -= len(conversation.turns)
    return replace(dataset, conversations=tuple(selected))


def measure(
    load: ServerLoad, dataset: Dataset, on_request: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Warm up, send all requests, and return the figures and the settings as plain JSON values.

    Raises ConfigError if the server cannot be reached, lists no model, or fails the warm-up.
    """
    return asyncio.run(_measure(load, dataset, on_request))


async def _measure(load: ServerLoad, dataset: Dataset, on_request: Callable[[], None]) -> dict[str, Any]:
    request = load.request
    async with connect(load.url, load.api_key) as http:
        model = await first_model(http, request.timeout) if load.model is None else load.model

        async def send_one(number: int, messages: Messages) -> Exchange:
            return await send_request(http, request, model, number, messages)

        await _warm_up(load, send_one)
        cpu = time.process_time()
        exchanges, duration = await send(dataset.conversations, load.traffic, send_one, on_request)
        cpu = time.process_time() - cpu
    traffic, params = load.traffic, request.params
    result = {
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "specinfer": VERSION,
        "base_url": server_root(load.url).rpartition("@")[2],  # the part before an @ may be a password
        "endpoint": ENDPOINTS[request.endpoint],
        "model_id": model,
        "dataset": dataset.name,
        "num_prompts": dataset.num_turns,
        "options": {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "seed": params.seed or 0,
            "ignore_eos": request.ignore_eos,
            "body": dict(request.body),
            "timeout": request.timeout,
            "warm_up": load.warm_up,
        },
        "request_rate": "inf" if traffic.rate is None else traffic.rate,
        "burstiness": 1.0,  # arrivals are a Poisson process
        "max_concurrency": traffic.concurrency,
        "client_cores": cpu / duration,  # busy cores of this process
        **figures(exchanges, duration),
    }
    if load.save_texts:
        result["generated_texts"] = [exchange.text for exchange in exchanges]
    return result


async def _warm_up(load: ServerLoad, send_one: SendRequest) -> None:
    """Send prompts of numbers at the load's concurrency, so that the measured prompts are new to the
    server.
    """
    questions = [
        Conversation((f"Write the numbers from {n} to {n + 50}, in words.",)) for n in range(load.warm_up)
    ]
    at_once = Traffic(concurrency=load.traffic.concurrency or max(load.warm_up, 1))
    exchanges, _ = await send(questions, at_once, send_one)
    if failed := [exchange.error for exchange in exchanges if exchange.error]:
        raise ConfigError(f"the server at {server_root(load.url)} failed the warm-up: {failed[0]}")


Messages: TypeAlias = list[dict[str, str]]
SendRequest: TypeAlias = Callable[[int, Messages], Awaitable[Exchange]]  # number of the request, conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Traffic: concurrent users with one conversation each, or a rate of conversations per second."""

    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0  # for arrival times

    def __post_init__(self) -> None:
        if (self.concurrency is None) == (self.rate is None):
            raise ConfigError("traffic has a concurrency or a rate: give one of --concurrency and --rate")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}; allowed: an integer >= 1")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"rate is {self.rate}; allowed: a number of conversations per second, above 0")


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Return arrival times in seconds: a Poisson process scaled to `count` / `rate` seconds.

    The last conversation arrives exactly then, as in `vllm bench serve`, so that chance does not change the
    mean rate of a short run. A seed gives the same pattern at every rate.
    """
    gaps = np.random.default_rng(seed).exponential(size=count)
    return [float(time) for time in np.cumsum(gaps) * (count / rate / gaps.sum())]


async def send(
    conversations: Sequence[Conversation],
    traffic: Traffic,
    send_request: SendRequest,
    on_request: Callable[[], None] = lambda: None,
) -> tuple[list[Exchange], float]:
    """Send all conversations; return every request's exchange, in the data set's order, and the seconds.

    Each turn follows the answer to the previous one. After a failed turn the rest of its conversation fails
    unsent. `on_request` is called after each request. The clock is the event loop's.
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
                exchanges[number] = answer = await send_request(number, messages)
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
