"""Events of a stream, however its bytes are cut and its lines end."""

from __future__ import annotations

import pytest

from specinfer.bench.event_stream import EventStream

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


def test_an_event_is_given_with_the_packet_that_completes_it() -> None:
    stream = EventStream()
    assert stream.feed(b"data: a\n") == []
    assert stream.feed(b"\ndata: b\r\n\r\nda") == ["a", "b"]
    assert stream.feed(b"ta: c") == []
    assert stream.close() == ["c"]
    assert stream.close() == []


def test_a_byte_order_mark_is_not_part_of_the_first_field() -> None:
    assert read(b"\xef\xbb\xbfdata: a\n\n", 1) == ["a"]
