"""The step plan: who runs this step, on which tokens, with which budget and blocks; it never changes.

The one idea: every step is a batch of token trees. A request's tokens and its tree occupy one run of
*cache positions*; position i lives in slot `block_table[i // block_size] * block_size + i % block_size`
of every KV cache there is, the target's and each draft model's alike.

    position   0 ............. start ............ end-1 | end .............. end - 1 + max_nodes - 1
               KV valid        computed this step  root | the other tree nodes, node i at end - 1 + i

An entry with `max_nodes == 0` is an earlier chunk of a prefill: it computes KV and yields no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specinfer.processors.pipeline import Processors
from specinfer.request import Request


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One request's share of a step."""

    request: Request
    token_ids: Sequence[int]  # prompt and output; only grows: what stands before `end` never changes
    start: int  # tokens whose KV the target's cache holds
    end: int  # this step computes token_ids[start:end]
    max_nodes: int  # tree nodes allowed, the root included; 0: a prefill chunk without a tree
    max_depth: int  # levels below the root worth guessing: what max_tokens and the context leave
    block_table: Sequence[int]  # enough blocks for end - 1 + max(max_nodes, 1) positions
    incarnation: int  # grows at each preemption: KV written under another number is gone
    processors: Processors | None = None  # what the request's parameters make of logits; None: nothing
    speculators: tuple[str, ...] | None = None  # those that may guess for it; None: all
    block_hashes: Sequence[bytes] = ()  # of full blocks of text, from the first on: equal ones hold equal KV
    room: int = 1  # tokens that may still be added to the text

    @property
    def has_tree(self) -> bool:
        """Whether this entry ends in a tree, and so yields tokens."""
        return self.max_nodes > 0

    @property
    def ends_with_prompt(self) -> bool:
        """Whether the request ends with this step: its prompt is computed, and it wants no token."""
        return self.room == 0 and self.end == len(self.token_ids)

    def lets_guess(self, speculator: str) -> bool:
        """Whether the speculator of this name may guess for it."""
        return self.speculators is None or speculator in self.speculators

    @property
    def active_processors(self) -> Processors | None:
        """The processors, where they may change a row of logits in this step."""
        return None if self.processors is None or self.processors.idle else self.processors


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything the speculators and the runner need to know about one step."""

    entries: tuple[PlanEntry, ...]
    tree_entries: tuple[PlanEntry, ...] = field(init=False)  # those that end in a tree, in plan order

    def __post_init__(self) -> None:
        # Once: everybody asks, some of them for each request.
        object.__setattr__(self, "tree_entries", tuple([e for e in self.entries if e.max_nodes > 0]))
