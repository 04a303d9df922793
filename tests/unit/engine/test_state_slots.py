"""Slots of recurrent states without a model: which texts read and write them, and what is given away."""

from __future__ import annotations

import pytest

from specinfer.engine.kv_blocks import SequenceState
from specinfer.engine.scheduler import Scheduler
from specinfer.engine.state_slots import StateSlots, TextStates
from specinfer.errors import IntegrityError
from specinfer.plan import StateCheckpoint, StateCounts, StateUse, StepPlan
from specinfer.request import Request
from specinfer.sampling_params import SamplingParams
from tests.unit.engine.scheduling import add, commit, of, scheduler

KEYS = [bytes([i]) for i in range(40)]


def slots(checkpoints: int = 3, *, requests: int = 2, in_target: bool = True) -> StateSlots:
    return StateSlots(StateCounts(requests, checkpoints), block_size=4, in_target=in_target)


def step(states: StateSlots, text: TextStates, end: int, *, decodes: bool = False) -> list[tuple[int, int]]:
    """Run a step up to `end`; returns the slots and ends of the checkpoints that it makes."""
    use = states.plan(text, KEYS, end, decodes=decodes)
    states.settle(text, end)
    states.check_integrity([text])
    return [(one.slot, one.end) for one in use.saves]


def test_checkpoints_of_a_prompt() -> None:
    for computed, tokens, shared, due in (
        (0, 3, 0, []),
        (0, 4, 0, []),  # the last token is never reused
        (0, 11, 0, [8]),
        (0, 11, 4, [4, 8]),  # other texts part from it behind 4 tokens
        (8, 11, 8, []),
        (8, 21, 12, [12, 20]),
        (0, 2051, 0, [1024, 2040, 2048]),
        (1024, 2062, 1024, [2048, 2052, 2060]),
    ):
        states = slots()
        source = StateCheckpoint(2, computed, KEYS[0]) if computed else None
        if source is not None:
            states._kept[source.key] = source
        found = states.begin(source, computed=computed, tokens=tokens, shared=shared).due
        assert found == due, (computed, tokens, shared)


def test_a_text_that_grows_has_one_checkpoint_that_follows_it() -> None:
    states = slots()
    text = states.begin(None, computed=0, tokens=10, shared=0)
    assert step(states, text, 6) == []
    assert step(states, text, 10, decodes=True) == [(2, 8)]  # before the last token of the prompt
    assert step(states, text, 11, decodes=True) == []
    assert step(states, text, 15, decodes=True) == [(3, 12)]
    assert step(states, text, 24, decodes=True) == [(3, 24)]
    assert [(one.slot, one.end) for one in states._kept.values()] == [(2, 8), (3, 24)]
    states.end(text)
    assert states.find(KEYS[:6]) == StateCheckpoint(3, 24, KEYS[5])
    assert states.find(KEYS[:5]) == StateCheckpoint(2, 8, KEYS[1])


def test_the_least_recently_used_one_is_given_away_unless_a_request_begins_with_it() -> None:
    states = slots(2)
    first = states.begin(None, computed=0, tokens=9, shared=4)
    assert step(states, first, 9) == [(2, 4), (3, 8)]
    states.end(first)
    second = states.begin(states.find(KEYS[:1]), computed=4, tokens=5, shared=4)
    third = states.begin(None, computed=0, tokens=19, shared=12)
    assert [one.slot for one in states.plan(third, KEYS, 19, decodes=False).saves] == [3]  # the other is read
    states.check_integrity([second, third])
    states.plan(second, KEYS, 5, decodes=False)
    states.settle(second, 5)  # it has run its first pass
    states.settle(third, 0)  # this pass did not run
    assert [one.slot for one in states.plan(third, KEYS, 19, decodes=False).saves] == [3, 2]
    states.end(third)
    states.end(second)
    states.check_integrity([])
    assert states.find(KEYS) is None  # both were about to be overwritten


def test_a_free_slot_is_used_before_a_kept_one_is_given_away() -> None:
    states = slots(3)
    text = states.begin(None, computed=0, tokens=3, shared=0)
    assert step(states, text, 4, decodes=True) == [(2, 4)]
    reader = states.begin(states.find(KEYS[:1]), computed=4, tokens=9, shared=4)
    assert [one.slot for one in states.plan(text, KEYS, 8, decodes=True).saves] == [3]  # the first is read
    states.check_integrity([text, reader])
    assert states.find(KEYS[:1]) is not None


