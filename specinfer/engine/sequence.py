"""The scheduler's view of one request: its blocks, and how much of its KV is computed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from specinfer.errors import IntegrityError, ensure
from specinfer.processors.pipeline import Processors
from specinfer.request import Request


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
        """The hash of every full block of the text: of the cache salt and all tokens up to its end."""
        for block in range(len(self.block_hashes), len(self.token_ids) // block_size):
            before = self.block_hashes[-1] if self.block_hashes else _root(self.request.params.cache_salt)
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


def _root(salt: str | None) -> bytes:
    """What the first block's hash hangs from; no salt is a salt of its own."""
    # Any string is a salt, also one with half a character, which JSON can write and UTF-8 cannot.
    salted = b"" if salt is None else b"salt " + salt.encode(errors="surrogatepass")
    return blake2b(salted, digest_size=32).digest()
