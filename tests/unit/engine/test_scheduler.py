"""The scheduler without a model: selection, numbers of rows, and preemption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from specinfer.engine.kv_blocks import BlockPool, SequenceState
from specinfer.engine.row_shares import fair_shares, prompt_rows
from specinfer.engine.scheduler import Scheduler
from specinfer.request import Request
from specinfer.sampling_params import SamplingParams
from specinfer.scheduler_config import SchedulerConfig
from tests.unit.engine.scheduling import add, commit, of, scheduler, sequence, shares


def test_a_prompt_is_computed_in_chunks_then_ends_in_one_node_then_grows_trees() -> None:
    s, a = scheduler(rows=10), sequence("a", 25)
    s.add(a)
    seen = []
    for _ in range(5):
        plan = s.schedule()
        seen += shares(plan)
        commit(plan, [a], accepted=2)
    assert seen == [
        ("a", 0, 10, 0),
        ("a", 10, 20, 0),
        ("a", 20, 25, 1),  # the first token, as soon as the prompt is read
        ("a", 25, 26, 5),
        ("a", 28, 29, 5),  # 2 accepted + 1 bonus further
    ]


def test_every_running_request_has_its_row_and_trees_share_the_rest() -> None:
    s = scheduler(rows=8, batch=3, tree=6)
    states = [sequence(name, 2) for name in "abc"]
    add(s, *states)
    plan = s.schedule()
    assert shares(plan) == [("a", 0, 2, 1), ("b", 0, 2, 1), ("c", 0, 2, 1)]
    commit(plan, states)
    # 8 rows: one each, and of the other five two for a, two for b, one for c.
    assert shares(s.schedule()) == [("a", 2, 3, 3), ("b", 2, 3, 3), ("c", 2, 3, 2)]


@pytest.mark.parametrize("nodes", [12, 32, 64, 200])
def test_a_prompt_does_not_wait_for_trees_that_others_may_grow(nodes: int) -> None:
    s = scheduler(rows=512, batch=16, blocks=2000, tree=nodes, context=4000)
    states = [sequence(chr(ord("a") + i), 4) for i in range(12)]
    add(s, *states)
    commit(s.schedule(), states)
    late = sequence("z", 1000)
    s.add(late)
    steps = 0
    while late.num_output == 0:
        plan = s.schedule()
        assert len(plan.tree_entries) >= 12, "no running request goes without its row"
        commit(plan, [*states, late])
        steps += 1
    assert steps <= 4
    assert sum(e.end - e.start + max(e.max_nodes - 1, 0) for e in s.schedule().entries) <= 512


def test_rows_are_shared_fairly() -> None:
    for rows, wanted, given in (
        (0, [3, 3], [0, 0]),
        (10, [3, 3], [3, 3]),
        (5, [9, 9, 9], [2, 2, 1]),
        (10, [9, 1, 9], [5, 1, 4]),  # rows that one request does not need go to the others
        (3, [0, 1, 0, 9], [0, 1, 0, 2]),
        (7, [], []),
    ):
        assert fair_shares(rows, wanted) == given, (rows, wanted)


def test_rows_of_prompts_go_to_the_shortest_and_the_oldest() -> None:
    for rows, missing, most, each, given in (
        (0, [3, 3], 20, [1, 1], [0, 0]),
        (10, [30], 20, [1], [10]),
        (10, [3, 3], 20, [1, 1], [3, 3]),
        (10, [30, 30], 20, [1, 1], [10, 0]),  # equal ones are read one after the other
        (10, [30, 3], 20, [1, 1], [7, 3]),  # a short one does not wait for the long one before it
        (10, [30, 4, 2], 20, [1, 1, 1], [5, 3, 2]),  # however many come, the oldest gets half
        (10, [4, 30], 20, [1, 1], [4, 6]),
        (10, [0, 0, 5], 20, [1, 1, 1], [0, 0, 5]),
        (50, [60, 50], 20, [1, 1], [20, 20]),  # more than twenty none may have
        (30, [60, 50], 20, [1, 1], [15, 15]),  # the total of missing rows decides which is shorter
        (7, [], 20, [], []),
        (21, [90, 90], 90, [2, 1], [10, 1]),  # a row may count as several
        (21, [90, 90], 90, [1, 2], [21, 0]),
        (21, [90, 3], 90, [1, 2], [15, 3]),
        (20, [90, 30], 90, [2, 1], [5, 10]),
    ):
        assert prompt_rows(rows, missing, [most] * len(missing), each) == given, (rows, missing)


def test_a_prompt_has_its_blocks_from_the_start_so_that_later_ones_do_not_take_them() -> None:
    s = scheduler(rows=8, blocks=10)  # 40 positions
    long, other = sequence("a", 30), sequence("b", 12)
    add(s, long, other)
    assert shares(s.schedule()) == [("a", 0, 8, 0)]
    assert len(long.block_table) == 8
    assert list(s.waiting) == [other]


def test_waiting_requests_join_when_there_is_room_and_in_order() -> None:
    s = scheduler(rows=20, batch=2)
    states = [sequence("a", 4), sequence("b", 4), sequence("c", 4)]
    add(s, *states)
    assert [e.request.request_id for e in s.schedule().entries] == ["a", "b"]
    s.remove(states[0])
    assert [name for name, *_ in shares(s.schedule())] == ["b", "c"]


def test_trees_are_no_deeper_than_what_may_still_be_said() -> None:
    for max_tokens, context, nodes, depth in (
        (100, 1000, 5, 98),  # one of 100 tokens is there, the step's bonus token is another
        (2, 1000, 1, 0),  # only the bonus token is left: nothing to guess
        (4, 1000, 5, 2),
        (100, 13, 5, 1),  # 11 tokens are there; one guess and the bonus token fill the context
    ):
        s, a = scheduler(context=context), sequence("a", 10, max_tokens)
        s.add(a)
        commit(s.schedule(), [a])
        (entry,) = s.schedule().entries
        assert (entry.max_nodes, entry.max_depth) == (nodes, depth), (max_tokens, context)


def test_short_of_blocks_a_request_goes_on_without_a_tree() -> None:
    s, a = scheduler(blocks=2, tree=9), sequence("a", 6)
    s.add(a)
    commit(s.schedule(), [a])
    assert shares(s.schedule()) == [("a", 6, 7, 1)]  # 8 positions: 7 + 8 nodes do not fit


def test_the_newest_gives_way_and_comes_back_first() -> None:
    s = scheduler(blocks=4, tree=1)
    a, b, c = sequence("a", 8), sequence("b", 7), sequence("c", 1)
    add(s, a, b, c)
    plan = s.schedule()
    assert shares(plan) == [("a", 0, 8, 1), ("b", 0, 7, 1)]
    commit(plan, [a, b])
    # a needs a third block; b, the newest running, loses its two and goes before c.
    plan = s.schedule()
    assert shares(plan) == [("a", 8, 9, 1)]
    assert (s.preemptions, b.computed, b.block_table, b.generation) == (1, 0, [], 1)
    assert list(s.waiting) == [b, c]
    s.check_integrity()
    commit(plan, [a, b])
    s.remove(a)
    # The token it had said is part of its text; of its blocks the first is still there.
    assert shares(s.schedule())[0] == ("b", 4, 8, 1)


def test_a_step_reads_the_list_of_running_requests_a_few_times_however_many_run() -> None:
    class Counted(list[SequenceState]):
        reads = 0

        def __iter__(self) -> Iterator[SequenceState]:
            Counted.reads += 1
            return super().__iter__()

    config = SchedulerConfig(max_step_tokens=256, max_batch_size=64)
    s = Scheduler(config, BlockPool(400, block_size=4), tree_nodes=1, max_context=1000, prefix_reuse=False)
    states = [sequence(chr(64 + number), 2) for number in range(64)]
    add(s, *states)
    commit(s.schedule(), states)
    s.running = Counted(s.running)
    assert len(s.schedule().entries) == 64
    assert Counted.reads < 10


def adapted(name: str, adapter: str | None, prompt: int = 4) -> SequenceState:
    state = sequence(name, prompt)
    return of(replace(state.request, adapter=adapter))


def test_requests_of_few_adapters_run_at_once_and_none_waits_for_ever() -> None:
    config = SchedulerConfig(max_step_tokens=64, max_batch_size=16)
    s = Scheduler(config, BlockPool(100, block_size=4), tree_nodes=1, max_context=1000, max_adapters=2)
    names = [("a", "x"), ("b", "y"), ("c", "z"), ("d", None), ("e", "x"), ("f", "z"), ("g", None)]
    states = {name: adapted(name, adapter) for name, adapter in names}
    add(s, *states.values())

    def running() -> str:
        commit(s.schedule(), list(states.values()))
        return "".join(state.request.request_id for state in s.running)

    assert running() == "abdg"  # those of x that came behind z wait, too
    s.remove(states["a"])
    assert running() == "bdgc"
    s.remove(states["b"])
    assert running() == "dgcef"
    s.check_integrity()


def test_blocks_of_an_adapter_are_found_by_no_other() -> None:
    roots = [adapted("a", adapter, 8).hash_blocks(4)[0] for adapter in (None, "x", "y", "x")]
    assert roots[1] == roots[3]
    assert len(set(roots)) == 3
    salted = of(replace(adapted("a", None, 8).request, params=SamplingParams(cache_salt="x")))
    assert salted.hash_blocks(4)[0] not in roots


def alike(name: str, prompt: int, **params: int) -> SequenceState:
    """A request whose prompt begins 0 1 2 ..., like every other of these."""
    return of(Request(name, tuple(range(prompt)), SamplingParams(temperature=0, **params), seed=0))


def test_who_begins_like_a_running_prompt_waits_for_it_and_lets_others_pass() -> None:
    s = scheduler(rows=6)
    a, b, c = alike("a", 11), alike("b", 10), sequence("c", 2)
    add(s, a, b, c)
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
    add(s, a, *others, last)
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
