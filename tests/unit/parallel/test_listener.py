"""Rank 0's listener: followers that join, are refused, end, or are lost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from specinfer.errors import ConfigError, KeyRefusedError, PeerLostError
from specinfer.parallel import listener, processes
from specinfer.parallel.launch import Followers
from specinfer.parallel.listener import RankListener, join_group
from specinfer.parallel.processes import FollowerProcesses
from specinfer.transport.link import LOST, Link


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
