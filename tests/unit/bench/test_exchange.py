"""Chunks of streamed answers: their texts and arrival times."""

from __future__ import annotations

from typing import Any

import pytest

from specinfer.bench.exchange import EventStream, Exchange


def chat(reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


def text(text_value: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text_value, "finish_reason": reason}]}


def use(prompt: Any, completion: Any) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def taken(*chunks: Any) -> Exchange:
    """An exchange sent at 10 with a chunk a second later, and every second."""
    exchange = Exchange(10.0)
    for now, chunk in enumerate(chunks, start=11):
        exchange.take(chunk, float(now))
    return exchange


CHAT = [chat(role="assistant", content=""), chat(content="Good "), chat(content="day"), chat("stop")]
READ = {  # chunks -> text, arrivals, end, tokens, finish_reason
    "chat": (CHAT, "Good day", [12, 13], 14, 2, "stop"),
    "usage at the end": ([*CHAT, {"choices": [], **use(7, 5)}], "Good day", [12, 13], 14, 5, "stop"),
    "usage, last choice": ([text("a"), {**text("b", "stop"), **use(3, 4)}], "ab", [11, 12], 12, 4, "stop"),
    "usage so far": ([{**text("a"), **use(3, 1)}, {**text("b"), **use(3, 2)}], "ab", [11, 12], 12, 2, None),
    "completions": ([text("a"), text(""), text("b"), text("", "stop")], "ab", [11, 13], 14, 2, "stop"),
    "reasoning": ([chat(reasoning_content="hm"), chat(content="a")], "a", [11, 12], 12, 2, None),
    "tool calls": ([chat(tool_calls=[{"index": 0}]), chat("tool_calls")], "", [11], 12, 1, "tool_calls"),
    "no text": ([chat(role="assistant"), {**chat("stop"), **use(4, 1)}], "", [], 12, 1, "stop"),
    "no count": ([text("a"), {"choices": [], **use("?", None)}], "a", [11], 11, 1, None),
    "null usage": ([{**text("a"), "usage": None, "metrics": None, "error": None}], "a", [11], 11, 1, None),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_chunks_are_read(name: str) -> None:
    chunks, text_value, arrivals, ended, tokens, reason = READ[name]
    exchange = taken(*chunks)
    assert exchange.text == text_value
    assert exchange.arrivals == arrivals
    assert exchange.ended == ended
    assert exchange.output_tokens == tokens
    assert exchange.finish_reason == reason
    assert exchange.error == ""


@pytest.mark.parametrize(
    ("chunk", "error"),
    [
        ({"error": {"message": "out of\n blocks", "code": 500}}, "the server gave up: out of blocks"),
        ({"error": "too long"}, "the server gave up: too long"),
        ({"object": "error", "message": "too long"}, "the server gave up: too long"),
        ([1], "a chunk is [1]; a JSON object was expected"),
    ],
)
def test_an_error_in_the_stream_is_the_exchanges(chunk: Any, error: str) -> None:
    assert taken(text("a"), chunk).error == error


def test_times_of_an_answer() -> None:
    exchange = Exchange(10.0, arrivals=[10.5, 10.75, 11.75], ended=12.0, completion_tokens=7)
    assert exchange.ttft == 0.5
    assert exchange.itls == [0.25, 1.0]
    assert exchange.e2el == 2.0
    assert exchange.tpot == 0.25  # six tokens in the second and a half behind the first chunk
    silent = Exchange(10.0, ended=10.5, completion_tokens=1)
    assert (silent.ttft, silent.itls, silent.tpot) == (0.5, [], None)


STREAM = (
    ": a comment\n\n"
    "event: message\nid: 7\nretry: 10\ndata: one\n\n"
    'data:{"no": "space"}\n\n'
    "data: two\ndata:  lines\n\n"
    "\n\n"
    "data: gr\u00fc\u00df \u4f60\U0001f600\n\n"
    ": keep-alive\ndata: [DONE]\n\n"
)
EVENTS = ["one", '{"no": "space"}', "two\n lines", "gr\u00fc\u00df \u4f60\U0001f600", "[DONE]"]


def read(data: bytes, size: int) -> list[str]:
    """All events of `data` in packets of `size` bytes."""
    stream = EventStream()
    packets = [data[start : start + size] for start in range(0, len(data), size)]
    return [event for packet in packets for event in stream.feed(packet)] + stream.close()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_events_are_the_same_however_bytes_are_cut(end: str, size: int) -> None:
    assert read(STREAM.replace("\n", end).encode(), size) == EVENTS
