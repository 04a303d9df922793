"""Who owns which block of the KV cache, and which blocks hold text that may be used again."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from specinfer.errors import IntegrityError, ensure
from specinfer.processors.pipeline import Processors
from specinfer.request import Request

SPARE: Final = 4  # kept blocks that are worth memory of their own, for each block that was owned at once


class BlockPool:
    """The blocks of the KV cache; block b is slots b * block_size .. (b + 1) * block_size - 1.

    A full block of committed text can be published under the hash of that text and everything before it.
    Requests that begin alike then own it together, and it outlives them until its room is needed:

        free        owned by nobody, holds nothing       handed out first, the last to come back first: its
                                                         memory is warm
        untouched   free, and never handed out           takes memory from the first time on that it is
        kept        owned by nobody, published           handed out oldest first
        owned       by one request, or, if published, by several

    Memory that was touched stays taken. So untouched blocks are handed out only while what is kept is worth
    it: up to SPARE times the most blocks that were ever owned at once, and one more for each block that was
    forgotten for this reason and asked for again. Requests that come one after another and never again take
    (1 + SPARE) times what one of them needs, whatever the cache may take; many conversations in turn get what
    they need once it was missed. When no block is untouched, kept ones go.

    Nobody writes to a published block: an owner writes behind the text it found computed, and what it has
    computed itself is published only when the text has gone past it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._touched = 0  # blocks below were handed out once
        self._free: list[int] = []  # of the touched ones, the last handed out next
        self._owners = [0] * num_blocks
        self._most_owned = 0  # at once, so far
        self._kept: OrderedDict[int, None] = OrderedDict()  # oldest first; of one text, its end first
        self._hashes: dict[int, bytes] = {}  # of published blocks
        self._published: dict[bytes, int] = {}
        # The hashes of blocks forgotten while others were untouched, oldest first, no more than these.
        self._forgotten: OrderedDict[bytes, None] = OrderedDict()
        self._missed = 0  # how many of such blocks were asked for again

    @property
    def num_free(self) -> int:
        """How many blocks nobody owns."""
        return self._untouched + len(self._free) + len(self._kept)

    @property
    def num_touched(self) -> int:
        """How many blocks were ever handed out: they take memory."""
        return self._touched

    def blocks_for(self, positions: int) -> int:
        """How many blocks hold `positions` cache positions."""
        return -(-positions // self.block_size)

    def extend(self, block_table: list[int], positions: int) -> bool:
        """Append blocks to `block_table` until it holds `positions`; False, none taken, if they lack."""
        missing = self.blocks_for(positions) - len(block_table)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block = self._take()
            self._owners[block] = 1
            block_table.append(block)
        self._count_owned()
        return True

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """The published blocks of the longest beginning of a text whose blocks have `hashes`.

        That a text goes on in blocks that were forgotten is noted: more will be kept.
        """
        found: list[int] = []
        for key in hashes:
            block = self._published.get(key)
            if block is None:
                break
            found.append(block)
        for key in hashes[len(found) :]:
            if key not in self._forgotten:
                break
            del self._forgotten[key]
            self._missed += 1
        return found

    def unowned(self, blocks: Sequence[int]) -> int:
        """How many of `blocks` nobody owns: those that `num_free` counts."""
        return sum(block in self._kept for block in blocks)

    def any_published(self, blocks: Sequence[int]) -> bool:
        """Whether one of `blocks` can be found by others, so that nobody may write to it."""
        return any(block in self._hashes for block in blocks)

    def share(self, block_table: list[int], blocks: Sequence[int]) -> None:
        """Make the owner of an empty `block_table` an owner of published `blocks`, too."""
        ensure(not block_table, "a text is found at its beginning")
        for block in blocks:
            self._owners[block] += 1
            self._kept.pop(block, None)
        block_table.extend(blocks)
        self._count_owned()

    def publish(self, block: int, key: bytes) -> None:
        """Let others find an owned, full block of computed text; of equal blocks the first is found."""
        ensure(self._owners[block] > 0, f"block {block} has no owner")
        if key not in self._published and block not in self._hashes:
            self._published[key] = block
            self._hashes[block] = key
            self._forgotten.pop(key, None)

    def release(self, block_table: list[int]) -> None:
        """Give all blocks of `block_table` back and empty it; published ones are kept for others."""
        for block in reversed(block_table):
            self._owners[block] -= 1
            if self._owners[block] == 0:
                if block in self._hashes:
                    self._kept[block] = None
                else:
                    self._free.append(block)
        block_table.clear()

    @property
    def _untouched(self) -> int:
        return self.num_blocks - self._touched

    def _count_owned(self) -> None:
        self._most_owned = max(self._most_owned, self.num_blocks - self.num_free)

    def _take(self) -> int:
        """The block whose memory is missed least; there is one that nobody owns."""
        if self._free:
            return self._free.pop()
        if self._untouched and len(self._kept) <= SPARE * self._most_owned + self._missed:
            self._touched += 1
            self._remember_fewer()
            return self._touched - 1
        block, _ = self._kept.popitem(last=False)
        key = self._hashes.pop(block)
        del self._published[key]
        self._forgotten[key] = None
        self._remember_fewer()
        return block

    def _remember_fewer(self) -> None:
        while len(self._forgotten) > self._untouched:
            self._forgotten.popitem(last=False)

    def check_integrity(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Raise IntegrityError unless every block is free, kept, or in as many tables as it has owners."""
        every = range(self.num_blocks)
        owned = Counter(block for table in block_tables for block in table)
        free = [*self._free, *every[self._touched :]]
        unowned = Counter(free) + Counter(self._kept.keys())
        ensure(
            all(owned[b] == self._owners[b] and unowned[b] == (self._owners[b] == 0) for b in every),
            f"{self.num_blocks} blocks, but {len(free)} are free, {len(self._kept)} kept and "
            f"{len(owned)} in tables, {len(set(owned) & set(unowned))} of them both",
        )
        shared = {block for block, tables in owned.items() if tables > 1}
        published = {key: block for block, key in self._hashes.items()}
        ensure(
            (shared | set(self._kept)) <= set(self._hashes) and self._published == published,
            "blocks that are kept or shared, and published ones, disagree",
        )
        ensure(len(owned) <= self._most_owned, f"{len(owned)} are owned, {self._most_owned} at most so far")
        ensure(not self._forgotten.keys() & self._published.keys(), "a block is forgotten or published")
        remembered = len(self._forgotten)
        ensure(remembered <= self._untouched, f"{remembered} are remembered for {self._untouched} untouched")


@dataclass(slots=True, eq=False)
class SequenceState:
    """One admitted request while it waits or runs.

        0 ............ computed ......... len(token_ids)
        KV in cache    to be computed

    A running sequence that is not in its prefill has exactly one token left to compute, the last one:
    the root of its next tree.
    """

    request: Request
    token_ids: Sequence[int]  # prompt and output, which only grow; the transcript owns them
    tree_nodes: int = 1 << 30  # of its trees at most, the root included
    speculators: tuple[str, ...] | None = None  # those that may guess for it; None: all
    processors: Processors | None = None  # what its parameters make of logits; None: nothing
    computed: int = 0
    block_table: list[int] = field(default_factory=list)
    incarnation: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids, so far
    published: int = 0  # of its blocks, from the first on, that others may find
    cached_tokens: int = 0  # of the prompt, whose KV it found when it was first admitted

    @property
    def num_output(self) -> int:
        """Tokens committed so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def uncomputed(self) -> int:
        """Tokens whose KV is not in the target's cache."""
        return len(self.token_ids) - self.computed

    def room(self, max_context: int) -> int:
        """Output tokens that may still be added."""
        return min(self.request.params.max_tokens - self.num_output, max_context - len(self.token_ids))

    def hash_blocks(self, block_size: int) -> list[bytes]:
        """The hash of every full block of the text: of salt, adapter and all tokens up to its end."""
        for block in range(len(self.block_hashes), len(self.token_ids) // block_size):
            before = self.block_hashes[-1] if self.block_hashes else _root(self.request)
            tokens = array("q", self.token_ids[block * block_size : (block + 1) * block_size])
            self.block_hashes.append(blake2b(before + tokens.tobytes(), digest_size=32).digest())
        return self.block_hashes

    def check_integrity(self, block_size: int) -> None:
        """Raise IntegrityError when the computed KV does not fit the tokens or the blocks."""
        tokens, slots = len(self.token_ids), len(self.block_table) * block_size
        ensure(0 <= self.computed < tokens, f"of {tokens} tokens {self.computed} are computed")
        ensure(self.computed <= slots, f"{self.computed} computed tokens lie in {slots} slots")
        self.check_published(block_size)

    def check_published(self, block_size: int) -> None:
        """Raise IntegrityError when tokens that are to be computed lie in a published block."""
        if self.published * block_size > self.computed:
            raise IntegrityError(f"{self.published} blocks are published, {self.computed} tokens computed")


def _root(request: Request) -> bytes:
    """What the first block's hash hangs from; no salt is a salt of its own, no adapter one of its own."""
    salt = request.params.cache_salt
    # Any string is a salt, also one with half a character, which JSON can write and UTF-8 cannot.
    salted = b"" if salt is None else b"salt " + salt.encode(errors="surrogatepass")
    root = blake2b(salted, digest_size=32).digest()
    if request.adapter is None:
        return root
    named = b" adapter " + request.adapter.encode(errors="surrogatepass")
    return blake2b(root + named, digest_size=32).digest()
