"""PromptStore: keeps the KV blocks and the states of committed texts on disk, and loads those of prompts.

A draft's blocks have other files. A draft model reads a prefix without
them again, and a head begins behind it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from specinfer.engine.kv_blocks import BlockPool, SequenceState
from specinfer.engine.prompt_files import Lookup, PromptFiles, Reading
from specinfer.engine.state_slots import StateSlots
from specinfer.plan import StateCheckpoint

if TYPE_CHECKING:
    from specinfer.request import Request
    from specinfer.runtime.runner import ModelRunner
    from specinfer.speculate.drafts.draft import CachedTexts

_STATES: Final = ".states"
_AGAIN: Final = 64  # lost blocks that are written for one text, as the step waits for their copies
_PATIENCE: Final = 5.0  # seconds without a file, after which a prompt is computed
_GLANCE: Final = 0.002  # seconds in which a disk that does not hang has found a file


@dataclass(slots=True, eq=False)
class _Loading:
    """A waiting text whose blocks are being read; one at a time."""

    sequence: SequenceState
    keys: Sequence[bytes]  # hashes of its blocks, the first one first
    loaded: int  # leading ones that are in the pool
    reading: Reading
    taken: int = 0  # files of the reading
    heard: float = field(default_factory=time.monotonic)  # time of the last file, or of the beginning


class PromptStore:
    """The files of an engine with its pool; called by the engine's thread only, except `counts`."""

    def __init__(
        self,
        files: PromptFiles,
        runner: ModelRunner,
        pool: BlockPool,
        slots: StateSlots | None,
        *,
        adapters: Collection[str],
        drafts: Mapping[str, CachedTexts],
    ) -> None:
        """`slots` are those of the target's states. Texts with other adapters than these are not kept.

        The names of `drafts` differ if their numbers do.
        """
        self._files, self._runner, self._pool = files, runner, pool
        self._slots = slots
        self._adapters = adapters
        # Both by the end of their files' names.
        self._drafts: dict[str, CachedTexts] = {}
        self._caches = {"": runner.cache}
        for kind, texts in drafts.items():
            if texts.cache is not None:
                end = f".{kind}"
                self._drafts[end], self._caches[end] = texts, texts.cache
                texts.keep = partial(self.keep, end=end)
        self._loading: _Loading | None = None
        self._next: Lookup | None = None  # the one that is waited for, as texts are looked up in order
        self._heard = 0.0  # time since which it is that
        self._late: Lookup | Reading | None = None  # the last one that was given up
        weakref.finalize(self, files.stop)

    @property
    def counts(self) -> Mapping[str, int]:
        """Numbers of files and bytes by event; callable from any thread."""
        return dict(self._files.counts)

    def keep(self, request: Request, block: int, key: bytes, end: str = "") -> None:
        """Write a block that was published, of the cache whose files' names have this `end`."""
        cache, size, name = self._caches[end], self._pool.block_size, key.hex() + end
        if self._takes(request) and self._files.has_room(name, size * cache.row_bytes):
            self._files.write(name, cache.read_rows(block * size, size))

    def keep_states(self, sequence: SequenceState, made: Sequence[StateCheckpoint]) -> None:
        """Write the states of checkpoints whose pass was committed."""
        states = self._runner.states
        for one in made if states is not None and self._takes(sequence.request) else ():
            assert states is not None
            name = one.key.hex() + _STATES
            if states.holds(one) and self._files.has_room(name, states.slot_bytes):
                self._files.write(name, states.read_slot(one.slot))

    def keep_lost(self, sequence: SequenceState, source: StateCheckpoint | None) -> None:
        """Write the first blocks that a text has found and that were lost, and its states `source`."""
        if not (lost := self._files.lost):
            return
        again = (
            (sequence.request, block, key, end)
            for block, key in zip(sequence.block_table, sequence.block_hashes, strict=False)
            for end in self._caches
            if key.hex() + end in lost and (not end or self._drafts[end].holds(block, key))
        )
        for one in islice(again, _AGAIN):
            self.keep(*one)
        if source is not None and source.key.hex() + _STATES in lost:
            self.keep_states(sequence, [source])

    def load(self, sequence: SequenceState, keys: Sequence[bytes], wait: float) -> bool:
        """Load blocks of a waiting text into the pool; returns False while more are read.

        It waits at most `wait` seconds, and some milliseconds at first, for one text at a time. A text is
        looked up once after each of its starts, and none while the disk hangs.
        """
        hangs = self._late is not None and not self._late.left
        if hangs or not self._takes(sequence.request):
            return True
        if (lookup := sequence.lookup) is None:
            if not (sought := self._sought(keys)):
                return True
            lookup = sequence.lookup = self._files.find(sought)
            wait = max(wait, _GLANCE)
        if self._next is None or self._next.left:
            self._next, self._heard = lookup, time.monotonic()
        if not lookup.wait(wait if lookup is self._next else 0.0):
            if time.monotonic() <= self._heard + _PATIENCE:
                return False
            self._give_up(self._next)
            return True
        if lookup.over:
            return True
        if (now := self._loading) is None or now.sequence is not sequence:
            found = len(self._pool.find(keys))
            names = self._names(keys, found, lookup.place)
            if not names:
                return True
            if now is not None:
                return False
            reading = self._files.read(names, tuple(self._drafts))
            now = self._loading = _Loading(sequence, keys, found, reading)
        ended = now.reading.done  # before the last ones are taken
        if bodies := now.reading.take(wait):
            now.heard = time.monotonic()
        elif not ended and time.monotonic() > now.heard + _PATIENCE:
            self._give_up(now.reading)
            return True
        if not self._fill(now, bodies) or ended:
            self.drop(sequence)
            lookup.over = True
        return lookup.over

    def drop(self, sequence: SequenceState) -> None:
        """Stop reading for a text that is removed."""
        if self._loading is not None and self._loading.sequence is sequence:
            self._loading.reading.end()
            self._loading = None

    def close(self) -> None:
        """Write what waits, and end the threads."""
        self._files.close()

    def _takes(self, request: Request) -> bool:
        return request.adapter is None or request.adapter in self._adapters

    def _give_up(self, late: Lookup | Reading) -> None:
        """Load nothing until the disk, which hangs, has done this."""
        self._late = late
        if self._loading is not None:
            self.drop(self._loading.sequence)
        self._files.counts["late"] += 1
        self._files.say("is not read; prompts are computed until it is", f"{_PATIENCE:g} seconds")

    def _sought(self, keys: Sequence[bytes]) -> list[str]:
        """Return the name of the first block, or those of states, the last first; one file is enough."""
        found = len(self._pool.find(keys))
        if self._slots is None:
            return [key.hex() for key in keys[found:][:1]]
        return [key.hex() + _STATES for key in keys[self._with_states(keys, found) :][::-1]]

    def _names(self, keys: Sequence[bytes], found: int, place: int | None) -> list[str]:
        """Return the files behind `found` blocks in the pool, if there are any; states come last.

        `place` is that of the file that was found, among those that were sought.
        """
        if place is None or self._slots is None:
            return [] if place is None else self._of_blocks(keys[found:])
        end = len(keys) - place
        if end <= self._with_states(keys, found):
            return []
        return [*self._of_blocks(keys[found:end]), keys[end - 1].hex() + _STATES]

    def _with_states(self, keys: Sequence[bytes], found: int) -> int:
        """Return how many of the `found` blocks in the pool are before the last states there."""
        source = None if self._slots is None else self._slots.find(keys[:found])
        return 0 if source is None else source.end // self._pool.block_size

    def _of_blocks(self, keys: Sequence[bytes]) -> list[str]:
        """Return the files of blocks, each with those of drafts."""
        return [key.hex() + end for key in keys for end in self._caches]

    def _fill(self, now: _Loading, bodies: Sequence[bytearray]) -> bool:
        """Copy the next blocks, and the states at their end, into memory; returns False if there is no room.

        The blocks before them are owned meanwhile, as they would be evicted otherwise.
        """
        pool, cache, size, table = self._pool, self._runner.cache, self._pool.block_size, list[int]()
        names = now.reading.names[now.taken :][: len(bodies)]
        now.taken += len(bodies)
        place, end = now.loaded - 1, now.loaded + sum("." not in name for name in names)
        pool.share(table, pool.find(now.keys[: now.loaded]))
        fits = len(table) == now.loaded and pool.extend(table, end * size)
        for name, body in zip(names, bodies, strict=True) if fits else ():
            _, dot, kind = name.partition(".")
            if not kind:
                place += 1
                cache.write_rows(table[place] * size, size, body)
                tokens = tuple(now.sequence.token_ids[place * size : (place + 1) * size])
                pool.publish(table[place], now.keys[place], now.sequence.hash_before(place), tokens)
            elif name.endswith(_STATES):
                key = bytes.fromhex(name.removesuffix(_STATES))
                self._fill_states(key, (now.keys.index(key) + 1) * size, body)
            elif body:
                self._drafts[dot + kind].load(table[place], now.keys[place], body)
        pool.release(table)
        now.loaded = end
        return fits

    def _fill_states(self, key: bytes, end: int, body: bytearray) -> None:
        slots, states = self._slots, self._runner.states
        assert slots is not None, "their file was asked for"
        if states is not None and (made := slots.adopt(key, end)) is not None:
            states.write_slot(made, body)
