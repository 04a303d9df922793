"""Messages of followers: malformed or inconsistent ones are refused as a whole."""

from __future__ import annotations

import socket
import struct
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.plan import StateCheckpoint, StateCounts, StateUse
from specinfer.runtime.batch import Rows
from specinfer.runtime.sharded import (
    Close,
    MessageReader,
    Moves,
    Open,
    Pass,
    ReportTimes,
    closing_message,
    logits_message,
    moving_message,
    opening_message,
    passing_message,
    reporting_message,
)
from specinfer.transport.link import Link
from tests.unit.models.test_shard import SMOL

STATES = StateCounts(2, 3, nodes=4)
CACHES = {3: Open(3, 0, blocks=4, block_size=8, states=STATES)}
USE = StateUse(1, StateCheckpoint(2, 6), (StateCheckpoint(4, 8),))
TEXT = Rows([5, 6, 7], 6, [2, 0], 2, states=USE)
TREE = Rows([1, 2, 3, 4], 0, [1, 3], 1, [-1, 0, 0])


def reader() -> MessageReader:
    return MessageReader([SMOL], torch.bfloat16)


def words(*numbers: int) -> bytes:
    return array("i", numbers).tobytes()


def test_what_is_written_is_read() -> None:
    read = reader().read
    assert read(opening_message(7, 0, 2, 16, STATES), CACHES) == Open(7, 0, 2, 16, STATES)
    assert read(reporting_message(), {}) == ReportTimes()
    assert read(closing_message(3), CACHES) == Close(3)
    message = passing_message(3, [TEXT, TREE], 8, logits=True)
    rows = [TEXT, Rows([1, 2, 3, 4], 0, [1], 1, [-1, 0, 0], states=StateUse(0))]
    assert read(message, CACHES) == Pass(3, True, False, [], rows)
    message = passing_message(3, [TEXT, TREE], 8, logits=False, more=True, taps=[2, 0])
    assert read(message, CACHES) == Pass(3, False, True, [2, 0], rows)
    moves = moving_message(3, [1, 2], [9, 10], [6], [4])
    assert read(moves, CACHES) == Moves(3, [1, 2], [9, 10], [6], [4])
    later = replace(TEXT, token_ids=[5], start=7, logits_from=0)  # a part that does not begin the text
    (found,) = read(passing(later), CACHES).rows  # type: ignore[union-attr]
    assert found.states == replace(USE, source=None)
    hidden = torch.randn(2, 576).bfloat16()
    found = read(logits_message(3, hidden), CACHES)
    assert torch.equal(torch.from_numpy(found.bits.copy()).view(2, -1).view(torch.bfloat16), hidden)


def passing(*rows: Rows, taps: Sequence[int] = ()) -> bytes:
    return passing_message(3, rows, 8, logits=False, taps=taps)


def test_what_does_not_fit_is_refused() -> None:
    for message, line in (
        (b"", "ends before"),
        (b"\1\0\0", "whole words"),
        (words(9, 3), "9 where 1 to 6"),
        (words(3, 4, 0, 0), "no cache 4"),
        (opening_message(3, 0, 2, 2, STATES), "cache 3 is there"),
        (opening_message(4, 0, 0, 2, STATES), "0 where 1 to"),
        (opening_message(4, 1, 2, 2, STATES), "1 where 0 to 0"),
        (opening_message(4, 0, 1 << 20, 1 << 20, STATES), "where 1 to 2048"),
        (closing_message(3) + words(0), "has 1 trailing words"),
        (moving_message(3, [1, 32], [2, 3], [], []), "0 .. 31"),
        (opening_message(4, 0, 2, 2, StateCounts(0, 3, 4)), "0 where 1 to"),
        (moving_message(3, [1], [-1], [], []), "0 .. 31"),
        (moving_message(3, [], [], [8], [0]), "0 .. 7"),
        (passing(replace(TEXT, states=StateUse(2))), "2 where 0 to 1"),
        (passing(replace(TEXT, states=StateUse(0, StateCheckpoint(5, 6)))), "5 where -1 to 4"),
        (passing(replace(TEXT, states=StateUse(0, None, (StateCheckpoint(1, 8),)))), "1 where 2 to 4"),
        (passing(replace(TEXT, states=StateUse(0, None, (StateCheckpoint(2, 0),)))), "0 where 1 to"),
        (passing(Rows([5], 0, [4], 0)), "0 .. 3"),
        (passing(Rows([49152], 0, [1], 0)), "0 .. 49151"),
        (passing(Rows([-1], 0, [1], 0)), "0 .. 49151"),
        (passing(Rows([5], 8, [1], 0)), "1 blocks of 8 for 9 positions"),
        (passing(Rows([5], 0, [1], 2)), "2 where 0 to 1"),
        (passing(Rows([5, 6], 0, [1], 0, [-1, 1])), "no tree"),
        (passing(Rows([5, 6], 0, [1], 0, [0, 0])), "no tree"),
        (passing(Rows([5], 0, [1], 0, [-1, 0])), "a tree of 2 nodes"),
        (passing(TEXT)[:-4], "ends before"),
        (passing(TEXT, taps=[3]), "3 .. 3; allowed: 0 .. 2"),
        (passing(taps=[0] * 4), "4 where 0 to 3"),
        (logits_message(3, torch.zeros(2, 576).bfloat16())[:-8], "ends before"),
    ):
        with pytest.raises(ValueError, match=line):
            pytest.fail(f"{line!r}: {reader().read(message, CACHES)}")


