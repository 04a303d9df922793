"""Executor: runs the target's passes for an engine.

The engine depends only on the protocol. It does not depend on devices, or on the number of processes that
share a model. A pass may be unfinished when `launch` returns: reading a flight waits for the pass.
docs/contracts.md has the requirements of an implementation.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specinfer.kernels.low_rank import AdaptedRows, Span
from specinfer.models.adapters.adapter_shelf import AdapterShelf
from specinfer.models.config import ModelConfig
from specinfer.models.language_model import LanguageModel, PassContext, Read
from specinfer.models.stream import StoppedError, WeightStream
from specinfer.plan import StepPlan
from specinfer.progress import Progress
from specinfer.runtime.batch import Rows, build_batch, chain_rows, likelihoods, slots_of, step_rows
from specinfer.runtime.cost_curve import CostCurve, Timed, TimedModel, cost_curve, device_name
from specinfer.runtime.flight import BLOCK_ROWS, Flight, HostFlight, Launch, inference, rows_at_once
from specinfer.runtime.kv_cache import KvCache, bytes_per_block, free_bytes, num_blocks
from specinfer.runtime.sharded import Leader
from specinfer.runtime.stages import StagedPasses, StagePart
from specinfer.tree import TokenTree

_SPREAD: Final = 2654435761  # odd, and near 2 ** 32 over the golden ratio, so its multiples are spread evenly


class Executor(Protocol):
    """Runs the target's passes over cache slots that the scheduler assigns, for one thread at a time."""

    def launch(self, plan: StepPlan, trees: Sequence[TokenTree], taps: Sequence[int] = ()) -> Launch:
        """Start the target's pass over the plan's texts and their trees, one for each of `plan.tree_entries`.

        The pass writes K and V of the rows of `runtime.batch.step_rows`. `logit_rows` has the numbering of
        the flight's rows with logits. `taps` are layers whose inputs the flight keeps.
        """
        ...

    def drop(self, launch: Launch) -> None:
        """End a pass whose flight is not needed; returns when the pass has ended."""
        ...

    def close(self) -> None:
        """Refuse further passes: a pass that waits for weights, and each later one, raises StoppedError.

        Callable from any thread, also during a pass.
        """
        ...

    @property
    def stream(self) -> WeightStream | None:
        """The stream of the target's weights, or None if they are in memory."""
        ...

    @property
    def rank_seconds(self) -> Mapping[str, float]:
        """Return the seconds of the target's ranks by activity, such as "0 computing" and "1 waiting"."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Move accepted nodes' K and V to their texts, after all launched passes and before the next one."""
        ...


@dataclass(slots=True)
class Host:
    """A host that runs ranks of the target."""

    address: str
    parts: Sequence[ModelConfig]  # parts of its ranks, except rank 0's
    free: int = 0  # free bytes with all weights and executors' caches in memory

    def add_free(self, size: int) -> None:
        """Add `size` bytes to the free memory."""
        self.free += size


