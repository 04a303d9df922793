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

prefix_reuse.py has what a request need not compute. With recurrent states (state_slots.py) a request also
waits while all slots of requests are in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from specinfer.engine.kv_blocks import BlockPool, SequenceState
from specinfer.engine.prefix_reuse import READ_SECONDS, PrefixReuse
from specinfer.engine.prompt_store import PromptStore
from specinfer.engine.row_shares import fair_shares, prompt_rows
from specinfer.engine.state_slots import StateSlots
from specinfer.errors import ensure
from specinfer.plan import FIRST_SLOT, PlanEntry, StateUse, StepPlan
from specinfer.scheduler_config import SchedulerConfig

# Position at which a row costs twice as much as the first: attention then costs as much as the products.
# Measured: 3,500 for a 1.5B model in int8 with matrix units; more without.
_DOUBLE_COST_AT = 4096
_MIN_ROWS = 32  # with fewer rows each costs more, as attention reads keys in blocks for several rows
# A prompt's row with log-probabilities yields logits over the whole vocabulary, which are scanned. Measured:
# half of the time of the row's pass for a 135M model, less for larger ones.
_SCORED_COST = 2  # rows that such a row counts as


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
        part_blocks = part_blocks and prefix_reuse and states is None
        self._prefixes = PrefixReuse(pool, states, store, prefix_reuse, part_blocks)
        slots = config.max_batch_size if states is None else states.num_slots
        self._max_running = min(config.max_batch_size, slots)
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
                self._prefixes.end(sequence)
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
            self._prefixes.publish(sequence)
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
        return StepPlan(entries, self._prefixes.copies())

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
        those in use, no request with an adapter is admitted. `awaited` is that of
        PrefixReuse.find.
        """
        adapted = True  # True if a request with an adapter may be admitted
        for waiting in self.waiting:
            if waiting.request.adapter is not None:
                adapted = adapted and self._has_room_for(waiting.request.adapter)
                if not adapted or not self._is_there(waiting.request.adapter):
                    continue
            found = self._prefixes.find(waiting, self.running, awaited)
            if found is None:
                continue
            needed = self._pool.blocks_for(len(waiting.token_ids)) - len(found.blocks)
            room = self._pool.num_free - self._pool.unowned(found.blocks) - needed
            if room < 0:
                return None
            if room < self._pool.unowned(found.sources):
                found = found._replace(rows=0)  # to copy from a block takes one more
            self._prefixes.begin(waiting, found)
            if self._prefix_reuse and not waiting.request.scores_prompt:
                self.prefix_queries += len(waiting.token_ids)
                self.prefix_hits += waiting.computed
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
        return self._fetch is None or self._fetch(adapter, used, wait=0.0 if self.running else READ_SECONDS)

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

    def _end_states(self, sequence: SequenceState) -> None:
        if self._states is not None and sequence.states is not None:
            self._states.end(sequence.states)
            sequence.states = None

    def _preempt(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self._end_states(sequence)
        self._pool.release(sequence.block_table)
        sequence.computed = sequence.published = 0
        sequence.lookup = None
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
