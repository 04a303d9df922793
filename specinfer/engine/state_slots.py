"""StateSlots: owners of slots of recurrent states, and checkpoints kept for reuse."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from specinfer.errors import ensure
from specinfer.plan import StateCheckpoint, StateCounts, StateUse

_STEP: Final = 1024  # tokens of a prompt between checkpoints
# Tokens at a prompt's end that a next turn may lack: templates begin an answer otherwise than they repeat it.
_OPENING: Final = 8


@dataclass(slots=True)
class TextStates:
    """The states of a running request's text."""

    slot: int
    source: StateCheckpoint | None  # states that the text began with
    due: list[int]  # ends of its prompt at which checkpoints will be made
    steps: range  # those of them that are given away first, as a long prompt has many
    applied: int  # tokens that the slot has
    planned: int  # the same after the pass of the last plan
    saves: list[StateCheckpoint] = field(default_factory=list)  # that this pass makes
    last: StateCheckpoint | None = None  # made while decoding, and replaced by the next one
    pins: bool = True  # the source may not be given away yet


class StateSlots:
    """The slots of recurrent states: one for each running request, then those of checkpoints.

    A checkpoint is found by the hash of its text, as a block is. Its slot is in one of these states:

        free      no content
        reserved  a step is about to write it
        kept      that step was committed. When no slot is free, the least recently used one is given away,
                  but none whose request has not run its first pass

    A prompt gets checkpoints at the last blocks' ends before its last token and before the opening of an
    answer, where other texts part from it, and at every 1,024 tokens. The last kind is given away first.
    While a text is decoded, one checkpoint follows it from block to block.
    """

    def __init__(self, counts: StateCounts, *, block_size: int, in_target: bool = True) -> None:
        """`in_target` is whether the target has states, and not only drafts."""
        self.num_slots, self.in_target = counts.slots, in_target
        self._size = block_size
        self._end = counts.slots + counts.checkpoints
        self._unused: list[int] = [*range(self.num_slots - 1, -1, -1)]
        self._free: list[int] = [*range(self._end - 1, self.num_slots - 1, -1)]
        self._kept: OrderedDict[bytes, StateCheckpoint] = OrderedDict()  # the least recently used first
        self._pinned: list[bytes] = []  # once for each request

    def find(self, hashes: Sequence[bytes]) -> StateCheckpoint | None:
        """Return the checkpoint of the longest prefix of a text whose blocks have `hashes`."""
        return next((self._kept[key] for key in reversed(hashes) if key in self._kept), None)

    def begin(self, source: StateCheckpoint | None, *, computed: int, tokens: int, shared: int) -> TextStates:
        """Give a request its slot; at least one is free.

        Args:
            source: the checkpoint that its states begin with.
            computed: tokens of its text whose KV the target's cache has.
            tokens: all tokens of its text.
            shared: tokens in blocks that were found, also behind the checkpoint.
        """
        first = 0 if source is None else source.end
        step = max(1, _STEP // self._size) * self._size
        ends = [(tokens - behind) // self._size * self._size for behind in (1, _OPENING)]
        steps = range(step, min(ends), step)
        due = {*steps, *ends, shared}
        if source is not None:
            self._pinned.append(source.key)
            self._kept.move_to_end(source.key)
        ends = sorted(end for end in due if end > first)
        return TextStates(self._unused.pop(), source, ends, steps, computed, computed)

    def ask(self, text: TextStates, end: int) -> None:
        """Let a text's next passes make a checkpoint at the end of a block, for a request that waits."""
        if end > text.applied and end not in text.due:
            text.due.append(end)

    def plan(self, text: TextStates, hashes: Sequence[bytes], end: int, *, decodes: bool) -> StateUse:
        """Return the slots of a pass that computes the text up to `end`; reserves those of checkpoints.

        `hashes` are those of the text's blocks; with none, no checkpoint is made. A pass that `decodes`
        computes the whole text.
        """
        ends = dict[int, StateCheckpoint | None].fromkeys(one for one in sorted(text.due) if one <= end)
        last = end // self._size * self._size
        if decodes and last > text.applied:
            ends.setdefault(last, text.last)
        for one, replaced in ends.items() if hashes else ():
            key = hashes[one // self._size - 1]
            if key in self._kept:
                self._kept.move_to_end(key)
            elif (slot := self._reserve(replaced)) is not None:
                text.saves.append(StateCheckpoint(slot, one, key))
        text.planned = end
        return StateUse(text.slot, text.source, tuple(text.saves))

    def _reserve(self, replaced: StateCheckpoint | None) -> int | None:
        """Return a slot for a checkpoint, that of the `replaced` one if it may be; None: all are in use."""
        if replaced is None or self._kept.get(replaced.key) != replaced or replaced.key in self._pinned:
            if self._free:
                return self._free.pop()
            replaced = next((one for one in self._kept.values() if one.key not in self._pinned), None)
            if replaced is None:
                return None
        del self._kept[replaced.key]
        return replaced.slot

    def adopt(self, key: bytes, end: int) -> StateCheckpoint | None:
        """Keep a checkpoint from elsewhere; returns None if it is here, or all slots are in use."""
        if key in self._kept or (slot := self._reserve(None)) is None:
            return None
        self._kept[key] = StateCheckpoint(slot, end, key)
        return self._kept[key]

    def settle(self, text: TextStates, computed: int) -> list[StateCheckpoint]:
        """Keep the checkpoints of the last plan's pass if it was committed: the text is `computed` so far.

        Returns those of its prompt; of those made while decoding, `text.last` remains.
        """
        if computed < text.planned:
            self._drop(text)
            return []
        made = [one for one in text.saves if one.end in text.due and one.key not in self._kept]
        for one in text.saves:
            if one.key in self._kept:
                self._free.append(one.slot)
            else:
                self._kept[one.key] = one
                if one.end in text.steps:
                    self._kept.move_to_end(one.key, last=False)
        if text.saves and text.saves[-1].end not in text.due:
            text.last = text.saves[-1]
        text.saves = []
        text.applied = text.planned
        text.due = [end for end in text.due if end > text.applied]
        self._unpin(text)
        return made

    def end(self, text: TextStates) -> None:
        """Take the slot of a request that ended or was preempted; its checkpoints are kept."""
        self._drop(text)
        self._unpin(text)
        self._unused.append(text.slot)

    def _drop(self, text: TextStates) -> None:
        self._free += [one.slot for one in text.saves]
        text.saves, text.planned = [], text.applied

    def _unpin(self, text: TextStates) -> None:
        if text.pins and text.source is not None:
            self._pinned.remove(text.source.key)
        text.pins = False

    def check_integrity(self, texts: Sequence[TextStates]) -> None:
        """Raise IntegrityError unless every slot has one owner, and pinned checkpoints are kept."""
        owned = sorted([*self._unused, *(text.slot for text in texts)])
        ensure(owned == [*range(self.num_slots)], f"slots of requests: {owned}")
        kept = [one.slot for one in self._kept.values()]
        written = [one.slot for text in texts for one in text.saves]
        checkpoints = sorted([*self._free, *kept, *written])
        ensure(checkpoints == [*range(self.num_slots, self._end)], f"slots of checkpoints: {checkpoints}")
        pinned = [text.source.key for text in texts if text.pins and text.source is not None]
        ensure(sorted(pinned) == sorted(self._pinned), "requests hold the checkpoints that they begin with")
        ensure(self._kept.keys() >= {*pinned}, "checkpoints that are about to be read are kept")
