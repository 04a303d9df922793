"""Selection of a data set's first requests, traffic, and a whole load."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from specinfer.bench.exchange import Exchange
from specinfer.bench.load import Messages, Traffic, arrival_times, first_requests, send
from specinfer.errors import ConfigError
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


@pytest.mark.parametrize("count", [0, -1, 6])
def test_other_counts_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"is {count}; made up has 5, and repeated ones would be"):
        first_requests(TALKS, count)


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


def test_a_turn_follows_the_answer_to_the_one_before() -> None:
    log: list[tuple[float, int]] = []
    talks = [Conversation(("a", "b", "c")), Conversation(("d",)), Conversation(("e", "f"))]
    exchanges, _ = run_virtual(send(talks, Traffic(concurrency=3), server(log, {})))
    assert log == [(0, 0), (0, 3), (0, 4), (1, 1), (1, 5), (2, 2)]
    assert [exchange.text for exchange in exchanges] == [
        *("a", "a+a+b", "a+a+b+a+a+b+c"),
        *("d", "e", "e+e+f"),
    ]


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


def test_arrivals_are_seeded_and_keep_the_mean_rate() -> None:
    times = arrival_times(400, 4.0, seed=1)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(100)
    assert arrival_times(400, 4.0, seed=1) == times
    assert arrival_times(400, 8.0, seed=1) == pytest.approx([time / 2 for time in times])
    assert arrival_times(400, 4.0, seed=2) != times
    gaps = [later - earlier for earlier, later in pairwise(times)]
    # A share of exp(-1) of exponential gaps with mean 1/4 is longer than the mean.
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.06)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give one of --concurrency and --rate"),
        ({"concurrency": 1, "rate": 1.0}, "give one of --concurrency and --rate"),
        ({"concurrency": 0}, "concurrency is 0; allowed: an integer >= 1"),
        ({"rate": 0.0}, "rate is 0.0; allowed: a number of conversations per second, above 0"),
        ({"rate": float("inf")}, "rate is inf"),
        ({"rate": float("nan")}, "rate is nan"),
    ],
)
def test_other_traffic_is_refused(options: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Traffic(**options)  # type: ignore[arg-type]