class LocalExecutor:
    """Executor of one process: models, their caches and their cost curves, on one device."""

    def __init__(
        self,
        target: LanguageModel,
        *,
        num_blocks: int,
        block_size: int,
        adapters: AdapterShelf | None = None,
    ) -> None:
        """Make the target's cache; every draft's has as many blocks. `adapters` are the target's.

        Passes with streamed weights run in a separate thread, so that an interrupt does not wait for the
        disk.
        """
        streams = target.stream is not None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pass") if streams else None
        self._closed = False
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.target = ModelRunner(target, num_blocks=num_blocks, block_size=block_size, adapters=adapters)

    @classmethod
    def within_memory(
        cls,
        target: LanguageModel,
        drafts: Iterable[TimedModel],
        *,
        block_size: int,
        wanted_positions: int,
        needed_positions: int,
        limit: int | None,
        memory: int | None = None,
        hosts: Sequence[Host] = (),
        adapters: AdapterShelf | None = None,
    ) -> LocalExecutor:
        """Return an executor whose caches, of the target and of these drafts, fit into memory.

        See `kv_cache.num_blocks`. Other ranks have caches of as many blocks. The first of `hosts` is this
        one. Each host has a part of `limit`, or its own memory; the caches of other hosts reduce their free
        memory until the executor is released. Raises CapacityError if not even `needed_positions` fit.
        """
        models = [(model.config, model.dtype) for model in (target, *drafts)]
        here, *others = hosts or [Host("", ())]
        fit = partial(
            num_blocks,
            block_size=block_size,
            wanted_positions=wanted_positions,
            needed_positions=needed_positions,
            limit=limit,
        )
        found = [
            fit(
                [*models, *((part, target.dtype) for part in here.parts)],
                free=free_bytes(target.device, memory) - (0 if adapters is None else adapters.missing_bytes),
                where=str(target.device),
            )
        ]
        for host in others:
            parts = [(part, target.dtype) for part in host.parts]
            found.append(fit(parts, free=host.free, where=host.address))
        executor = cls(target, num_blocks=min(found), block_size=block_size, adapters=adapters)
        for host in others:
            size = executor.num_blocks * bytes_per_block(
                [(part, target.dtype) for part in host.parts], block_size
            )
            host.add_free(-size)
            weakref.finalize(executor, host.add_free, size)
        return executor

    @property
    def device_name(self) -> str:
        """Name of the computing device."""
        return device_name(self.target.model.device)

    @property
    def positions(self) -> int:
        """Number of cache positions of each model."""
        return self.num_blocks * self.block_size

    def launch(self, plan: StepPlan, trees: Sequence[TokenTree], taps: Sequence[int] = ()) -> Launch:
        """See Executor; the pass has ended when this returns, except with streamed weights."""
        run = partial(
            self.target.launch,
            step_rows(plan, trees),
            likelihoods=partial(likelihoods, plan, trees),
            taps=taps,
        )
        if self._thread is None:
            return Launch(run())
        stopped = Event()
        try:
            flight = self._thread.submit(run, stopped=lambda: self._closed or stopped.is_set())
        except RuntimeError:  # another thread has closed it
            if self._closed:
                raise StoppedError("the model was closed") from None
            raise
        return Launch(flight, stopped)

    def drop(self, launch: Launch) -> None:
        """See Executor; waits for a computing layer, not for one that is being read."""
        launch.stop()

    def close(self) -> None:
        """See Executor; a pass whose weights are in memory completes."""
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def move(self, moves: Sequence[Move]) -> None:
        """See Executor."""
        self.target.move(moves)

    @property
    def stream(self) -> WeightStream | None:
        """See Executor."""
        return self.target.model.stream

    @property
    def rank_seconds(self) -> Mapping[str, float]:
        """See Executor; variants share the target's numbers."""
        group = self.target.model.group
        return {} if group is None else group.times.by_rank

    def runner(self, model: LanguageModel) -> ModelRunner:
        """Return a runner of a model with its own cache, whose blocks correspond to the target's."""
        return ModelRunner(model, num_blocks=self.num_blocks, block_size=self.block_size)

    def curve(
        self,
        variant: str,
        *,
        max_rows: int,
        keep: bool,
        draft: Timed | None = None,
        behind_target: bool = False,
        progress: Progress | None = None,
    ) -> CostCurve:
        """Return the cost curve of the target or of a draft, measured now or read (runtime/cost_curve.py).

        Overwrites the first slots of the caches, which must be unused.

        Args:
            variant: part of the curve's key: quantization and the kind of output layer.
            max_rows: rows of the largest pass, as far as caches and contexts have room.
            keep: True to cache also a curve that takes little time to measure.
            draft: the draft to measure instead of the target; its passes make the logits of all rows.
            behind_target: True if each of its passes follows one of the target's, as in a step.
            progress: shows a bar.
        """
        runner: Timed = self.target if draft is None else draft
        return cost_curve(
            runner,
            max_rows=min(max_rows, self.positions, runner.model.config.max_context),
            variant=variant,
            every_row=draft is not None,
            keep=keep,
            behind=self.target if behind_target else None,
            progress=progress,
        )


@dataclass(frozen=True, slots=True)
class Move:
    """Copy of K and V from some cache positions of a request to others."""

    block_table: Sequence[int]
    sources: Sequence[int]
    targets: Sequence[int]


