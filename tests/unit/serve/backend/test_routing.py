"""Which replica a session, or a prompt, belongs to."""

from __future__ import annotations

from collections import Counter

import pytest

from specinfer.serve.backend.replica_backend import Ring, key_of

PROMPT = tuple(range(100))


def home(ring: Ring, key: int) -> int:
    return next(ring.order(key))


def test_a_session_belongs_to_one_replica_whatever_it_asks() -> None:
    keys = {key_of("ann", prompt, salt) for prompt in (PROMPT, (1,)) for salt in (None, "s")}
    assert len(keys) == 1
    assert key_of("ben", PROMPT, None) not in keys
    assert key_of("x" * (1 << 24), PROMPT, None) != key_of("x" * (1 << 24) + "y", PROMPT, None)
    assert key_of("\udcff \N{SNOWMAN}", PROMPT, None) < 1 << 64


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_each_replica_has_about_its_share(count: int) -> None:
    ring = Ring(count)
    found = Counter(home(ring, key_of(f"session {n}", (), None)) for n in range(4000))
    assert set(found) == set(range(count))
    assert max(found.values()) < 1.6 * 4000 / count
    assert min(found.values()) > 0.5 * 4000 / count


def test_only_the_sessions_of_a_missing_replica_move() -> None:
    ring, keys = Ring(4), [key_of(f"session {n}", (), None) for n in range(400)]
    moved = Counter[int]()
    for key in keys:
        replica = ring.choose(key, {0: 0, 1: 0, 3: 0})
        if home(ring, key) != 2:
            assert replica == home(ring, key)
        else:
            moved[replica] += 1
    assert set(moved) == {0, 1, 3}  # and not all to one neighbour


def test_above_one_and_a_half_times_the_mean_the_next_one_takes_over() -> None:
    ring = Ring(3)
    key = key_of("ann", (), None)
    first, second, third = ring.order(key)
    loads = {first: 5, second: 3, third: 3}  # 12 with one more: at most 6
    assert ring.choose(key, loads) == first
    assert ring.choose(key, loads | {first: 6, third: 2}) == second
    loads = {first: 0, second: 0, third: 0}
    for _ in range(300):  # of one session alone
        loads[ring.choose(key, loads)] += 1
    assert max(loads.values()) == 150
    assert ring.choose(key, {second: 1000}) == second
