"""Passes with recurrent states read and write their slots, or are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specinfer.errors import CapacityError, IntegrityError
from specinfer.plan import StateCheckpoint, StateCounts, StateUse
from specinfer.runtime.batch import Rows, chain_rows
from specinfer.runtime.runner import ModelRunner, Move
from specinfer.runtime.stages import cut_rows
from specinfer.runtime.state_cache import state_bytes, state_counts
from tests.recurrent import CONFIG, PLAIN, CountingModel, after

TABLE = range(8)
COUNTS = StateCounts(slots=3, checkpoints=2, nodes=4)
FIRST = StateUse(0)


def runner() -> ModelRunner:
    return ModelRunner(CountingModel(), num_blocks=8, block_size=4, states=COUNTS)


def states(runner: ModelRunner, *rows: Rows) -> list[int]:
    """Return the state after each row."""
    read = runner._run([replace(one, logits_from=0) for one in rows])
    return [int(state) for state in read.hidden_RD[:, 0]]


def text(tokens: list[int], start: int, use: StateUse = FIRST) -> Rows:
    return replace(chain_rows(tokens, start, TABLE, logits=True), states=use)


def chain(tokens: list[int]) -> list[int]:
    found = [0]
    for token in tokens:
        found.append(after(found[-1], token))
    return found[1:]


def test_a_tree_is_walked_and_its_path_applied_with_the_next_root() -> None:
    one, use = runner(), StateUse(2)
    states(one, text([3, 4], 0, use))
    #     9 - 6 - 8
    #       \ 7 - 5
    tree = Rows([9, 6, 7, 8, 5], 2, TABLE, 0, [-1, 0, 0, 1, 2], states=use)
    *_, root = chain([3, 4, 9])
    left, right = after(root, 6), after(root, 7)
    walked = [root, left, right, after(left, 8), after(right, 5)]
    for count in (1, 2, 5):  # stages run parts of a pass, and a draft grows its tree level by level
        again = runner()
        states(again, text([3, 4], 0, use))
        found = list[int]()
        for parts in cut_rows([tree], count):
            found += states(again, *parts)
        assert found == walked
    assert states(one, tree) == walked
    one.move([Move(TABLE, [4, 6], [3, 4], use)])  # nodes 2 and 4 follow the root
    assert states(one, text([1], 5, use)) == chain([3, 4, 9, 7, 5, 1])[-1:]


def test_a_pass_that_failed_is_not_gone_on_from() -> None:
    one, model = runner(), CountingModel()
    one.model = model
    point = StateCheckpoint(3, 4, b"four")
    states(one, text([0, 1, 2, 3, 4], 0, StateUse(0, None, (point,))))
    model.fails = 1
    with pytest.raises(RuntimeError, match="a pass failed"):
        states(one, text([5], 5))
    with pytest.raises(IntegrityError, match="slot 0 has no states for a text at 5"):
        states(one, text([5], 5))
    assert states(one, text([4, 5], 4, StateUse(0, point))) == chain([*range(6)])[-2:]
    model.fails = 1
    with pytest.raises(RuntimeError, match="a pass failed"):
        states(one, text([*range(8)], 0, StateUse(0, None, (StateCheckpoint(3, 8, b"eight"),))))
    assert not one.states.holds(point)


def test_what_has_no_states_is_refused_and_changes_none() -> None:
    one = runner()
    states(one, text([1, 2, 3], 0))
    for rows, line in (
        ([text([4], 2)], "states of 3 tokens for a text at 2 and a tree of 0 nodes"),
        ([text([4], 8)], "states of 3 tokens for a text at 8"),
        ([text([4], 3, StateUse(1))], "slot 1 has no states for a text at 3"),
        ([text([4], 4, StateUse(1, StateCheckpoint(3, 4)))], "slot 3 has not the checkpoint of 4 tokens"),
        ([Rows([4, 5, 6, 7, 8, 9], 3, TABLE, 0, [-1, 0, 0, 0, 0, 0])], "a tree of 5 nodes"),
        ([text([4], 3), text([4], 3)], r"requests share slots of states: \[0, 0\]"),
    ):
        with pytest.raises(IntegrityError, match=line):
            states(one, *rows)
    with pytest.raises(IntegrityError, match=r"nodes at \[7\] with states of 3 tokens and 4 places"):
        one.move([Move(TABLE, [7], [3], StateUse(0))])
    assert states(one, text([4], 3)) == chain([1, 2, 3, 4])[-1:]


def test_half_of_the_memory_is_for_requests_and_a_quarter_for_checkpoints() -> None:
    wanted, models = StateCounts(16, 256, 10), [(one, torch.float32) for one in (CONFIG, PLAIN, CONFIG)]
    assert state_bytes(models, StateCounts(1, 0, 10)) == 2 * 4 * 11  # a state's float, and ten nodes
    assert state_bytes(models, StateCounts(0, 1, 10)) == 2 * 4
    for budget, text, slots, checkpoints in (
        (1 << 20, 0, 16, 256),
        (1760, 0, 10, 55),
        (200, 0, 1, 6),
        (104, 0, 1, 2),
        (1760, 1000, 4, 23),  # as in 760
        (1760, 1656, 1, 2),
        (1760, 1657, 5, 27),  # as in 880: the longest text does not fit
    ):
        assert state_counts(models, wanted, budget, "cpu", text=text) == (slots, checkpoints, 10)
    assert state_counts(models, wanted._replace(checkpoints=0), 88, "cpu") == (1, 0, 10)
    assert state_counts(models[1:2], wanted, 0, "cpu") == wanted
    with pytest.raises(CapacityError, match=r"one request and of 2 checkpoints take .*raise kv_cache_memory"):
        state_counts(models, wanted, 103, "cpu")


def test_layers_without_attention_take_no_memory_for_keys() -> None:
    cache = runner().cache
    assert [tuple(keys.shape) for keys in cache.keys] == [(32, 1, 8), (0, 1, 8)]
    assert cache.values[1].data_ptr() == 0
    cache.keys[0][:, 0, 0] = torch.arange(32)
    cache.move([5], [2])
    assert cache.keys[0][2, 0, 0] == 5
