"""Selection of a data set's first requests, traffic, and a whole load."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from specinfer.bench.exchange import Exchange
from specinfer.bench.load import Messages, Traffic, arrival_times, first_requests, send
from specinfer.report.dataset import Conversation, Dataset
from tests.virtual_time import run_virtual

TALKS = Dataset("made up", (Conversation(("a",)), Conversation(("b", "c", "d")), Conversation(("e",))), 0)


@pytest.mark.parametrize(
    ("count", "turns"),
    [
        (1, [("a",)]),
        (3, [("a",), ("b", "c")]),
        (4, [("a",), ("b", "c", "d")]),
        (5, [("a",), ("b", "c", "d"), ("e",)]),
        (None, [("a",), ("b", "c", "d"), ("e",)]),
    ],
)
def test_the_last_conversation_is_cut_short(count: int | None, turns: list[tuple[str, ...]]) -> None:
    assert [talk.turns for talk in first_requests(TALKS, count).conversations] == turns


SINGLE = [Conversation((name,)) for name in "abcde"]


def server(log: list[tuple[float, int]], seconds: dict[int, float]) -> Callable[..., Awaitable[Exchange]]:
    """Answers request n after `seconds[n]`, by default 1; records the time of each request."""

    async def ask(number: int, messages: Messages) -> Exchange:
        loop = asyncio.get_running_loop()
        exchange = Exchange(loop.time())
        log.append((loop.time(), number))
        await asyncio.sleep(seconds.get(number, 1.0))
        exchange.text = "+".join(message["content"] for message in messages)
        exchange.ended = loop.time()
        return exchange

    return ask


def test_each_user_asks_when_the_answer_is_there() -> None:
    log: list[tuple[float, int]] = []
    over: list[None] = []
    ask = server(log, {0: 4.0, 1: 1.0, 2: 2.0, 3: 2.0})
    traffic = Traffic(concurrency=2)
    exchanges, seconds = run_virtual(send(SINGLE, traffic, ask, lambda: over.append(None)))
    assert log == [(0, 0), (0, 1), (1, 2), (3, 3), (4, 4)]
    assert [exchange.text for exchange in exchanges] == list("abcde")
    assert [exchange.ended for exchange in exchanges] == [4, 1, 3, 5, 5]
    assert (seconds, len(over)) == (5, 5)


def test_arrivals_do_not_wait_for_earlier_answers() -> None:
    log: list[tuple[float, int]] = []
    exchanges, seconds = run_virtual(send(SINGLE, Traffic(rate=2.0, seed=3), server(log, {0: 100.0})))
    assert [number for _, number in log] == [0, 1, 2, 3, 4]
    assert [time for time, _ in log] == pytest.approx(arrival_times(5, 2.0, 3))
    assert seconds == pytest.approx(log[0][0] + 100)
    assert [exchange.sent for exchange in exchanges] == [time for time, _ in log]


def test_behind_a_failed_turn_the_conversation_is_over() -> None:
    asked = []

    async def ask(number: int, messages: Messages) -> Exchange:
        asked.append(number)
        return Exchange(0.0, error="HTTP 429: slow down" if number == 1 else "")

    talks = [Conversation(("a", "b", "c", "d")), Conversation(("e",))]
    exchanges, _ = run_virtual(send(talks, Traffic(concurrency=1), ask))
    assert asked == [0, 1, 4]
    unasked = "not asked, as turn 2 failed"
    assert [exchange.error for exchange in exchanges] == ["", "HTTP 429: slow down", unasked, unasked, ""]