def test_a_long_prompt_leaves_others_their_checkpoints() -> None:
    states = slots(5)
    for first, tokens in ((0, 11), (100, 19 * 1024 + 9)):
        text = states.begin(None, computed=0, tokens=tokens, shared=0)
        hashes = [first + i for i in range(tokens // 4)]
        for end in (*range(512, tokens, 512), tokens):
            states.plan(text, [*map(str.encode, map(str, hashes))], end, decodes=end == tokens)
            states.settle(text, end)
        states.end(text)
    assert sorted(one.end for one in states._kept.values()) == [8, 1024, 2048, 19 * 1024, 19 * 1024 + 8]


def test_what_is_there_is_not_made_again() -> None:
    states = slots()
    texts = [states.begin(None, computed=0, tokens=9, shared=0) for _ in range(2)]
    plans = [states.plan(text, KEYS, 9, decodes=False).saves for text in texts]  # both, in one step
    assert [one.slot for saves in plans for one in saves] == [2, 3]
    for text in texts:
        states.settle(text, 9)
    states.check_integrity(texts)
    states.end(texts[1])
    again = states.begin(None, computed=0, tokens=9, shared=0)
    assert states.plan(again, KEYS, 9, decodes=False).saves == ()


def test_lost_slots_are_noticed() -> None:
    states = slots()
    text = states.begin(None, computed=0, tokens=9, shared=0)
    states.plan(text, KEYS, 9, decodes=False)
    for texts in ([], [text, text]):
        with pytest.raises(IntegrityError, match="slots of requests"):
            states.check_integrity(texts)
    text.saves = []
    with pytest.raises(IntegrityError, match=r"slots of checkpoints: \[3, 4\]"):
        states.check_integrity([text])


def uses(plan: StepPlan) -> list[tuple[str, int, int, StateUse]]:
    return [(e.request.request_id, e.start, e.end, e.states) for e in plan.entries]


def sequence(name: str, text: str, max_tokens: int = 100) -> SequenceState:
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    return of(Request(name, tuple(map(ord, text)), params, seed=0))


def run(s: Scheduler, *sequences: SequenceState) -> list[tuple[str, int, int, StateUse]]:
    plan = s.schedule()
    commit(plan, [*sequences])
    s.check_integrity()
    return uses(plan)


def test_plans_of_texts_that_begin_alike() -> None:
    s = scheduler(rows=16, batch=3, states=slots(8, requests=3))
    a, b, c = (sequence(name, "abcdefghijklmnop" + name * 6) for name in "xyz")
    add(s, a, b, c)
    early, shared, *own = (one.hash_blocks(4)[at] for one, at in ((a, 2), (a, 3), (a, 4), (b, 4), (c, 4)))
    source = StateCheckpoint(4, 16, shared)
    # b and c wait for the blocks of a, and a makes a checkpoint where they part.
    assert run(s, a) == [("x", 0, 16, StateUse(0, None, (StateCheckpoint(3, 12, early), source)))]
    assert run(s, a, b, c) == [
        ("x", 16, 22, StateUse(0, None, (StateCheckpoint(5, 20, own[0]),))),
        ("y", 16, 22, StateUse(1, source, (StateCheckpoint(6, 20, own[1]),))),
        ("z", 16, 20, StateUse(2, source, (StateCheckpoint(7, 20, own[2]),))),
    ]
    assert (a.cached_tokens, b.cached_tokens, c.cached_tokens) == (0, 16, 16)


def test_more_requests_than_slots_wait_and_a_preempted_one_goes_on_from_a_checkpoint() -> None:
    s = scheduler(rows=32, batch=4, blocks=8, tree=1, states=slots(4))
    a, b, c = (sequence(name, name * 10) for name in "abc")
    add(s, a, b, c)
    assert [name for name, *_ in run(s, a, b)] == ["a", "b"]
    while b in s.running:  # each grows by a token, until 32 positions are full
        run(s, a, b, c)
    assert s.preemptions == 1
    assert b.states is None
    s.remove(a)
    # a took its last block, so the checkpoint behind that is of no use.
    assert [(name, start) for name, start, *_ in run(s, b, c)] == [("b", 8), ("c", 0)]
    assert [one.states.source is None for one in (b, c) if one.states is not None] == [False, True]


def test_a_plain_target_reuses_all_blocks_and_its_drafts_what_they_have() -> None:
    s = scheduler(rows=64, states=slots(2, in_target=False))
    a, b = sequence("a", "abcdefghijklmnopqrst"), sequence("b", "abcdefghijklmnopqrst")
    s.add(a)
    [(*_, use)] = run(s, a)
    s.add(b)
    assert [one.end for one in use.saves] == [12, 16]
    _, (*where, second) = run(s, a, b)
    assert (*where, second.source) == ("b", 16, 20, use.saves[1])
