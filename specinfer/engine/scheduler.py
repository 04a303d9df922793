"""Scheduler: continuous batching of token trees.

There are no separate phases for prefill and speculation. Each step has a number of rows, assigned in this
order:

    1. a row for every running request, so that all make progress
    2. missing KV of running and newly admitted requests, mostly prompts: half of the rows to those that miss
       fewest tokens, the rest to the oldest. Prompts that one step can finish get every second step without
       the longer ones. The share of a prompt shrinks with the length of its text
    3. nodes of trees, in turn to every request that wants more, while rows remain

Trees come last because a caller waits for the first token after a prompt, and a tree may yield no token. When
blocks run out, the newest running request is preempted: it releases its blocks, waits at the head of the
queue and is recomputed later. A tree without blocks is left out; no request is preempted for a tree.

A request starts after the longest prefix of its text in the cache (kv_blocks.py). It owns the whole blocks
with others, and copies the first rows of a block that begins like its next one. If a running request is
about to compute the next block of that text, the request waits for it instead of computing it again, and
others may be admitted before it.

With recurrent states (state_slots.py) the prefix ends at a checkpoint, and a request waits for one that a
running request is about to make. It also waits while all slots of requests are in use.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specinfer.engine.kv_blocks import BlockPool, SequenceState, block_hash
from specinfer.engine.prefix_index import Follower
from specinfer.engine.prompt_store import PromptStore
from specinfer.engine.row_shares import fair_shares, prompt_rows
from specinfer.engine.state_slots import StateSlots
from specinfer.errors import ensure
from specinfer.plan import FIRST_SLOT, PlanEntry, RowCopy, StateCheckpoint, StateUse, StepPlan
from specinfer.request import PrefixMiss
from specinfer.scheduler_config import SchedulerConfig

# Position at which a row costs twice as much as the first: attention then costs as much as the products.
# Measured: 3,500 for a 1.5B model in int8 with matrix units; more without.
_DOUBLE_COST_AT = 4096
_MIN_ROWS = 32  # with fewer rows each costs more, as attention reads keys in blocks for several rows
# A prompt's row with log-probabilities yields logits over the whole vocabulary, which are scanned. Measured:
# half of the time of the row's pass for a 135M model, less for larger ones.
_SCORED_COST = 2  # rows that such a row counts as
_SHOWN = 8  # tokens of texts that part, in reports
_READ_SECONDS = 0.01  # a step without rows waits so long for an adapter, or for blocks of the store


class _Prefix(NamedTuple):
    """The part of a text that is not computed again."""

    blocks: list[int]
    source: StateCheckpoint | None = None  # states at its end, or before it if only drafts have states
    shared: int = 0  # tokens in blocks that were found, also behind it
    follower: Follower | None = None  # the kept block that goes on most like the text
    rows: int = 0  # leading rows of it that are copied

    @property
    def sources(self) -> list[int]:
        """The block that rows are copied from, if any."""
        return [self.follower.block] if self.follower is not None and self.rows else []


class Scheduler:
    """Selects the requests of each step, with their rows, node budgets and blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        *,
        tree_nodes: int,
        max_context: int,
        prefix_reuse: bool = True,
        max_adapters: int | None = None,
        fetch: Callable[..., bool] | None = None,
        states: StateSlots | None = None,
        store: PromptStore | None = None,
        part_blocks: bool = True,
    ) -> None:
        """Make a scheduler; `max_adapters` is the maximum number of adapters in a step (None: any).

        `fetch` is `AdapterCache.fetch`: a request waits while its adapter is read. `states` are the slots of
        recurrent states, if a model has them. A request also waits while the `store` reads its blocks. With
        `part_blocks` a request may start within a block.
        """
        self._config = config
        self._pool = pool
        self._tree_nodes = tree_nodes  # maximum nodes of a tree; 1: no speculation
        self._max_context = max_context
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # oldest first
        self._prefix_reuse = prefix_reuse
        self._max_adapters, self._fetch = max_adapters, fetch
        self._states = states
        self.store = store
        self._part_blocks = part_blocks and prefix_reuse and states is None
        self._copies: list[RowCopy] = []  # of the step that is scheduled
        self._held: list[int] = []  # their sources
        self._max_running = config.max_batch_size
        if states is not None:
            self._max_running = min(config.max_batch_size, states.num_slots)
        self._short_only = False  # True if the last step read only short prompts
        self.preemptions = 0
        self.prefix_queries = 0  # tokens looked up in the cache
        self.prefix_hits = 0  # tokens found there

    @property
    def cache_usage(self) -> float:
        """Part of the cache's blocks that running requests own, from 0 to 1."""
        return 1 - self._pool.num_free / self._pool.num_blocks

    def add(self, sequence: SequenceState) -> None:
        """Queue a request."""
        self.waiting.append(sequence)

    def remove(self, sequence: SequenceState, *, computed: bool = True) -> None:
        """Remove a request and free its blocks, which others find only if they are `computed`."""
        if sequence in self.running:
            if computed:
                self._publish(sequence)
                if (
                    self.store is not None
                    and sequence.states is not None
                    and sequence.states.last is not None
                ):
                    self.store.keep_states(sequence, [sequence.states.last])
                self._publish_end(sequence)
            self.running.remove(sequence)
            self._end_states(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            if self.store is not None:
                self.store.drop(sequence)
        self._pool.release(sequence.block_table)

    def schedule(self) -> StepPlan:
        """Return the next step; it is empty only if no request runs, and none waits but for its adapter.

        Allocates blocks, and may preempt and admit requests.
        """
        for sequence in self.running:
            self._publish(sequence)
        preemptions = self.preemptions
        running = self._reserve_rows()
        rows = self._config.row_limit - len(running)
        preempted = self.preemptions > preemptions  # a request preempted now is not admitted at once
        awaited: set[tuple[int, bytes]] = set()
        while not preempted and rows > 0 and len(self.running) < self._max_running:
            admitted = self._admit(awaited)
            if admitted is None:
                break
            running.append(admitted)
            rows -= 1
        ends = self._text_ends(running, rows)
        rows -= sum((end - s.computed - 1) * _cost(s) for s, end in zip(running, ends, strict=True))
        wanted = [self._max_nodes(s, end) for s, end in zip(running, ends, strict=True)]
        extra = fair_shares(rows, [max(nodes - 1, 0) for nodes in wanted])
        entries = tuple(
            self._entry(sequence, end, min(nodes, 1 + more))
            for sequence, end, nodes, more in zip(running, ends, wanted, extra, strict=True)
        )
        # No block is allocated before the copies are made.
        self._pool.release(self._held)
        copies, self._copies = tuple(self._copies), []
        return StepPlan(entries, copies)

    def _reserve_rows(self) -> list[SequenceState]:
        """Return the running requests of the step, oldest first, each with blocks for a row.

        Preempts the newest if there are too few blocks.
        """
        running: list[SequenceState] = []
        place = 0
        while place < len(self.running):
            sequence = self.running[place]
            # A step writes only after `computed`, and paths move to the end: no published block is written.
            sequence.check_published(self._pool.block_size)
            if self._pool.extend(sequence.block_table, sequence.computed + 1):
                running.append(sequence)
                place += 1
            else:
                self._preempt(self.running[-1])  # then the same request tries again, unless it was preempted
        return running

    def _admit(self, awaited: set[tuple[int, bytes]]) -> SequenceState | None:
        """Admit the next waiting request if there are blocks for all of its text; returns it or None.

        Requests are admitted in order. Those that wait for a block that a running request is about to compute
        are passed over, and those whose adapter is being read. After one whose adapter does not fit beside
        those in use, no request with an adapter is admitted. Adds to `awaited`, the awaited blocks of this
        step with their indices.
        """
        adapted = True  # True if a request with an adapter may be admitted
        for waiting in self.waiting:
            if waiting.request.adapter is not None:
                adapted = adapted and self._has_room_for(waiting.request.adapter)
                if not adapted or not self._is_there(waiting.request.adapter):
                    continue
            found = self._find(waiting, awaited)
            if found is None:
                continue
            needed = self._pool.blocks_for(len(waiting.token_ids)) - len(found.blocks)
            room = self._pool.num_free - self._pool.unowned(found.blocks) - needed
            if room < 0:
                return None
            if room < self._pool.unowned(found.sources):
                found = found._replace(rows=0)  # to copy from a block takes one more
            self._begin(waiting, found)
            self.waiting.remove(waiting)
            self.running.append(waiting)
            return waiting
        return None

    def _has_room_for(self, adapter: str) -> bool:
        """Return whether this adapter may be used beside those of running requests."""
        used = {one.request.adapter for one in self.running} - {None}
        return adapter in used or self._max_adapters is None or len(used) < self._max_adapters

    def _is_there(self, adapter: str) -> bool:
        """Return whether an adapter is in memory; otherwise begin to read it."""
        used = {one.request.adapter for one in self.running}
        return self._fetch is None or self._fetch(adapter, used, wait=0.0 if self.running else _READ_SECONDS)

    def _text_ends(self, running: Sequence[SequenceState], rows: int) -> list[int]:
        """Return the end of the text that each request computes in this step, with `rows` additional rows.

        A prompt got all of its blocks when it was admitted.
        """
        costs = [_cost(sequence) for sequence in running]
        missing = [sequence.uncomputed - 1 for sequence in running]
        ending = [more if more * cost <= rows else 0 for more, cost in zip(missing, costs, strict=True)]
        self._short_only = any(ending) and ending != missing and not self._short_only
        limits = [self._max_prompt_rows(sequence) - 1 for sequence in running]
        given = prompt_rows(rows, ending if self._short_only else missing, limits, costs)
        return [sequence.computed + 1 + more for sequence, more in zip(running, given, strict=True)]

    def _max_prompt_rows(self, sequence: SequenceState) -> int:
        """Return the maximum rows of its prompt in one step.

        It falls with the length of the text, because a row attends to all of it, and steps should take about
        the same time.
        """
        whole = self._config.row_limit
        return max(min(whole, _MIN_ROWS), whole * _DOUBLE_COST_AT // (_DOUBLE_COST_AT + sequence.computed))

    def _max_nodes(self, sequence: SequenceState, end: int) -> int:
        """Return the maximum nodes of a request's tree after `end`, without regard to other requests."""
        room = sequence.room(self._max_context)
        if end < len(sequence.token_ids) or room == 0:
            return 0
        # A prefill ends in a one-node tree, so that the first token does not wait for speculators.
        prefill = sequence.uncomputed > 1 or sequence.num_output == 0
        root_only = prefill or room < 2  # the bonus token will be the last
        return 1 if root_only else min(self._tree_nodes, sequence.tree_nodes)

    def _entry(self, sequence: SequenceState, end: int, nodes: int) -> PlanEntry:
        """Return a request's entry; a tree without blocks is reduced to its root."""
        if nodes > 1 and not self._pool.extend(sequence.block_table, end - 1 + nodes):
            nodes = 1
        return PlanEntry(
            request=sequence.request,
            token_ids=sequence.token_ids,
            start=sequence.computed,
            end=end,
            max_nodes=nodes,
            max_depth=sequence.room(self._max_context) - 1 if nodes > 1 else 0,
            block_table=tuple(sequence.block_table),
            generation=sequence.generation,
            processors=sequence.processors,
            speculators=sequence.speculators,
            block_hashes=sequence.block_hashes,
            room=sequence.room(self._max_context),
            states=self._state_use(sequence, end),
        )

    def _state_use(self, sequence: SequenceState, end: int) -> StateUse:
        """Return the slots of a pass up to `end`; reserves those of the checkpoints that it makes."""
        if self._states is None or sequence.states is None:
            return FIRST_SLOT
        hashes = sequence.hash_blocks(self._pool.block_size) if self._prefix_reuse else ()
        return self._states.plan(sequence.states, hashes, end, decodes=end == len(sequence.token_ids))

    def _find(self, sequence: SequenceState, awaited: set[tuple[int, bytes]]) -> _Prefix | None:
        """Return the published prefix of a waiting request; None if it will soon be longer.

        Its last block is then added to `awaited`, so that others that wait for it need no search.
        """
        if not self._prefix_reuse:
            return _Prefix([])
        size = self._pool.block_size
        hashes = sequence.hash_blocks(size)  # also for a scored prompt, as others may use its blocks
        if sequence.request.scores_prompt:
            return _Prefix([])
        # The last token is always computed, as its logits are needed.
        hashes = hashes[: (len(sequence.token_ids) - 1) // size]
        if any(hashes[place : place + 1] == [key] for place, key in awaited):
            return None
        wait = 0.0 if self.running else _READ_SECONDS
        if self.store is not None and not self.store.load(sequence, hashes, wait):
            return None
        blocks = self._pool.find(hashes)
        source = None if self._states is None else self._states.find(hashes[: len(blocks)])
        if (end := self._soon(hashes, len(blocks), source)) is not None:
            awaited.add((end - 1, hashes[end - 1]))
            return None
        shared = len(blocks) * size
        if self._states is not None and self._states.in_target:
            blocks = blocks[: 0 if source is None else source.end // size]
        if shared > len(blocks) * size:
            return _Prefix(blocks, source, shared)
        rest = sequence.token_ids[shared : shared + size]
        follower = self._pool.nearest(sequence.hash_before(len(blocks)), rest)
        rows = 0
        if follower is not None and self._part_blocks:
            rows = min(follower.alike, len(sequence.token_ids) - 1 - shared)
        return _Prefix(blocks, source, shared, follower, rows)

    def _soon(self, hashes: Sequence[bytes], found: int, source: StateCheckpoint | None) -> int | None:
        """Return how many leading blocks of a text a running request will soon have computed.

        None if that is not more than the blocks `found`, and no checkpoint behind `source` will be made.
        """
        size, slots = self._pool.block_size, self._states
        for other in self.running:
            alike = found
            while alike < len(hashes) and other.block_hashes[alike : alike + 1] == [hashes[alike]]:
                alike += 1
            # A request past this block has an unpublished copy, so waiting would be useless.
            if alike > found and other.computed < (found + 1) * size:
                if slots is not None and other.states is not None:
                    slots.ask(other.states, alike * size)
                return found + 1
            if slots is not None and slots.in_target and other.states is not None:
                known = 0 if source is None else source.end
                ends = [end // size for end in other.states.due if known < end <= len(hashes) * size]
                for end in ends:
                    if other.block_hashes[end - 1] == hashes[end - 1]:
                        return end
        return None

    def _begin(self, sequence: SequenceState, found: _Prefix) -> None:
        """Start a request after the published blocks of its prefix, which are never written."""
        self._pool.share(sequence.block_table, found.blocks)
        sequence.published = len(found.blocks)
        if self.store is not None:
            self.store.keep_lost(sequence, found.source)
        for source in found.sources:
            self._pool.hold(self._held, source)
        ensure(self._pool.extend(sequence.block_table, len(sequence.token_ids)), "so many blocks are free")
        sequence.computed = sequence.published * self._pool.block_size + found.rows
        for source in found.sources:
            own = sequence.block_table[sequence.published]
            self._copies.append(RowCopy(source, own, found.rows))
        self._pin(sequence, range(sequence.published))
        if self._states is not None:
            sequence.states = self._states.begin(
                found.source,
                computed=sequence.computed,
                tokens=len(sequence.token_ids),
                shared=found.shared,
            )
        if sequence.generation == 0:
            sequence.cached_tokens = sequence.computed
            sequence.miss = self._miss(sequence, found)
        if self._prefix_reuse and not sequence.request.scores_prompt:
            self.prefix_queries += len(sequence.token_ids)
            self.prefix_hits += sequence.computed

    def _publish(self, sequence: SequenceState) -> None:
        """Publish the blocks before the end of the text; trees and further tokens are written after them.

        Keeps the checkpoints that the last step has made.
        """
        if self._states is not None and sequence.states is not None:
            made = self._states.settle(sequence.states, sequence.computed)
            if self.store is not None:
                self.store.keep_states(sequence, made)
        if not self._prefix_reuse:
            return
        size = self._pool.block_size
        full = sequence.computed // size
        if full > sequence.published:
            hashes = sequence.hash_blocks(size)
            new = range(sequence.published, full)
            for block in new:
                tokens = tuple(sequence.token_ids[block * size : (block + 1) * size])
                number, key, before = sequence.block_table[block], hashes[block], sequence.hash_before(block)
                if self._pool.publish(number, key, before, tokens) and self.store is not None:
                    self.store.keep(sequence, number, key)
            sequence.published = full
            self._pin(sequence, new)

    def _publish_end(self, sequence: SequenceState) -> None:
        """Publish the last block of a text that has ended, whose computed rows others may copy."""
        size, block = self._pool.block_size, sequence.published
        tokens = tuple(sequence.token_ids[block * size : sequence.computed])
        if self._part_blocks and tokens:
            before = sequence.hash_before(block)
            self._pool.publish(sequence.block_table[block], block_hash(before, tokens), before, tokens)

    def _pin(self, sequence: SequenceState, blocks: range) -> None:
        """Pin those of a text's published blocks that its parameters name."""
        for tokens, seconds in sequence.request.params.cache_pins:
            for block in blocks[: max(0, tokens // self._pool.block_size - blocks.start)]:
                self._pool.pin(sequence.block_table[block], time.monotonic() + seconds)

    def _miss(self, sequence: SequenceState, found: _Prefix) -> PrefixMiss | None:
        """Return why the text after `found` is computed; None if only its last token is."""
        size, ids, near = self._pool.block_size, sequence.token_ids, found.follower
        if not self._prefix_reuse or sequence.request.scores_prompt:
            return None
        start = len(found.blocks) * size
        if found.shared > start:
            return PrefixMiss(start, "states")
        parts = start + (0 if near is None else near.alike)
        if parts >= len(ids) - 1:
            return None
        if self._pool.was_evicted(sequence.hash_blocks(size)[len(found.blocks) :]):
            return PrefixMiss(parts, "evicted")
        if parts == 0:
            return PrefixMiss(0, "cold")
        if near is None or near.alike == len(near.token_ids):
            return PrefixMiss(parts, "ended")
        kept = near.token_ids[near.alike : near.alike + _SHOWN]
        return PrefixMiss(parts, "differs", tuple(kept), tuple(ids[parts : parts + _SHOWN]))

    def _end_states(self, sequence: SequenceState) -> None:
        if self._states is not None and sequence.states is not None:
            self._states.end(sequence.states)
            sequence.states = None

    def _preempt(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self._end_states(sequence)
        self._pool.release(sequence.block_table)
        sequence.computed = sequence.published = 0
        sequence.looked_up = False
        sequence.generation += 1
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def check_integrity(self) -> None:
        """Raise IntegrityError if a block is lost or wrongly shared, or a waiting request owns one."""
        sequences = [*self.running, *self.waiting]
        self._pool.check_integrity([s.block_table for s in sequences])
        for sequence in sequences:
            sequence.check_integrity(self._pool.block_size)
            behind = sequence.block_table[sequence.computed // self._pool.block_size :]
            ensure(not self._pool.any_published(behind), "a block that is to be written can be found")
        if self._states is not None:
            self._states.check_integrity([s.states for s in sequences if s.states is not None])
        for sequence in self.waiting:
            ensure(not sequence.block_table, f"{sequence.request.request_id} waits and owns blocks")


def _cost(sequence: SequenceState) -> int:
    """Return the number of rows that a row of the request's prompt counts as."""
    return _SCORED_COST if sequence.request.scores_prompt else 1
