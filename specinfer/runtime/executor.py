"""Executor: runs the target's passes for an engine.

The engine does not depend on devices, or on the number of processes that share a model. A device may still
compute when `launch` returns: reading a flight waits for it. docs/contracts.md has the guarantees.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from specinfer.models.adapters.adapter_cache import AdapterCache
from specinfer.models.config import ModelConfig
from specinfer.models.language_model import LanguageModel
from specinfer.plan import StateCounts, StepPlan
from specinfer.runtime.batch import likelihoods, step_rows
from specinfer.runtime.cost_curve import TimedModel
from specinfer.runtime.flight import Flight
from specinfer.runtime.kv_cache import bytes_per_block, cache_budget, free_bytes, gib, num_blocks
from specinfer.runtime.runner import ModelRunner, Move
from specinfer.runtime.state_cache import ONE_TEXT, state_bytes, state_counts
from specinfer.tree import TokenTree


@dataclass(slots=True)
class Host:
    """A host that runs ranks of the target."""

    address: str
    parts: Sequence[ModelConfig]  # parts of its ranks, except rank 0's
    free: int = 0  # free bytes with all weights and executors' caches in memory

    def add_free(self, size: int) -> None:
        """Add `size` bytes to the free memory."""
        self.free += size


class Executor:
    """Executor of one process: models and their caches, on one device."""

    def __init__(
        self,
        target: LanguageModel,
        *,
        num_blocks: int,
        block_size: int,
        adapters: AdapterCache | None = None,
        states: StateCounts = ONE_TEXT,
    ) -> None:
        """Make the target's caches; every draft's have the same sizes. `adapters` are the target's."""
        self._closed = False
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.states = states
        self.target = ModelRunner(
            target, num_blocks=num_blocks, block_size=block_size, adapters=adapters, states=states
        )

    @classmethod
    def within_memory(
        cls,
        target: LanguageModel,
        drafts: Iterable[TimedModel],
        *,
        block_size: int,
        wanted_positions: int,
        kept_blocks: int = 0,
        needed_positions: int,
        text_positions: int = 0,
        limit: int | None,
        planned: int | None = None,
        memory: int | None = None,
        hosts: Sequence[Host] = (),
        adapters: AdapterCache | None = None,
        states: StateCounts = ONE_TEXT,
    ) -> Executor:
        """Return an executor whose caches, of the target and of these drafts, fit into memory.

        See `kv_cache.num_blocks`, and `state_counts` for `states` and the longest text's `text_positions`.
        Other ranks have caches of the same sizes. The first of `hosts` is this one. Each host has a part of
        `limit`, or its own memory; the caches of other hosts reduce their free memory until the executor is
        released. Without `limit`, the caches take at most the `planned` bytes of a memory plan, or the free
        memory if that is less. Raises CapacityError if not even `needed_positions` fit.
        """
        models = [(model.config, model.kernels.kv_dtype(model.dtype)) for model in (target, *drafts)]
        here, *others = hosts or [Host("", ())]
        missing, where = 0 if adapters is None else adapters.missing_bytes(), str(target.device)
        if missing:
            where += f" (beside {gib(missing)} for adapters, see max_loras)"
        free = max(0, free_bytes(target.device, memory) - missing)
        if limit is None and planned is not None:
            limit = min(planned, free)

        def of_ranks(host: Host) -> list[tuple[ModelConfig, torch.dtype]]:
            return [(part, target.kernels.kv_dtype(target.dtype)) for part in host.parts]

        places = [([*models, *of_ranks(here)], free, where)]
        places += [(of_ranks(host), host.free, host.address) for host in others]
        for found, there, name in places:
            text = bytes_per_block(found, text_positions)
            states = state_counts(found, states, cache_budget(limit, there, name), name, text)
        blocks = [
            num_blocks(
                found,
                block_size=block_size,
                wanted_positions=wanted_positions,
                kept_blocks=kept_blocks,
                needed_positions=needed_positions,
                limit=limit,
                free=there,
                where=name,
                states=state_bytes(found, states),
            )
            for found, there, name in places
        ]
        executor = cls(
            target, num_blocks=min(blocks), block_size=block_size, adapters=adapters, states=states
        )
        for host, (found, *_) in zip(others, places[1:], strict=True):
            size = executor.num_blocks * bytes_per_block(found, block_size) + state_bytes(found, states)
            host.add_free(-size)
            weakref.finalize(executor, host.add_free, size)
        return executor

    @property
    def positions(self) -> int:
        """Number of cache positions of each model."""
        return self.num_blocks * self.block_size

    def launch(self, plan: StepPlan, trees: Sequence[TokenTree], taps: Sequence[int] = ()) -> Flight:
        """Run the target's pass over the plan's texts and their trees, one for each of `plan.tree_entries`.

        The pass writes K and V of the rows of `runtime.batch.step_rows`. `logit_rows` has the numbering of
        the flight's rows with logits. `taps` are layers whose inputs the flight keeps.
        """
        return self.target.launch(
            step_rows(plan, trees),
            likelihoods=partial(likelihoods, plan, trees),
            taps=taps,
            stopped=lambda: self._closed,
        )

    def close(self) -> None:
        """Refuse further passes: a pass that waits for weights, and each later one, raises StoppedError.

        Callable from any thread, also during a pass; one whose weights are in memory completes.
        """
        self._closed = True

    def move(self, moves: Sequence[Move]) -> None:
        """Move accepted nodes' K and V to their texts, after a pass and before the next one."""
        self.target.move(moves)