class ModelRunner:
    """Runs forward passes of one model over the slots of its own KV cache.

    If several ranks share the model, rank 0's runner makes the others run the same over their caches.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        num_blocks: int,
        block_size: int,
        adapters: AdapterShelf | None = None,
    ) -> None:
        self.model = model
        self._adapters = adapters
        self.block_size = block_size
        self.cache = KvCache.of(model.config, num_blocks * block_size, model.dtype, model.device)
        self._attention = model.kernels.attention.over(self.cache.keys, self.cache.values)
        self._leader: Leader | None = None
        self._passes = None if model.group is None else StagedPasses(model.group, model)
        if self._passes is not None and self._passes.group.rank == 0:
            self._leader = Leader(self._passes, blocks=num_blocks, block_size=block_size)

    @property
    def max_context(self) -> int:
        """Maximum tokens of a text for the model."""
        return self.model.config.max_context

    @inference
    def launch(
        self,
        rows: Sequence[Rows],
        *,
        likelihoods: Callable[[], Sequence[float]] | None = None,
        taps: Sequence[int] = (),
        stopped: Callable[[], bool] | None = None,
    ) -> Flight:
        """Run a pass over `rows`, which writes their K and V; the flight has the rows with logits, in order.

        Args:
            rows: the rows of each request.
            likelihoods: the probability that each row with logits is read; None: all are.
            taps: layers whose inputs the flight keeps (`LanguageModel.read`).
            stopped: a pass with streamed weights calls it before each layer, and raises StoppedError if true.
        """
        model = self.model
        vocab = model.config.vocab_size
        read = self._run(rows, taps, max_logits=rows_at_once(vocab, model.dtype), stopped=stopped)
        return HostFlight(
            read.hidden_RD,
            self._head,
            vocab,
            model.kernels.scan,
            likelihoods=likelihoods,
            taps=None if read.tapped_TND is None else (taps, read.tapped_TND),
            logits_RV=read.logits_RV,
        )

    def probe(self, rows: int, *, every_row: bool) -> None:
        """Run one pass like a step's, for timing: from lists to logits in host memory.

        Overwrites the cache's first slots. Makes the logits of all rows, or those of the likeliest.
        """
        part = probe_rows(rows, self.block_size, self.model.config.vocab_size)
        self.launch([part], likelihoods=None if every_row else lambda: [1.0] * rows).row(0)

    @inference
    def forward(self, rows: Sequence[Rows]) -> Tensor:
        """Run a pass over `rows`, which writes their K and V; returns the requested logits, [R, vocab]."""
        return self._head(self._run(rows).hidden_RD)

    @inference
    def follow(
        self, rows: Sequence[Rows], taps: Sequence[int], *, logits: bool = False, more: bool = False
    ) -> Read | None:
        """Run this rank's part of a pass over `rows`, as rank 0 does, and keep its own `taps`.

        With `logits` it also makes the logits of its part of the vocabulary, if it has one. Returns None
        while the pass has `more` rows.
        """
        stage, passes = self.model.config.stage, self._passes
        assert passes is not None, "a follower has a group"
        own = stage.taps(taps) if passes.group.place == 0 else ()
        read = passes.run(self._part(rows, own, BLOCK_ROWS if logits else 0), more=more)
        if more:
            return None
        if not logits or not stage.begins:
            return read._replace(logits_RV=None)
        made = self.model.logits(read.hidden_RD) if read.logits_RV is None else read.logits_RV
        return read._replace(logits_RV=made)

    @property
    def _head(self) -> Callable[[Tensor], Tensor]:
        """Return the function from rows to all logits, [R, D] -> [R, vocab]."""
        return self.model.logits if self._leader is None else self._leader.logits

    def _run(
        self,
        rows: Sequence[Rows],
        taps: Sequence[int] = (),
        *,
        max_logits: int = 0,
        stopped: Callable[[], bool] | None = None,
    ) -> Read:
        """Run a pass over these rows; returns the hidden states of rows with logits; see LanguageModel."""
        if self._leader is not None:
            part_of = partial(self._part, max_logits=max_logits)
            return self._leader.read(rows, part_of, taps, max_logits=max_logits)
        part, stream = self._part(rows, taps, max_logits), self.model.stream
        if stream is None:
            return part.read(None)
        with stream.passing(stopped):
            return part.read(None)

    def _part(self, rows: Sequence[Rows], taps: Sequence[int], max_logits: int) -> StagePart:
        """Return these rows as a part for this process's layers."""
        model = self.model
        batch = build_batch(rows, block_size=self.block_size, device=model.device)
        ids, chosen, adapted = batch.token_ids_T, batch.logit_rows, None
        if batch.adapted:
            assert self._adapters is not None, "requests have adapters that were named"
            adapted = self._adapters.rows(batch.adapted, len(ids))
        elif model.adapter is not None and len(ids):
            span = Span(range(len(ids)), model.adapter)
            adapted = AdaptedRows.of([span], len(ids), model.kernels.products.library)
        context = PassContext(batch.positions_T, self._attention.bind(batch.paths), taps, adapted)

        def read(given_TD: Tensor | None) -> Read:
            return model.read(ids, context, chosen, max_logits=max_logits, given_TD=given_TD)

        return StagePart(rows, len(ids), len(ids if chosen is None else chosen), read)

    @inference
    def move(self, moves: Sequence[Move]) -> None:
        """Copy the K and V of accepted nodes to their positions in the text."""
        sources: list[int] = []
        targets: list[int] = []
        for move in moves:
            sources.extend(slots_of(move.block_table, move.sources, self.block_size))
            targets.extend(slots_of(move.block_table, move.targets, self.block_size))
        if self._leader is not None:
            self._leader.move(sources, targets)
        self.cache.move(sources, targets)


def probe_rows(rows: int, block_size: int, vocab: int) -> Rows:
    """Return rows of a text in the cache's first blocks, all of them with logits.

    The tokens differ, as equal tokens would use the same experts of a mixture.
    """
    tokens = [(number * _SPREAD >> 8) % vocab for number in range(rows)]
    return replace(chain_rows(tokens, 0, range(-(-rows // block_size)), logits=True), logits_from=0)


def as_rows(logits: Tensor) -> NDArray[np.float32]:
    """Return all rows of logits as float32 in host memory, [R, vocab]."""
    rows: NDArray[np.float32] = logits.float().cpu().numpy()
    return rows
