"""An inconsistent internal state is refused by an IntegrityError: `python -O` would drop an assert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specinfer.engine.kv_blocks import BlockPool, SequenceState
from specinfer.engine.scheduler import Scheduler
from specinfer.errors import IntegrityError
from specinfer.kernels.sampling import NativeScan
from specinfer.request import Request
from specinfer.runtime.kv_cache import KvCache
from specinfer.sampling_params import SamplingParams
from specinfer.scheduler_config import SchedulerConfig
from specinfer.verify.target_law import Law
from tests.engines import engine_of, write_tiny
from tests.recurrent import PLAIN

REQUEST = Request("r", (1, 2, 3, 4, 5), SamplingParams(temperature=0), seed=0)


def more_computed_than_there_are_tokens(computed: int = len(REQUEST.prompt_token_ids)) -> None:
    sequence = SequenceState(REQUEST, REQUEST.prompt_token_ids)
    sequence.computed = computed
    sequence.check_integrity(block_size=4)


def more_computed_than_the_blocks_hold() -> None:
    more_computed_than_there_are_tokens(1)


def _scheduled() -> tuple[Scheduler, SequenceState, BlockPool]:
    pool, sequence = BlockPool(8, block_size=4), SequenceState(REQUEST, REQUEST.prompt_token_ids)
    scheduler = Scheduler(SchedulerConfig(), pool, tree_nodes=4, max_context=64)
    scheduler.add(sequence)
    scheduler.schedule()
    return scheduler, sequence, pool


def lost_block() -> None:
    scheduler, sequence, _ = _scheduled()
    sequence.block_table.pop()
    scheduler.check_integrity()


def block_of_a_waiting_request() -> None:
    scheduler, sequence, pool = _scheduled()
    scheduler._preempt(sequence)
    pool.extend(sequence.block_table, 1)
    scheduler.check_integrity()


def step_that_would_write_to_a_published_block() -> None:
    scheduler, sequence, _ = _scheduled()
    sequence.published = 1
    scheduler.schedule()


def published_block_that_is_to_be_written() -> None:
    scheduler, sequence, pool = _scheduled()
    pool.publish(sequence.block_table[0], b"text", b"", (1,))
    scheduler.check_integrity()


def text_found_behind_its_beginning() -> None:
    BlockPool(2, block_size=4).share([0], [1])


def published_block_without_an_owner() -> None:
    BlockPool(2, block_size=4).publish(0, b"text", b"", (1,))


def _pool_and_table() -> tuple[BlockPool, list[int]]:
    """Return a pool with four blocks of 4 slots, two of them owned by a request."""
    pool, table = BlockPool(4, block_size=4), list[int]()
    pool.extend(table, 8)
    return pool, table


def owned_block_that_is_said_to_be_untouched() -> None:
    pool, table = _pool_and_table()
    pool._touched = 1
    pool.check_integrity([table])


def block_that_is_free_twice() -> None:
    pool, table = _pool_and_table()
    pool.release(table)
    pool._free.append(0)
    pool.check_integrity([])


def more_slots_read_than_written() -> None:
    KvCache(PLAIN, 4, torch.float32, torch.device("cpu")).move([1], [2, 3])


def law_without_its_likeliest_token() -> None:
    library: Any = None  # never called
    NativeScan(library).racers(Law(np.zeros(4, np.float32), None, top=4, temperature=1.0, vocab=4), key=0)


STATES = (
    *(more_computed_than_there_are_tokens, more_computed_than_the_blocks_hold, lost_block),
    *(block_of_a_waiting_request, step_that_would_write_to_a_published_block),
    *(published_block_that_is_to_be_written, text_found_behind_its_beginning),
    *(published_block_without_an_owner, owned_block_that_is_said_to_be_untouched, block_that_is_free_twice),
    *(more_slots_read_than_written, law_without_its_likeliest_token),
)


@pytest.mark.parametrize("state", STATES)
def test_no_broken_state_goes_unnoticed(state: Any) -> None:
    """test_token_tree.py has those of trees, test_state_slots.py those of recurrent states."""
    with pytest.raises(IntegrityError):
        state()


def test_an_engine_that_forgot_a_request_is_noticed(tmp_path: Path) -> None:
    engine = engine_of(write_tiny(tmp_path, vocab_size=16, max_context=64).llm())
    engine.add(engine.admission.admit(REQUEST))
    engine._requests.clear()
    with pytest.raises(IntegrityError):
        engine.check_integrity()
