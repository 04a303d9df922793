"""A load on a server: a data set's conversations, sent as traffic has it, and what came of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from specinfer.bench.exchange import Exchange
from specinfer.bench.load_figures import figures
from specinfer.bench.openai_client import ENDPOINTS, Asking, ask, connect, first_model, server_root
from specinfer.bench.traffic import Ask, Messages, Traffic, send
from specinfer.errors import ConfigError
from specinfer.report.dataset import Conversation, Dataset
from specinfer.version import VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoad:
    """Which server is asked what, how often, and how much at once."""

    url: str
    asking: Asking
    traffic: Traffic
    model: str | None = None  # None: the first the server lists
    api_key: str | None = None
    warm_up: int = 1  # requests before those that count
    save_texts: bool = False

    def __post_init__(self) -> None:
        if self.warm_up < 0:
            raise ConfigError(f"warm-up is {self.warm_up}; allowed: an integer >= 0")


def first_requests(dataset: Dataset, count: int | None) -> Dataset:
    """The conversations that make the first `count` requests, the last one cut short; None for all.

    Raises ConfigError unless there are so many: a question asked twice is answered from caches.
    """
    if count is None:
        return dataset
    if not 1 <= count <= dataset.num_turns:
        raise ConfigError(
            f"the number of requests is {count}; {dataset.name} has {dataset.num_turns} to ask, each once: "
            "give at most that, or a larger --dataset"
        )
    kept: list[Conversation] = []
    for conversation in dataset.conversations:
        if count > 0:
            kept.append(replace(conversation, turns=conversation.turns[:count]))
            count -= len(conversation.turns)
    return replace(dataset, conversations=tuple(kept))


def measure(
    load: ServerLoad, dataset: Dataset, on_request: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Warm up, send everything, and return the figures with what they are of, as plain JSON values.

    Raises ConfigError when the server cannot be reached, names no model, or fails the warm-up.
    """
    return asyncio.run(_measure(load, dataset, on_request))


async def _measure(load: ServerLoad, dataset: Dataset, on_request: Callable[[], None]) -> dict[str, Any]:
    asking = load.asking
    async with connect(load.url, load.api_key) as http:
        model = await first_model(http, asking.timeout) if load.model is None else load.model

        async def ask_one(number: int, messages: Messages) -> Exchange:
            return await ask(http, asking, model, number, messages)

        await _warm_up(load, ask_one)
        cpu = time.process_time()
        exchanges, duration = await send(dataset.conversations, load.traffic, ask_one, on_request)
        cpu = time.process_time() - cpu
    traffic, params = load.traffic, asking.params
    result = {
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "specinfer": VERSION,
        "base_url": server_root(load.url).rpartition("@")[2],  # what stands before an @ may be a password
        "endpoint": ENDPOINTS[asking.endpoint],
        "model_id": model,
        "dataset": dataset.name,
        "num_prompts": dataset.num_turns,
        "options": {
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "seed": params.seed or 0,
            "ignore_eos": asking.ignore_eos,
            "body": dict(asking.body),
            "timeout": asking.timeout,
            "warm_up": load.warm_up,
        },
        "request_rate": "inf" if traffic.rate is None else traffic.rate,
        "burstiness": 1.0,  # arrivals are a Poisson process
        "max_concurrency": traffic.concurrency,
        "client_cores": cpu / duration,  # that this process kept busy
        **figures(exchanges, duration),
    }
    if load.save_texts:
        result["generated_texts"] = [exchange.text for exchange in exchanges]
    return result


async def _warm_up(load: ServerLoad, ask_one: Ask) -> None:
    """Ask for numbers, as many at once as later; what is measured is left to be new to the server."""
    questions = [
        Conversation((f"Write the numbers from {n} to {n + 50}, in words.",)) for n in range(load.warm_up)
    ]
    at_once = Traffic(concurrency=load.traffic.concurrency or max(load.warm_up, 1))
    exchanges, _ = await send(questions, at_once, ask_one)
    if failed := [exchange.error for exchange in exchanges if exchange.error]:
        raise ConfigError(f"the server at {server_root(load.url)} failed the warm-up: {failed[0]}")
