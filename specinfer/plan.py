"""StepPlan: the requests of one step, with their tokens, node budgets and KV blocks.

Every step is a batch of token trees. A request's tokens and its tree occupy consecutive *cache positions*;
position i has slot `block_table[i // block_size] * block_size + i % block_size` in every KV cache, the
target's and each draft model's.

    position   0 ............. start ............ end-1 | end .............. end - 1 + max_nodes - 1
               KV valid        computed this step  root | the other tree nodes, node i at end - 1 + i

An entry with `max_nodes == 0` is a chunk of a prefill: it computes KV and yields no token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from specinfer.processors.pipeline import Processors
from specinfer.request import Request


class StateCounts(NamedTuple):
    """Numbers of slots of a cache of states; checkpoints follow the slots of requests."""

    slots: int = 1  # of running requests
    checkpoints: int = 0
    nodes: int = 64  # maximum nodes of a tree, whose inputs are kept until one pass later


@dataclass(frozen=True, slots=True)
class StateCheckpoint:
    """A slot with the recurrent states of a text."""

    slot: int
    end: int  # tokens of the text, at the end of a block
    key: bytes = b""  # the hash of its last block


@dataclass(frozen=True, slots=True)
class StateUse:
    """The slots of recurrent states that a request uses in a step, in the target and in each draft model."""

    slot: int  # the request's own
    source: StateCheckpoint | None = None  # the states that its text began with; None: it began at position 0
    saves: tuple[StateCheckpoint, ...] = ()  # checkpoints to be written when the text reaches their ends


FIRST_SLOT: Final = StateUse(0)  # a lone text's; models without recurrent states read none


class RowCopy(NamedTuple):
    """Leading rows of a published block that a new text begins its own block with."""

    source: int
    target: int
    rows: int


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One request's part of a step; immutable."""

    request: Request
    token_ids: Sequence[int]  # prompt and output; the list may grow, tokens before `end` do not change
    start: int  # number of tokens whose KV the target's cache holds
    end: int  # this step computes token_ids[start:end]
    max_nodes: int  # maximum tree nodes, the root included; 0: a prefill chunk without a tree
    max_depth: int  # maximum levels below the root, within max_tokens and the context
    block_table: Sequence[int]  # blocks for at least end - 1 + max(max_nodes, 1) positions
    generation: int  # incremented by each preemption, which invalidates the KV of earlier numbers
    processors: Processors | None = None  # logit processors of the request's parameters
    speculators: tuple[str, ...] | None = None  # names of the speculators that may run; None: all
    block_hashes: Sequence[bytes] = ()  # hashes of the leading full blocks; equal hashes mean equal KV
    room: int = 1  # maximum tokens that the text may still gain
    states: StateUse = FIRST_SLOT

    @property
    def has_tree(self) -> bool:
        """True if this entry has a tree, and so yields tokens."""
        return self.max_nodes > 0

    @property
    def ends_with_prompt(self) -> bool:
        """True if the request ends with this step: its prompt is computed, and max_tokens is 0."""
        return self.room == 0 and self.end == len(self.token_ids)

    def lets_guess(self, speculator: str) -> bool:
        """Return whether the speculator of this name may guess for the request."""
        return self.speculators is None or speculator in self.speculators

    @property
    def active_processors(self) -> Processors | None:
        """The processors if they may change a row of logits in this step, else None."""
        return None if self.processors is None or self.processors.idle else self.processors


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: the input of the speculators and of the executor; immutable."""

    entries: tuple[PlanEntry, ...]
    copies: tuple[RowCopy, ...] = ()  # rows that the target's cache copies before all passes
    tree_entries: tuple[PlanEntry, ...] = field(init=False)  # the entries with a tree, in plan order

    def __post_init__(self) -> None:
        # Computed once: every speculator reads it, some for each request.
        object.__setattr__(self, "tree_entries", tuple([e for e in self.entries if e.max_nodes > 0]))
