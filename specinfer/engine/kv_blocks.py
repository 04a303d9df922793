"""BlockPool: owners of KV cache blocks, and blocks kept for reuse; and the state of a sequence."""

from __future__ import annotations

import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from specinfer.engine.prefix_index import Follower, PrefixIndex
from specinfer.engine.prompt_files import Lookup
from specinfer.engine.state_slots import TextStates
from specinfer.errors import IntegrityError, ensure
from specinfer.processors.pipeline import Processors
from specinfer.request import PrefixMiss, Request


class BlockPool:
    """The blocks of the KV cache; block b has the slots b * block_size .. (b + 1) * block_size - 1.

    A full block of committed text can be published under the hash of the text up to its end. Requests with
    the same prefix then own it together, and it outlives them until its memory is needed:

        free        no owner, no content         allocated first, the last released one first, as it is in
                                                 CPU caches
        untouched   free, never allocated        takes memory from its first allocation on
        kept        no owner, published          allocated oldest first
        owned       by one request, or by several if it is published

    Memory that was touched stays in use. So untouched blocks are allocated only while fewer than `max_kept`
    blocks are kept; the pool takes the memory of `max_kept` blocks besides those that were owned at once.

    A published block is never written: an owner writes after the prefix that it found, and publishes a block
    only when its text has continued past it, or ended. The last block of an ended text may have fewer tokens:
    others copy its rows, and never own it with them.

    Pinned blocks are evicted after all others until their time is over. They are at most half of all blocks;
    beyond that the oldest pin ends.
    """

    def __init__(self, num_blocks: int, block_size: int, max_kept: int | None = None) -> None:
        """`max_kept` None keeps as many blocks as are free."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._max_kept = num_blocks if max_kept is None else max_kept
        self._touched = 0  # blocks below this number were allocated before
        self._free: list[int] = []  # touched free blocks; the last is allocated next
        self._owners = [0] * num_blocks
        # Oldest first; the blocks of one text from its end.
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._hashes: dict[int, bytes] = {}  # hashes of published blocks
        self._published: dict[bytes, int] = {}
        self._index = PrefixIndex()
        # Hashes of evicted blocks, oldest first, at most as many as blocks.
        self._evicted: OrderedDict[bytes, None] = OrderedDict()
        self._pins: OrderedDict[int, float] = OrderedDict()  # block -> time until which it is pinned

    @property
    def num_free(self) -> int:
        """Number of blocks without an owner."""
        return self._untouched + len(self._free) + len(self._kept)

    def blocks_for(self, positions: int) -> int:
        """Return the number of blocks for `positions` cache positions."""
        return -(-positions // self.block_size)

    def extend(self, block_table: list[int], positions: int) -> bool:
        """Extend `block_table` in place to `positions`; returns False, unchanged, if too few are free."""
        missing = self.blocks_for(positions) - len(block_table)
        if missing > self.num_free:
            return False
        for _ in range(missing):
            block = self._take()
            self._owners[block] = 1
            block_table.append(block)
        return True

    def find(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the published blocks of the longest prefix of a text whose blocks have `hashes`."""
        found: list[int] = []
        for key in hashes:
            if (block := self._published.get(key)) is None:
                break
            found.append(block)
        return found

    def unowned(self, blocks: Sequence[int]) -> int:
        """Return the number of `blocks` without an owner, which `num_free` includes."""
        return sum(block in self._kept for block in blocks)

    def any_published(self, blocks: Sequence[int]) -> bool:
        """Return whether one of `blocks` is published, so that it may not be written."""
        return any(block in self._hashes for block in blocks)

    def share(self, block_table: list[int], blocks: Sequence[int]) -> None:
        """Add published `blocks` to an empty `block_table`, whose request becomes one of their owners."""
        ensure(not block_table, "a text is found at its beginning")
        for block in blocks:
            self._owners[block] += 1
            self._kept.pop(block, None)
        block_table.extend(blocks)

    def hold(self, held: list[int], block: int) -> None:
        """Keep a published block from eviction until `held`, to which it is added, is released."""
        self._owners[block] += 1
        self._kept.pop(block, None)
        held.append(block)

    def publish(self, block: int, key: bytes, before: bytes, token_ids: Sequence[int]) -> bool:
        """Publish an owned block of computed text; returns False if it or an equal block is already.

        `before` is the hash of the text before the block, and `token_ids` are the block's.
        """
        ensure(self._owners[block] > 0, f"block {block} has no owner")
        if key in self._published or block in self._hashes:
            return False
        self._published[key] = block
        self._hashes[block] = key
        self._evicted.pop(key, None)
        self._index.add(block, before, token_ids)
        return True

    def nearest(self, before: bytes, token_ids: Sequence[int]) -> Follower | None:
        """Return the published block behind the text with hash `before` that begins most like `token_ids`."""
        return self._index.nearest(before, token_ids)

    def was_evicted(self, keys: Sequence[bytes]) -> bool:
        """Return whether the first of `keys` is the hash of a block that was evicted, not long ago."""
        return bool(keys) and keys[0] in self._evicted

    def pin(self, block: int, until: float) -> None:
        """Pin a published block up to a time of `time.monotonic`."""
        self._pins[block] = max(until, self._pins.pop(block, until))
        if len(self._pins) > self.num_blocks // 2:
            self._pins.popitem(last=False)

    def release(self, block_table: list[int]) -> None:
        """Release all blocks of `block_table` and clear it; published blocks are kept for reuse."""
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

    def _take(self) -> int:
        """Allocate a block; at least one must be without an owner."""
        if self._free:
            return self._free.pop()
        if self._untouched and (len(self._kept) < self._max_kept or not self._kept):
            self._touched += 1
            return self._touched - 1
        return self._evict()

    def _evict(self) -> int:
        """Take the oldest kept block."""
        block = self._oldest()
        key = self._hashes.pop(block)
        del self._published[key]
        self._index.drop(block)
        self._pins.pop(block, None)
        self._evicted[key] = None
        if len(self._evicted) > self.num_blocks:
            self._evicted.popitem(last=False)
        return block

    def _oldest(self) -> int:
        """Remove the oldest kept block that is not pinned, or the oldest of all, and return it."""
        now = time.monotonic()
        for _ in range(len(self._kept)):
            block = next(iter(self._kept))
            if self._pins.get(block, now) <= now:
                break
            self._kept.move_to_end(block)
        return self._kept.popitem(last=False)[0]

    def check_integrity(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Raise IntegrityError unless every block is free, kept, or in one table per owner."""
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
        ensure(self._index.blocks == {*self._hashes}, "the index has the published blocks")


@dataclass(slots=True, eq=False)
class SequenceState:
    """Scheduling state of an admitted request.

        0 ............ computed ......... len(token_ids)
        KV in cache    to be computed

    A running sequence after its prefill has exactly one token to compute, the last one, which is the root of
    its next tree.
    """

    request: Request
    token_ids: Sequence[int]  # prompt and output; the transcript owns the list and appends to it
    tree_nodes: int = 1 << 30  # maximum nodes of its trees, the root included
    speculators: tuple[str, ...] | None = None  # names of the speculators that may run; None: all
    processors: Processors | None = None  # logit processors of its parameters
    computed: int = 0
    block_table: list[int] = field(default_factory=list)
    generation: int = 0
    block_hashes: list[bytes] = field(default_factory=list)  # hashes of the full blocks of token_ids
    published: int = 0  # number of leading blocks that are published
    lookup: Lookup | None = None  # the prompt store's
    cached_tokens: int = 0  # prompt tokens found in the cache at its first start
    miss: PrefixMiss | None = None  # why the rest of its text was not found then
    states: TextStates | None = None  # slots of a running request, if a model has recurrent states

    @property
    def num_output(self) -> int:
        """Number of committed output tokens."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def uncomputed(self) -> int:
        """Number of tokens whose KV is not in the target's cache."""
        return len(self.token_ids) - self.computed

    def room(self, max_context: int) -> int:
        """Return the maximum number of further output tokens."""
        return min(self.request.params.max_tokens - self.num_output, max_context - len(self.token_ids))

    def hash_blocks(self, block_size: int) -> list[bytes]:
        """Return each full block's hash, which covers the salt, the adapter and all tokens up to its end."""
        for block in range(len(self.block_hashes), len(self.token_ids) // block_size):
            tokens = self.token_ids[block * block_size : (block + 1) * block_size]
            self.block_hashes.append(block_hash(self.hash_before(block), tokens))
        return self.block_hashes

    def hash_before(self, block: int) -> bytes:
        """Return the hash of the text before a block, all of whose blocks are hashed."""
        return self.block_hashes[block - 1] if block else _root(self.request)

    def check_integrity(self, block_size: int) -> None:
        """Raise IntegrityError if the computed KV does not fit the tokens or the blocks."""
        tokens, slots = len(self.token_ids), len(self.block_table) * block_size
        ensure(0 <= self.computed < tokens, f"of {tokens} tokens {self.computed} are computed")
        ensure(self.computed <= slots, f"{self.computed} computed tokens lie in {slots} slots")
        self.check_published(block_size)

    def check_published(self, block_size: int) -> None:
        """Raise IntegrityError if tokens to compute are in a published block."""
        if self.published * block_size > self.computed:
            raise IntegrityError(f"{self.published} blocks are published, {self.computed} tokens computed")


def block_hash(before: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the hash of a text that goes on with `token_ids` after one with the hash `before`."""
    return blake2b(before + array("q", token_ids).tobytes(), digest_size=32).digest()


def _root(request: Request) -> bytes:
    """Return the hash root, which depends on `cache_salt` and the adapter; each may be absent."""
    salt = request.params.cache_salt
    # A salt may have half of a surrogate pair, which JSON can express and UTF-8 cannot.
    salted = b"" if salt is None else b"salt " + salt.encode(errors="surrogatepass")
    root = blake2b(salted, digest_size=32).digest()
    if request.adapter is None:
        return root
    named = b" adapter " + request.adapter.encode(errors="surrogatepass")
    return blake2b(root + named, digest_size=32).digest()
