"""How far a head has read each text: what is in its cache, what waits to be read, what it has missed.

    0 ............ origin ............ cached ............ unread.end
    never seen     K and V of rows     features wait

Row i of a head is made of the target's hidden states of token i, and lies at cache position i of the target's
blocks. A text that another request left in shared blocks has K and V there if the head has read it then;
hidden states come only of what the target computes. So where some are missing the head reads from the next
block on, and what stands before that is not seen: its guesses get worse, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specinfer.plan import PlanEntry
from specinfer.runtime.features import TextFeatures, UnreadFeatures


@dataclass(slots=True)
class HeadText:
    """What a head holds of one request between steps."""

    incarnation: int
    origin: int  # the first position it sees, which begins a block
    cached: int  # positions origin..cached-1 are in its cache
    claimed: int  # blocks of the table that it holds for good
    unread: UnreadFeatures
    last_D: Tensor | None = None  # what the head made of the last row it read, where it needs that


class HeadTexts:
    """The texts of all requests, as far as one head knows them."""

    def __init__(self, *, block_size: int, most_unread: int) -> None:
        self._block_size = block_size
        self._most_unread = most_unread  # tokens of a text whose features are kept
        self._texts: dict[str, HeadText] = {}
        self._holds: dict[int, bytes] = {}  # block -> hash of the text whose K and V the head has there

    def of(self, entry: PlanEntry) -> HeadText:
        """What is held of the entry's request; blocks written before it was preempted are not."""
        name = entry.request.request_id
        text = self._texts.get(name)
        if text is None or text.incarnation != entry.incarnation:
            text = self._texts[name] = self._start(entry)
        return text

    def hear(self, features: TextFeatures) -> None:
        """Keep a text's new features until they are read."""
        entry = features.entry
        text = self.of(entry)
        unread = text.unread
        if features.start > unread.end:  # there is a gap: nobody computed these tokens with this head there
            self._miss(text, features.start)
        # What it found in shared blocks it need not read again; so is a part before the next block.
        known, count = max(0, unread.end - features.start), len(features.states)
        if known < count:
            unread.add(features.states.part(known, count) if known else features.states)
        if unread.end - unread.first > self._most_unread:
            self._miss(text, unread.end - self._most_unread)

    def forget(self, request_id: str) -> None:
        """A request that ended."""
        self._texts.pop(request_id, None)

    def claim(self, text: HeadText, entry: PlanEntry) -> None:
        """Note which blocks hold text for good, and that the others are about to be written to."""
        full = min(text.cached // self._block_size, len(entry.block_hashes))
        written = full
        if text.origin:  # what stands there is not made of the whole text before it
            written = text.origin // self._block_size
        else:
            for block in range(text.claimed, full):
                self._holds[entry.block_table[block]] = entry.block_hashes[block]
            text.claimed = max(text.claimed, full)
        for number in entry.block_table[written:]:
            self._holds.pop(number, None)

    def _start(self, entry: PlanEntry) -> HeadText:
        """A text that is new here: it starts behind the blocks that the head has read for another."""
        held = 0
        for block, key in zip(entry.block_table, entry.block_hashes, strict=False):
            if self._holds.get(block) != key or (held + 1) * self._block_size > entry.start:
                break
            held += 1
        cached = held * self._block_size
        return HeadText(entry.incarnation, 0, cached, held, UnreadFeatures(cached))

    def _miss(self, text: HeadText, first: int) -> None:
        """Go on at the first block whose tokens from position `first` on have features."""
        size = self._block_size
        text.origin = text.cached = -(-first // size) * size
        text.unread.drop_before(text.origin)