@pytest.mark.thorough
@settings(max_examples=2000, deadline=None, derandomize=True)  # of five messages each
@given(st.data())
def test_a_changed_message_is_refused_or_fits(data: st.DataObject) -> None:
    kind = data.draw(st.integers(0, 3))
    whole = [
        passing_message(3, [TEXT, TREE], 8, logits=True, taps=[1, 2]),
        moving_message(3, [1, 2], [9, 10], [], []),
        opening_message(7, 0, 2, 16, STATES),
        data.draw(st.binary(max_size=64)),
    ][kind]
    message = bytearray(whole)
    for _ in range(data.draw(st.integers(0, 3)) if message else 0):
        at = data.draw(st.integers(0, len(message) - 1))
        message[at] = data.draw(st.integers(0, 255))
    message = message[: data.draw(st.integers(0, len(message)))] if data.draw(st.booleans()) else message
    for fifths in range(1, 6):
        check_message(bytes(message[: len(message) * fifths // 5]))


def check_message(message: bytes) -> None:
    """A message that is not refused fits the models and caches."""
    try:
        found = reader().read(message, CACHES)
    except ValueError:
        return
    if isinstance(found, Pass):
        assert all(0 <= layer <= SMOL.num_layers for layer in found.taps)
        for rows in found.rows:
            assert all(0 <= block < 4 for block in rows.block_table)
            assert all(0 <= token < SMOL.vocab_size for token in rows.token_ids)
            assert rows.start + len(rows.token_ids) <= 8 * len(rows.block_table)
    elif isinstance(found, Moves):
        assert all(0 <= slot < 32 for slot in (*found.sources, *found.targets))
        assert all(0 <= place < 8 for place in (*found.node_sources, *found.node_targets))


def linked() -> tuple[socket.socket, Link]:
    ours, its = socket.socketpair()
    return ours, Link(its)


def test_a_stream_of_anything_else_is_refused() -> None:
    for sent, line in (
        (struct.pack("<II", 0x53504330, 4) + b"abcd", "another version"),
        (struct.pack("<II", 0x53504331, 1 << 30), "allowed"),
        (struct.pack("<II", 0x53504331, 9) + b"abcd", "is incomplete"),
        (b"\1\2\3", "is incomplete"),
    ):
        ours, link = linked()
        with ours:
            ours.sendall(sent)
        with pytest.raises(ValueError, match=line):
            pytest.fail(f"{sent!r} is {link.receive()!r}")
        link.close()


def test_messages_come_whole_and_in_order_until_the_link_is_closed() -> None:
    ours, link = linked()
    other = Link(ours)
    for message in (b"", b"x" * 9000, b"", b"last"):
        other.send(message)
    other.beat()
    other.close()
    assert [link.receive() for _ in range(2)] == [b"x" * 9000, b"last"]
    with pytest.raises(EOFError):
        link.receive()
