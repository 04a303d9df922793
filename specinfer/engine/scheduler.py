"""The request scheduler: continuous batching of token trees.

The one idea: there is no prefill phase and no speculation phase. Each step has a number of rows to give
away. Running requests come first, oldest first: each takes the tokens whose KV is missing, and, when that
reaches its last token, a tree below it. What is left over admits waiting requests. When blocks run out
the newest running request gives up its own and waits at the head of the queue; it is recomputed later.

A request starts behind the longest beginning of its text that is in the cache already (kv_blocks.py). What
another running request is about to compute it waits for, instead of computing it again.
"""

from __future__ import annotations

from collections import deque

from specinfer.config import SchedulerConfig
from specinfer.engine.kv_blocks import BlockPool
from specinfer.engine.sequence import SequenceState
from specinfer.plan import PlanEntry, StepPlan

_SCORED_ROWS = 64  # of a prompt that wants log-probabilities: each row yields a whole vocabulary of logits


class Scheduler:
    """Decides who runs in the next step, with which rows, tree budget and blocks."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        *,
        tree_nodes: int,
        max_context: int,
        prefix_reuse: bool = True,
    ) -> None:
        self._config = config
        self._pool = pool
        self._tree_nodes = tree_nodes  # the budget of a tree when nothing limits it; 1: no speculation
        self._max_context = max_context
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # oldest first
        self._prefix_reuse = prefix_reuse
        self.preemptions = 0
        self.prefix_queries = 0  # tokens of texts that were looked up in the cache
        self.prefix_hits = 0  # tokens of these that were there

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def add(self, sequence: SequenceState) -> None:
        """Queue a request."""
        self.waiting.append(sequence)

    def remove(self, sequence: SequenceState) -> None:
        """Forget a finished or aborted request and free its blocks; one that is gone already stays gone."""
        if sequence in self.running:
            self._publish(sequence)
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._pool.release(sequence.block_table)

    def schedule(self) -> StepPlan:
        """The next step. Takes blocks, may preempt and admit; empty only when nothing waits or runs."""
        for sequence in self.running:
            self._publish(sequence)
        rows, before = self._config.max_step_tokens, self.preemptions
        entries: list[PlanEntry] = []
        turn = 0
        while turn < len(self.running):
            sequence = self.running[turn]
            later = len(self.running) - turn - 1  # each of them is sure of one row
            entry = self._entry(sequence, rows - later)
            if entry is None:
                self._preempt(self.running[-1])
                continue  # the same sequence tries again, unless it was the one to go
            entries.append(entry)
            rows -= _rows_of(entry)
            turn += 1
        short = self.preemptions > before  # whoever just gave up its blocks does not take them back at once
        while not short and self.waiting and rows > 0 and len(self.running) < self._config.max_batch_size:
            sequence = self.waiting[0]
            found = self._find(sequence)
            if found is None:
                break  # first come, first served: nobody overtakes
            needed = self._pool.blocks_for(len(sequence.token_ids)) - len(found)
            if needed > self._pool.num_free - self._pool.unowned(found):
                break
            self._begin(sequence, found)
            entry = self._entry(sequence, rows)
            assert entry is not None, "blocks for the whole text are free"
            self.running.append(self.waiting.popleft())
            entries.append(entry)
            rows -= _rows_of(entry)
        return StepPlan(tuple(entries))

    def _entry(self, sequence: SequenceState, rows: int) -> PlanEntry | None:
        """The sequence's share of at most `rows` rows; None when its blocks cannot be had."""
        start, uncomputed = sequence.computed, sequence.uncomputed
        # A step writes to positions from `start` on, a path moves to ones behind `end`: none is published.
        assert sequence.published * self._pool.block_size <= start, (sequence.published, start)
        if sequence.request.params.prompt_logprobs is not None:
            rows = min(rows, _SCORED_ROWS)
        if uncomputed > rows:
            end, nodes, depth = start + rows, 0, 0
        else:
            end = start + uncomputed
            depth = sequence.room(self._max_context) - 1
            # A prefill ends in a one-node tree: the first token does not wait for the speculators.
            prefill = uncomputed > 1 or sequence.num_output == 0
            nodes = 1 if prefill or depth < 1 else min(self._tree_nodes, sequence.tree_nodes, rows)
        if not self._pool.extend(sequence.block_table, end - 1 + max(nodes, 1)):
            if nodes <= 1 or not self._pool.extend(sequence.block_table, end):
                return None
            nodes = 1  # short of blocks: decode without a tree rather than preempt somebody
        return PlanEntry(
            request=sequence.request,
            token_ids=sequence.token_ids,
            start=start,
            end=end,
            max_nodes=nodes,
            max_depth=depth if nodes > 1 else 0,
            block_table=tuple(sequence.block_table),
            incarnation=sequence.incarnation,
            processors=sequence.processors,
            guessers=sequence.guessers,
            block_hashes=sequence.block_hashes,
        )

    def _find(self, sequence: SequenceState) -> list[int] | None:
        """The published blocks a waiting sequence may start behind; None: the next one is being computed."""
        if not self._prefix_reuse:
            return []
        size = self._pool.block_size
        hashes = sequence.hash_blocks(size)  # of a scored prompt too: others wait for its blocks
        if sequence.request.params.prompt_logprobs is not None:
            return []
        # The last token is always computed: its logits are wanted.
        hashes = hashes[: (len(sequence.token_ids) - 1) // size]
        found = self._pool.find(hashes)
        end = len(found) + 1
        if end <= len(hashes):
            for other in self.running:
                # One that is past this block has a copy nobody can find: no use to wait for it.
                if other.computed < end * size and other.block_hashes[end - 1 : end] == [hashes[end - 1]]:
                    return None
        return found

    def _begin(self, sequence: SequenceState, found: list[int]) -> None:
        """Start a sequence behind the blocks it found; nobody ever writes to these."""
        self._pool.share(sequence.block_table, found)
        sequence.published = len(found)
        sequence.computed = len(found) * self._pool.block_size
        if sequence.incarnation == 0:
            sequence.cached_tokens = sequence.computed
        if self._prefix_reuse and sequence.request.params.prompt_logprobs is None:
            self.prefix_queries += len(sequence.token_ids)
            self.prefix_hits += sequence.computed

    def _publish(self, sequence: SequenceState) -> None:
        """Let others find the blocks the text has gone past: trees and the next tokens are written behind."""
        if not self._prefix_reuse:
            return
        size = self._pool.block_size
        full = min(sequence.computed // size, len(sequence.block_table))
        if full > sequence.published:
            hashes = sequence.hash_blocks(size)
            for block in range(sequence.published, full):
                self._pool.publish(sequence.block_table[block], hashes[block])
            sequence.published = full

    def restart(self) -> None:
        """Let every running request wait and be recomputed, in the same order; trust no KV of theirs."""
        while self.running:
            self._give_way(self.running[-1])
        for sequence in self.waiting:  # one of them may have been about to run
            self._give_back(sequence)

    def _preempt(self, sequence: SequenceState) -> None:
        self._give_way(sequence)
        self.preemptions += 1

    def _give_way(self, sequence: SequenceState) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.incarnation += 1
        self.waiting.appendleft(sequence)

    def _give_back(self, sequence: SequenceState) -> None:
        self._pool.release(sequence.block_table)
        sequence.computed = sequence.published = 0

    def check_integrity(self) -> None:
        """Raise when a block is lost or shared, or a waiting request owns any."""
        sequences = [*self.running, *self.waiting]
        self._pool.check_integrity([s.block_table for s in sequences])
        for sequence in sequences:
            sequence.check_integrity(self._pool.block_size)
            behind = sequence.block_table[sequence.computed // self._pool.block_size :]
            assert not self._pool.any_published(behind), "a block that is to be written can be found"
        for sequence in self.waiting:
            assert not sequence.block_table, f"{sequence.request.request_id} waits and owns blocks"


def _rows_of(entry: PlanEntry) -> int:
    return entry.end - entry.start + max(entry.max_nodes - 1, 0)
