"""The request scheduler: continuous batching of token trees.

The one idea: there is no prefill phase and no speculation phase. Each step has a number of rows to give away,
in this order:

    1. a row for every running request, so that none stands still
    2. the tokens whose KV is missing, of running requests and of those admitted now: prompts; half of the
       rows to those that miss fewest, the rest to the oldest; those that one step can end have every second
       step without the longer ones, as it is over soon; a prompt gets fewer the longer its text is already
    3. nodes of trees, one after the other to every request that wants more, while there are rows

Trees come last: a caller waits for the first token behind a prompt, and a tree may bring no token. When
blocks run out the newest running request gives up its own and waits at the head of the queue; it is
recomputed later. A tree that has no blocks is left out; nobody gives way to it.

A request starts behind the longest prefix of its text that is in the cache already (kv_blocks.py). It waits
for a block that another running request is about to compute, instead of computing it again, and lets others
pass meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from specinfer.config import SchedulerConfig
from specinfer.engine.kv_blocks import BlockPool, SequenceState
from specinfer.errors import ensure
from specinfer.plan import PlanEntry, StepPlan

# A row so far into its text costs twice what the first does: as much for its keys as for its products.
# Measured: 3,500 for a 1.5B model in int8 with matrix units; more without.
_REACH = 4096
_LEAST_ROWS = 32  # of fewer each costs more: keys are read in blocks for several rows
# A prompt's row that wants log-probabilities yields a whole vocabulary of logits, which are read, too. That
# takes less than its pass. Measured: half of it for a 135M model, less for larger ones.
_SCORED_COST = 2  # rows that it counts as


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
        max_adapters: int | None = None,
    ) -> None:
        """Requests of so many different adapters run at once; None: of any number."""
        self._config = config
        self._pool = pool
        self._tree_nodes = tree_nodes  # the budget of a tree when nothing limits it; 1: no speculation
        self._max_context = max_context
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # oldest first
        self._prefix_reuse = prefix_reuse
        self._max_adapters = max_adapters
        self._short_alone = False  # whether the last step read short prompts and left long ones
        self.preemptions = 0
        self.prefix_queries = 0  # tokens of texts that were looked up in the cache
        self.prefix_hits = 0  # tokens of these that were there

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def cache_usage(self) -> float:
        """Of the cache's blocks the part that running requests hold, 0 to 1."""
        return 1 - self._pool.num_free / self._pool.num_blocks

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

    def schedule(self, alone: SequenceState | None = None) -> StepPlan:
        """The next step. Takes blocks, may preempt and admit; empty only when nothing waits or runs.

        With `alone`, which runs or waits, the step has that request in it and no other.
        """
        for sequence in self.running:
            self._publish(sequence)
        before = self.preemptions
        running = self._with_a_row(alone)
        rows = self._config.most_step_tokens - len(running)
        short = self.preemptions > before  # whoever just gave up its blocks does not take them back at once
        awaited: set[tuple[int, bytes]] = set()
        while not short and rows > 0 and len(self.running) < self._config.max_batch_size:
            admitted = self._admit(alone, awaited)
            if admitted is None:
                break
            running.append(admitted)
            rows -= 1
        ends = self._text_ends(running, rows)
        rows -= sum((end - s.computed - 1) * _cost(s) for s, end in zip(running, ends, strict=True))
        return StepPlan(self._with_trees(running, ends, rows))

    def _with_a_row(self, alone: SequenceState | None) -> list[SequenceState]:
        """Those of the running requests that take part, oldest first, each with blocks for a row.

        Where there are too few the newest gives way.
        """
        done = 0
        while True:
            running = [s for s in self.running if alone is None or s is alone]
            if done == len(running):
                return running
            sequence = running[done]
            # A step writes from `computed` on, and a path moves to places behind the end: none is published.
            sequence.check_published(self._pool.block_size)
            if self._pool.extend(sequence.block_table, sequence.computed + 1):
                done += 1
            else:
                self._preempt(self.running[-1])  # and the same one tries again, unless it was the one to go

    def _admit(self, alone: SequenceState | None, awaited: set[tuple[int, bytes]]) -> SequenceState | None:
        """Let the next waiting request run, with blocks for all of its text, where there are so many.

        First come, first served; but those that wait for a running request to compute a block of theirs are
        passed over. Behind one whose adapter has no room beside those in use all others with adapters wait.
        `awaited` are the blocks found so in this step, with their places; more are added.
        """
        adapted = True  # whether one with an adapter may begin
        for waiting in self.waiting:
            if alone not in (None, waiting):
                continue
            if waiting.request.adapter is not None:
                adapted = adapted and self._has_room_for(waiting.request.adapter)
                if not adapted:
                    continue
            found = self._find(waiting, awaited)
            if found is None:
                continue
            needed = self._pool.blocks_for(len(waiting.token_ids)) - len(found)
            if needed > self._pool.num_free - self._pool.unowned(found):
                return None
            self._begin(waiting, found)
            ensure(self._pool.extend(waiting.block_table, len(waiting.token_ids)), "so many blocks are free")
            self.waiting.remove(waiting)
            self.running.append(waiting)
            return waiting
        return None

    def _has_room_for(self, adapter: str) -> bool:
        """Whether this adapter may be in use beside those of running requests."""
        used = {one.request.adapter for one in self.running} - {None}
        return adapter in used or self._max_adapters is None or len(used) < self._max_adapters

    def _text_ends(self, running: Sequence[SequenceState], rows: int) -> list[int]:
        """Where the text ends that each computes in this step, with `rows` beside the one that each has.

        Blocks are there: a prompt got them all when it was admitted.
        """
        costs = [_cost(sequence) for sequence in running]
        missing = [sequence.uncomputed - 1 for sequence in running]
        ending = [more if more * cost <= rows else 0 for more, cost in zip(missing, costs, strict=True)]
        self._short_alone = any(ending) and ending != missing and not self._short_alone
        most = [self._most_rows(sequence) - 1 for sequence in running]
        given = prompt_rows(rows, ending if self._short_alone else missing, most, costs)
        return [sequence.computed + 1 + more for sequence, more in zip(running, given, strict=True)]

    def _most_rows(self, sequence: SequenceState) -> int:
        """The rows of its prompt that one step may have.

        Fewer the more text is behind them: a row reads all of its keys, and steps should take alike long.
        """
        whole = self._config.most_step_tokens
        return max(min(whole, _LEAST_ROWS), whole * _REACH // (_REACH + sequence.computed))

    def _with_trees(
        self, running: Sequence[SequenceState], ends: Sequence[int], rows: int
    ) -> tuple[PlanEntry, ...]:
        """The step's entries, whose trees share the `rows` that are left."""
        wanted = [self._nodes_wanted(s, end) for s, end in zip(running, ends, strict=True)]
        extra = share(rows, [max(nodes - 1, 0) for nodes in wanted])
        return tuple(
            self._entry(sequence, end, min(nodes, 1 + more))
            for sequence, end, nodes, more in zip(running, ends, wanted, extra, strict=True)
        )

    def _nodes_wanted(self, sequence: SequenceState, end: int) -> int:
        """The nodes of the tree behind a text that is computed up to `end`, as far as only it counts."""
        room = sequence.room(self._max_context)
        if end < len(sequence.token_ids) or room == 0:
            return 0
        # A prefill ends in a one-node tree: the first token does not wait for the speculators.
        prefill = sequence.uncomputed > 1 or sequence.num_output == 0
        alone = prefill or room < 2  # the bonus token is the last
        return 1 if alone else min(self._tree_nodes, sequence.tree_nodes)

    def _entry(self, sequence: SequenceState, end: int, nodes: int) -> PlanEntry:
        """The sequence's share of the step; a tree whose blocks cannot be had is its root alone."""
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
            incarnation=sequence.incarnation,
            processors=sequence.processors,
            speculators=sequence.speculators,
            block_hashes=sequence.block_hashes,
            room=sequence.room(self._max_context),
        )

    def _find(self, sequence: SequenceState, awaited: set[tuple[int, bytes]]) -> list[int] | None:
        """The published blocks a waiting sequence may start behind; None: the next one is being computed.

        It is added to `awaited` then, so that others which wait for it are told at once.
        """
        if not self._prefix_reuse:
            return []
        size = self._pool.block_size
        hashes = sequence.hash_blocks(size)  # of a scored prompt too: others wait for its blocks
        if sequence.request.scores_prompt:
            return []
        # The last token is always computed: its logits are wanted.
        hashes = hashes[: (len(sequence.token_ids) - 1) // size]
        if any(hashes[place : place + 1] == [key] for place, key in awaited):
            return None
        found = self._pool.find(hashes)
        end = len(found) + 1
        if end <= len(hashes):
            for other in self.running:
                # One that is past this block has a copy nobody can find: no use to wait for it.
                if other.computed < end * size and other.block_hashes[end - 1 : end] == [hashes[end - 1]]:
                    awaited.add((end - 1, hashes[end - 1]))
                    return None
        return found

    def _begin(self, sequence: SequenceState, found: list[int]) -> None:
        """Start a sequence behind the blocks it found; nobody ever writes to these."""
        self._pool.share(sequence.block_table, found)
        sequence.published = len(found)
        sequence.computed = len(found) * self._pool.block_size
        if sequence.incarnation == 0:
            sequence.cached_tokens = sequence.computed
        if self._prefix_reuse and not sequence.request.scores_prompt:
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
        """Raise IntegrityError when a block is lost or shared, or a waiting request owns any."""
        sequences = [*self.running, *self.waiting]
        self._pool.check_integrity([s.block_table for s in sequences])
        for sequence in sequences:
            sequence.check_integrity(self._pool.block_size)
            behind = sequence.block_table[sequence.computed // self._pool.block_size :]
            ensure(not self._pool.any_published(behind), "a block that is to be written can be found")
        for sequence in self.waiting:
            ensure(not sequence.block_table, f"{sequence.request.request_id} waits and owns blocks")


def _cost(sequence: SequenceState) -> int:
    """What a row of its prompt counts as."""
    return _SCORED_COST if sequence.request.scores_prompt else 1


def prompt_rows(rows: int, missing: Sequence[int], most: Sequence[int], costs: Sequence[int]) -> list[int]:
    """How many of `rows` each prompt gets, given oldest first with what it misses and the most it may have.

    `costs` says how many rows one of its rows counts as. Half of the rows go to the prompts that miss fewest,
    the rest to the oldest. So a short prompt does not wait for a long one that came before, and a long one
    goes on, however many short ones come after it.
    """
    given, used = [0] * len(missing), 0
    wanted = [*map(min, missing, most)]
    oldest = range(len(missing))
    for budget, order in ((rows // 2, sorted(oldest, key=missing.__getitem__)), (rows, oldest)):
        for i in order:
            more = min((budget - used) // costs[i], wanted[i] - given[i])
            given[i] += more
            used += more * costs[i]
    return given


def share(rows: int, wanted: Sequence[int]) -> list[int]:
    """How many of `rows` each gets: what it wants, or as many as any other; the first get the odd ones."""
    given = [0] * len(wanted)
    asking = sorted((i for i, most in enumerate(wanted) if most > 0), key=lambda i: wanted[i])
    while asking:
        fair, odd = divmod(rows, len(asking))
        if wanted[asking[0]] > fair:  # nobody left wants less than that
            for turn, i in enumerate(sorted(asking)):
                given[i] = fair + (turn < odd)
            break
        first = asking.pop(0)
        given[first] = wanted[first]
        rows -= wanted[first]
    return given
