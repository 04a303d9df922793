"""Messages of followers: malformed or inconsistent ones are refused as a whole."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specinfer.errors import ConfigError, KeyRefusedError, PeerLostError
from specinfer.parallel import listener, processes
from specinfer.parallel.launch import Followers
from specinfer.parallel.listener import RankListener, join_group
from specinfer.parallel.processes import FollowerProcesses
from specinfer.plan import StateCheckpoint, StateCounts, StateUse
from specinfer.runtime import sharded
from specinfer.runtime.batch import Rows
from specinfer.runtime.sharded import MessageReader, Open, moving_message, opening_message, passing_message
from specinfer.transport.link import LOST, Link
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
    assert read(sharded.reporting_message(), {}) == sharded.ReportTimes()
    assert read(sharded.closing_message(3), CACHES) == sharded.Close(3)
    message = passing_message(3, [TEXT, TREE], 8, logits=True)
    rows = [TEXT, Rows([1, 2, 3, 4], 0, [1], 1, [-1, 0, 0], states=StateUse(0))]
    assert read(message, CACHES) == sharded.Pass(3, True, False, [], rows)
    message = passing_message(3, [TEXT, TREE], 8, logits=False, more=True, taps=[2, 0])
    assert read(message, CACHES) == sharded.Pass(3, False, True, [2, 0], rows)
    moves = moving_message(3, [1, 2], [9, 10], [6], [4])
    assert read(moves, CACHES) == sharded.Moves(3, [1, 2], [9, 10], [6], [4])
    later = replace(TEXT, token_ids=[5], start=7, logits_from=0)  # a part that does not begin the text
    (found,) = read(passing(later), CACHES).rows  # type: ignore[union-attr]
    assert found.states == replace(USE, source=None)
    hidden = torch.randn(2, 576).bfloat16()
    found = read(sharded.logits_message(3, hidden), CACHES)
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
        (sharded.closing_message(3) + words(0), "has 1 trailing words"),
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
        (sharded.logits_message(3, torch.zeros(2, 576).bfloat16())[:-8], "ends before"),
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
    if isinstance(found, sharded.Pass):
        assert all(0 <= layer <= SMOL.num_layers for layer in found.taps)
        for rows in found.rows:
            assert all(0 <= block < 4 for block in rows.block_table)
            assert all(0 <= token < SMOL.vocab_size for token in rows.token_ids)
            assert rows.start + len(rows.token_ids) <= 8 * len(rows.block_table)
    elif isinstance(found, sharded.Moves):
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


# Rank 0's listener: followers that join, are refused, end, or are lost.


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life, and looks at followers, five times as often."""
    monkeypatch.setattr(listener, "_HEARTBEAT", 0.1)
    monkeypatch.setattr(processes, "_CHECK_INTERVAL", 0.1)


KEY = b"k" * 16


def gate_of(ranks: int) -> tuple[RankListener, Callable[..., Link]]:
    """Return a listener for these followers, and the function by which one joins: its rank and its key."""
    gate = RankListener(("127.0.0.1", 0), KEY, range(1, 1 + ranks))
    address = gate._listening.getsockname()
    return gate, lambda rank, key=KEY: join_group(address, key, rank, "there")


def test_a_rank_may_join_again_after_its_link_ended() -> None:
    gate, join = gate_of(2)
    first, other = join(1), join(2)
    assert gate.wait(30.0).keys() == {1, 2}
    with pytest.raises(ConnectionRefusedError, match="rank 1 is connected already"):
        join(1)
    with pytest.raises(ConfigError, match="rank 3 is not a follower on another host: 1, 2"):
        join(3)
    with pytest.raises(KeyRefusedError):
        join(1, b"x" * 16)
    first.close()
    with pytest.raises(PeerLostError, match="rank 1 did not connect"):
        gate.wait(0.0)
    again = join(1)
    links = gate.wait(30.0)
    links[1].link.send(b"settings")
    assert again.receive() == b"settings"
    again.within(30.0)
    threading.Timer(0.3, links[1].link.close).start()
    with pytest.raises(EOFError):
        again.receive()
    gate.close()
    other.close()
    with pytest.raises(ConnectionRefusedError):
        join(1)


def test_a_link_without_a_sign_of_life_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, join = gate_of(1)
    link = join(1)
    link.within(0.3)
    silence = threading.Timer(0.6, monkeypatch.setattr, (Link, "beat", lambda self: None))
    silence.start()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        link.receive()
    assert time.monotonic() - began > 0.6
    link.close()
    gate.close()


def test_an_end_on_purpose_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, join = gate_of(2)
    links = [join(1), join(2)]
    processes, heard = FollowerProcesses(1, 1), list[object]()
    begun = Followers(processes, gate)
    assert begun.addresses == ["", "", ""], "they are of this host"
    begun.on_end = lambda: heard.append("a loss")
    close = Link.close

    def slowly(self: Link) -> None:
        close(self)
        time.sleep(0.3)  # longer than it takes to look again

    monkeypatch.setattr(Link, "close", slowly)
    begun.close()
    processes.wait()
    assert heard == []
    monkeypatch.undo()
    for link in links:
        link.close()


def test_all_threads_that_load_layers_get_the_reason_of_a_rank_that_cannot_load() -> None:
    gate, join = gate_of(1)
    link = join(1)
    begun = Followers(FollowerProcesses(1, 1), gate)
    link.send(json.dumps({"failed": "no such file"}).encode())
    link.close()
    with ThreadPoolExecutor(4) as pool:
        errors = [one.exception() for one in [pool.submit(begun.check_loading) for _ in range(20)]]
    assert {str(error) for error in errors} == {"rank 1 cannot load the model: no such file"}
    begun.close()


def test_a_rank_that_has_lost_another_is_not_the_one_that_is_lost() -> None:
    gate, join = gate_of(2)
    links = [join(1), join(2)]
    begun = Followers(FollowerProcesses(1, 1), gate)
    links[0].send(LOST)
    assert begun.lost() == (2, "rank 2 (on 127.0.0.1) does not answer")
    links[1].close()
    assert begun.lost() == (2, "rank 2 (on 127.0.0.1) has closed its link, or its host is unreachable")
    begun.close()
    links[0].close()
