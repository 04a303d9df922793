"""The scheduler and prompts with a common prefix: requests that wait for blocks, and scored prompts."""

from __future__ import annotations

import pytest

from specinfer.engine.kv_blocks import SequenceState
from specinfer.request import Request
from specinfer.sampling_params import SamplingParams
from tests.unit.engine.scheduling import commit, of, scheduler, sequence, shares


def alike(name: str, prompt: int, **params: int) -> SequenceState:
    """A request whose prompt begins 0 1 2 ..., like every other of these."""
    return of(Request(name, tuple(range(prompt)), SamplingParams(temperature=0, **params), seed=0))


def test_who_begins_like_a_running_prompt_waits_for_it_and_lets_others_pass() -> None:
    s = scheduler(rows=6)
    a, b, c = alike("a", 11), alike("b", 10), sequence("c", 2)
    for state in (a, b, c):
        s.add(state)
    seen = []
    for _ in range(4):
        plan = s.schedule()
        s.check_integrity()
        seen.append(shares(plan))
        commit(plan, [a, b, c])
    assert seen == [
        [("a", 0, 1, 0), ("c", 0, 2, 1)],  # b waits for block 0; c, whose prompt one step can end, does not
        [("a", 1, 6, 0), ("c", 2, 3, 1)],
        [("a", 6, 11, 1), ("c", 3, 4, 1)],  # b found block 0 and waits for block 1
        [("a", 11, 12, 2), ("c", 4, 5, 2), ("b", 8, 10, 1)],
    ]
    assert b.block_table[:2] == a.block_table[:2]
    assert (b.cached_tokens, s.prefix_hits, s.prefix_queries) == (8, 8, 23)


def test_of_many_that_wait_for_a_block_one_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    s = scheduler(rows=8, tree=1)
    a, others, last = alike("a", 23), [alike(f"{i}", 20 + i % 3) for i in range(30)], sequence("z", 2)
    for state in (a, *others, last):
        s.add(state)
    looked_up: list[int] = []
    find = s._pool.find
    monkeypatch.setattr(s._pool, "find", lambda hashes: (looked_up.append(len(hashes)), find(hashes))[1])
    assert shares(s.schedule()) == [("a", 0, 1, 0), ("z", 0, 2, 1)]
    assert looked_up == [5, 4, 0]  # a, the first of the others, and the one that passes them


def test_a_request_that_gave_way_comes_back_behind_what_others_still_share_with_it() -> None:
    s = scheduler(blocks=5, tree=1)
    a, b = alike("a", 12), alike("b", 10)
    s.add(a)
    commit(s.schedule(), [a])
    s.add(b)
    plan = s.schedule()
    assert shares(plan) == [("a", 12, 13, 1), ("b", 9, 10, 1)]  # 4 shared blocks and 1 separate one
    for _ in range(4):
        commit(plan, [a, b])
        plan = s.schedule()
        s.check_integrity()
    # a's 17th position takes b's own block; the two that a has, too, are there when b comes again.
    assert (shares(plan), s.preemptions, b.generation, b.computed) == ([("a", 16, 17, 1)], 1, 1, 0)
    s.remove(a)
    assert shares(s.schedule()) == [("b", 10, 13, 1)]
    assert b.cached_tokens == 9  # cached when it arrived
