"""Ranks that share memory: the same numbers on each, and a rank that is lost is named in time."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

from specinfer.errors import PeerLostError
from specinfer.kernels.exchange import SharedExchange
from specinfer.kernels.library import Library
from tests.kernels import library_or_skip
from tests.unit.kernels.ranks import GONE, run_ranks

SLOT: Final = 256  # bytes; 64 numbers
COUNTS: Final = (0, 1, 63, 64, 65, 128, 1000)
Operation = Callable[[SharedExchange], Any]


@pytest.fixture(scope="module")
def library() -> Library:
    return library_or_skip()


def numbers(rank: int, count: int, turn: int = 0) -> NDArray[np.int32]:
    """Integers of all sizes, so that sums overflow."""
    chance = np.random.default_rng([rank, count, turn])
    return chance.integers(-(2**31), 2**31, count, dtype=np.int32)


def floats(rank: int, count: int, turn: int = 0) -> NDArray[np.float32]:
    """Floats >= 0, a few of them NaN or infinite."""
    chance = np.random.default_rng([rank, count, turn])
    values = chance.standard_exponential(count, dtype=np.float32)
    values[chance.integers(0, 9, count) == 0] = np.inf
    values[chance.integers(0, 9, count) == 0] = np.nan
    return values


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_rank_has_the_sums_and_the_largest_numbers(library: Library, ranks: int) -> None:
    def work(exchange: SharedExchange) -> list[tuple[bytes, bytes]]:
        found = []
        for count in COUNTS:
            sums, largest = numbers(exchange.rank, count), floats(exchange.rank, count)
            exchange.largest(largest)
            exchange.add(sums)
            found.append((sums.tobytes(), np.nan_to_num(largest, nan=-1.0).tobytes()))
        return found

    wanted = []
    for count in COUNTS:
        total = np.stack([numbers(rank, count).astype(np.int64) for rank in range(ranks)]).sum(0)
        most = np.stack([floats(rank, count) for rank in range(ranks)]).max(0)
        wanted.append((total.astype(np.int32).tobytes(), np.nan_to_num(most, nan=-1.0).tobytes()))
    assert run_ranks(library, ranks, work, slot=SLOT) == [wanted] * ranks


@pytest.mark.parametrize("sizes", [(5,), (0, 1), (700, 256), (1, 0, 257), (0, 0, 0), (3, 512, 1, 90)])
def test_bytes_are_gathered_by_those_that_read_them(library: Library, sizes: tuple[int, ...]) -> None:
    def work(exchange: SharedExchange) -> list[list[bytes]]:
        own = np.full(sizes[exchange.rank], exchange.rank + 1, dtype=np.uint8)
        own[-1:] = 77
        of_all = exchange.gather(own, sizes)
        of_first = exchange.gather(own, sizes, reads=exchange.rank == 0)
        return [[bytes(part) for part in found] for found in (of_all, of_first, exchange.gather(own, sizes))]

    parts = [bytes([rank + 1] * (size - 1) + [77] * (size > 0)) for rank, size in enumerate(sizes)]
    for rank, found in enumerate(run_ranks(library, len(sizes), work, slot=SLOT)):
        assert found == [parts, parts if rank == 0 else [], parts]


@pytest.mark.few(1)
@pytest.mark.parametrize(("ranks", "turns"), [(2, 10_000), (3, 1_000), (4, 1_000)])
def test_ranks_that_take_uneven_times_stay_in_step(library: Library, ranks: int, turns: int) -> None:
    def work(exchange: SharedExchange) -> int:
        chance, wrong = np.random.default_rng(exchange.rank), 0
        late = chance.integers(0, 50, turns)
        for turn in range(turns):
            if late[turn] == 0:
                time.sleep(1e-4)
            sums = np.full(3 + turn % 90, exchange.rank + turn, dtype=np.int32)
            exchange.add(sums)
            wrong += int((sums != ranks * turn + ranks * (ranks - 1) // 2).any())
        assert exchange.figures().turns >= turns
        return wrong

    assert run_ranks(library, ranks, work, slot=SLOT) == [0] * ranks


def test_a_rank_that_waits_for_long_sleeps(library: Library) -> None:
    """And is woken: by itself it would look again only after 50 ms."""

    def work(exchange: SharedExchange) -> tuple[float, float]:
        add(exchange)
        used = time.process_time()
        for _ in range(10):
            if exchange.rank == 1:
                time.sleep(0.02)
            add(exchange)
        return time.process_time() - used, exchange.figures().waited

    (used, waited), _ = run_ranks(library, 2, work, slot=SLOT)
    assert 0.15 < waited < 0.4
    assert used < 0.05


# ---- ranks that are lost ----


def add(exchange: SharedExchange) -> None:
    exchange.add(np.ones(3, dtype=np.int32))


def add_much(exchange: SharedExchange) -> None:
    exchange.add(np.ones(500, dtype=np.int32))


def largest(exchange: SharedExchange) -> None:
    exchange.largest(np.ones(3, dtype=np.float32))


def gather(exchange: SharedExchange) -> None:
    exchange.gather(np.ones(3, dtype=np.uint8), [3] * exchange.ranks)


OPERATIONS: Final = (add, add_much, largest, gather)


def ended_by(signal_: signal.Signals, at: int, lost: int) -> Operation:
    """Run all operations; a rank gets a signal before one. Return the seconds that others needed then."""

    def work(exchange: SharedExchange) -> Any:
        for number, operation in enumerate(OPERATIONS):
            if number == at and exchange.rank == lost:
                os.kill(os.getpid(), signal_)
            began = time.monotonic()
            try:
                operation(exchange)
            except PeerLostError as error:
                took, again = time.monotonic() - began, time.monotonic()
                with pytest.raises(PeerLostError):  # it stays lost
                    add(exchange)
                assert time.monotonic() - again < 0.1
                return took, error.rank, str(error)
        return None

    return work


@pytest.mark.parametrize(
    ("how", "lost", "limit"), [(signal.SIGSTOP, 1, 0.2), (signal.SIGKILL, 0, 60.0), (signal.SIGKILL, 1, 60.0)]
)
@pytest.mark.parametrize("at", range(len(OPERATIONS)))
def test_a_rank_is_named_at_once_when_it_is_killed_and_after_the_limit_when_it_is_stopped(
    library: Library, at: int, how: signal.Signals, lost: int, limit: float
) -> None:
    answers = run_ranks(library, 3, ended_by(how, at, lost), slot=SLOT, limit=limit, silent=(lost,))
    others = {0, 1, 2} - {lost}
    for rank in others:
        seconds, named, message = answers[rank]
        assert (named, seconds <= 1.5) == (lost, True)
        # As reported by the first rank that noticed it.
        why = r"(did not respond within 0\.2 s|has ended)" if how is signal.SIGSTOP else "has ended"
        rest = f"{why}, detected by rank {rank}; all ranks of this group must be restarted"
        assert re.fullmatch(f"rank {lost} of 3 {rest}", message)
    if how is signal.SIGSTOP:
        assert max(answers[rank][0] for rank in others) >= 0.2


def test_what_a_rank_said_before_it_left_is_read(library: Library) -> None:
    def work(exchange: SharedExchange) -> int:
        sums = np.array([exchange.rank + 1], dtype=np.int32)
        if exchange.rank == 0:
            time.sleep(0.1)  # the other one has left by then
        exchange.add(sums)
        return int(sums[0])

    assert run_ranks(library, 2, work, slot=SLOT) == [3, 3]


def test_what_one_rank_has_lost_the_others_know(library: Library) -> None:
    def work(exchange: SharedExchange) -> float:
        if exchange.rank == 1:
            time.sleep(60)
        exchange.wait_at_most(60.0 if exchange.rank == 2 else 0.1)
        began = time.monotonic()
        with pytest.raises(PeerLostError, match=r"^rank 1 of 3 (did not respond|has ended)"):
            add(exchange)
        return time.monotonic() - began

    first, _, last = run_ranks(library, 3, work, slot=SLOT, silent=(1,))
    assert max(first, last) < 1.0


@pytest.mark.parametrize("other", [largest, gather, add_much])
def test_ranks_at_other_operations_are_lost_to_each_other(library: Library, other: Operation) -> None:
    def work(exchange: SharedExchange) -> str:
        with pytest.raises(PeerLostError) as lost:
            (add if exchange.rank == 0 else other)(exchange)
        with pytest.raises(PeerLostError):  # though they are in step again
            add(exchange)
        return str(lost.value)

    answers = run_ranks(library, 2, work, slot=SLOT)
    assert GONE not in answers
    assert any("is at another operation" in answer for answer in answers)


def test_nothing_is_left_of_ranks_that_are_done(library: Library) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_files()
    assert GONE not in run_ranks(library, 2, add)
    assert open_files() == before
