"""PrefixReuse: finds the beginning of a text that is not computed again, and publishes computed blocks.

A request starts after the longest prefix of its text in the cache (kv_blocks.py). It owns the whole blocks
with others, and copies the first rows of a block that begins like its next one. If a running request is
about to compute the next block of that text, the request waits for it instead of computing it again, and
others may be admitted before it.

With recurrent states (state_slots.py) the prefix ends at a checkpoint, and a request waits for one that a
running request is about to make. With a store (prompt_store.py) it waits while its blocks are read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specinfer.engine.kv_blocks import BlockPool, SequenceState, block_hash
from specinfer.engine.prefix_index import Follower
from specinfer.engine.prompt_store import PromptStore
from specinfer.engine.state_slots import StateSlots
from specinfer.errors import ensure
from specinfer.plan import RowCopy, StateCheckpoint
from specinfer.request import PrefixMiss

READ_SECONDS = 0.01  # a step without rows waits so long for blocks of the store, or for an adapter
_SHOWN = 8  # tokens of texts that part, in reports


class Prefix(NamedTuple):
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


@dataclass(slots=True, eq=False)
class PrefixReuse:
    """Finds prefixes in the blocks of a pool, and publishes the blocks of computed text there."""

    pool: BlockPool
    states: StateSlots | None
    store: PromptStore | None
    enabled: bool  # False: nothing is found or published
    part_blocks: bool  # True if a request may start within a block
    _copies: list[RowCopy] = field(default_factory=list)  # of the step that is scheduled
    _held: list[int] = field(default_factory=list)  # their sources

    def find(
        self, sequence: SequenceState, running: Sequence[SequenceState], awaited: set[tuple[int, bytes]]
    ) -> Prefix | None:
        """Return the published prefix of a waiting request; None if it will soon be longer.

        The block that a `running` request is about to compute is then added to `awaited`, the awaited blocks
        of this step with their indices, so that others that wait for it need no search.
        """
        if not self.enabled:
            return Prefix([])
        size = self.pool.block_size
        hashes = sequence.hash_blocks(size)  # also for a scored prompt, as others may use its blocks
        if sequence.request.scores_prompt:
            return Prefix([])
        # The last token is always computed, as its logits are needed.
        hashes = hashes[: (len(sequence.token_ids) - 1) // size]
        if any(hashes[place : place + 1] == [key] for place, key in awaited):
            return None
        if self.store is not None and not self.store.load(sequence, hashes, 0 if running else READ_SECONDS):
            return None
        blocks = self.pool.find(hashes)
        source = None if self.states is None else self.states.find(hashes[: len(blocks)])
        known = 0 if source is None else source.end
        if (end := self._soon(running, hashes, len(blocks), known)) is not None:
            awaited.add((end - 1, hashes[end - 1]))
            return None
        shared = len(blocks) * size
        if self.states is not None and self.states.in_target:
            blocks = blocks[: known // size]
        if shared > len(blocks) * size:
            return Prefix(blocks, source, shared)
        rest = sequence.token_ids[shared : shared + size]
        follower = self.pool.nearest(sequence.hash_before(len(blocks)), rest)
        rows = 0
        if follower is not None and self.part_blocks:
            rows = min(follower.alike, len(sequence.token_ids) - 1 - shared)
        return Prefix(blocks, source, shared, follower, rows)

    def _soon(
        self, running: Sequence[SequenceState], hashes: Sequence[bytes], found: int, known: int
    ) -> int | None:
        """Return how many leading blocks of a text a running request will soon have computed.

        None if that is not more than the blocks `found`, and no checkpoint behind token `known` will be made.
        """
        size, slots = self.pool.block_size, self.states
        for other in running:
            alike = found
            while alike < len(hashes) and other.block_hashes[alike : alike + 1] == [hashes[alike]]:
                alike += 1
            # A request past this block has an unpublished copy, so waiting would be useless.
            if alike > found and other.computed < (found + 1) * size:
                if slots is not None and other.states is not None:
                    slots.ask(other.states, alike * size)
                return found + 1
            if slots is not None and slots.in_target and other.states is not None:
                ends = [end // size for end in other.states.due if known < end <= len(hashes) * size]
                for end in ends:
                    if other.block_hashes[end - 1] == hashes[end - 1]:
                        return end
        return None

    def begin(self, sequence: SequenceState, found: Prefix) -> None:
        """Start a request after the published blocks of its prefix, which are never written."""
        self.pool.share(sequence.block_table, found.blocks)
        sequence.published = len(found.blocks)
        if self.store is not None:
            self.store.keep_lost(sequence, found.source)
        for source in found.sources:
            self.pool.hold(self._held, source)
        ensure(self.pool.extend(sequence.block_table, len(sequence.token_ids)), "so many blocks are free")
        sequence.computed = sequence.published * self.pool.block_size + found.rows
        for source in found.sources:
            self._copies.append(RowCopy(source, sequence.block_table[sequence.published], found.rows))
        self._pin(sequence, range(sequence.published))
        if self.states is not None:
            sequence.states = self.states.begin(
                found.source,
                computed=sequence.computed,
                tokens=len(sequence.token_ids),
                shared=found.shared,
            )
        if sequence.generation == 0:
            sequence.cached_tokens = sequence.computed
            sequence.miss = self._miss(sequence, found)

    def copies(self) -> tuple[RowCopy, ...]:
        """Return the copies that the step makes first; no block may be allocated before they are made."""
        self.pool.release(self._held)
        copies, self._copies = tuple(self._copies), []
        return copies

    def publish(self, sequence: SequenceState) -> None:
        """Publish the blocks before the end of the text; trees and further tokens are written after them.

        Keeps the checkpoints that the last step has made.
        """
        if self.states is not None and sequence.states is not None:
            made = self.states.settle(sequence.states, sequence.computed)
            if self.store is not None:
                self.store.keep_states(sequence, made)
        if not self.enabled:
            return
        size = self.pool.block_size
        full = sequence.computed // size
        if full > sequence.published:
            hashes = sequence.hash_blocks(size)
            new = range(sequence.published, full)
            for block in new:
                tokens = tuple(sequence.token_ids[block * size : (block + 1) * size])
                number, key, before = sequence.block_table[block], hashes[block], sequence.hash_before(block)
                if self.pool.publish(number, key, before, tokens) and self.store is not None:
                    self.store.keep(sequence.request, number, key)
            sequence.published = full
            self._pin(sequence, new)

    def end(self, sequence: SequenceState) -> None:
        """Publish the text of a request that ends, also its last block, whose rows others may copy."""
        self.publish(sequence)
        if self.store is not None and sequence.states is not None and sequence.states.last is not None:
            self.store.keep_states(sequence, [sequence.states.last])
        size, block = self.pool.block_size, sequence.published
        tokens = tuple(sequence.token_ids[block * size : sequence.computed])
        if self.part_blocks and tokens:
            before = sequence.hash_before(block)
            self.pool.publish(sequence.block_table[block], block_hash(before, tokens), before, tokens)

    def _pin(self, sequence: SequenceState, blocks: range) -> None:
        """Pin those of a text's published blocks that its parameters name."""
        for tokens, seconds in sequence.request.params.cache_pins:
            for block in blocks[: max(0, tokens // self.pool.block_size - blocks.start)]:
                self.pool.pin(sequence.block_table[block], time.monotonic() + seconds)

    def _miss(self, sequence: SequenceState, found: Prefix) -> PrefixMiss | None:
        """Return why the text after `found` is computed; None if only its last token is."""
        size, ids, near = self.pool.block_size, sequence.token_ids, found.follower
        if not self.enabled or sequence.request.scores_prompt:
            return None
        start = len(found.blocks) * size
        if found.shared > start:
            return PrefixMiss(start, "states")
        parts = start + (0 if near is None else near.alike)
        if parts >= len(ids) - 1:
            return None
        if self.pool.was_evicted(sequence.hash_blocks(size)[len(found.blocks) :]):
            return PrefixMiss(parts, "evicted")
        if parts == 0:
            return PrefixMiss(0, "cold")
        if near is None or near.alike == len(near.token_ids):
            return PrefixMiss(parts, "ended")
        kept = near.token_ids[near.alike : near.alike + _SHOWN]
        return PrefixMiss(parts, "differs", tuple(kept), tuple(ids[parts : parts + _SHOWN]))
