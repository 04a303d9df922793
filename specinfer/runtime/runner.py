"""ModelRunner: runs the passes of one model over the slots of its own KV cache."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specinfer.kernels.low_rank import AdaptedRows, Span
from specinfer.models.adapters.adapter_cache import AdapterCache
from specinfer.models.language_model import LanguageModel, PassContext, PassOutput
from specinfer.plan import FIRST_SLOT, StateCounts, StateUse
from specinfer.runtime.batch import Rows, build_batch, chain_rows, slots_of
from specinfer.runtime.flight import BLOCK_ROWS, Flight, inference, rows_at_once
from specinfer.runtime.kv_cache import KvCache
from specinfer.runtime.sharded import Leader
from specinfer.runtime.stages import StagedPasses, StagePart
from specinfer.runtime.state_cache import ONE_TEXT, StateCache

_SPREAD: Final = 2654435761  # odd, and near 2 ** 32 over the golden ratio, so its multiples are spread evenly


@dataclass(frozen=True, slots=True)
class Move:
    """Copy of K and V, and of inputs of recurrences, from some cache positions of a request to others."""

    block_table: Sequence[int]
    sources: Sequence[int]
    targets: Sequence[int]
    states: StateUse = FIRST_SLOT  # the request's slots of recurrent states


class ModelRunner:
    """Runs forward passes of one model over the slots of its own KV cache, and of its recurrent states.

    If several ranks share the model, rank 0's runner makes the others run the same over their caches.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        num_blocks: int,
        block_size: int,
        adapters: AdapterCache | None = None,
        states: StateCounts = ONE_TEXT,
        shortlist: int | None = None,
    ) -> None:
        """A pass of a draft may make the logits of its first `shortlist` tokens instead of all."""
        self.model = model
        few = None if shortlist is None else model.first_logits(shortlist)
        self.shortlist = None if few is None else shortlist  # None: it makes all
        self._few = few
        self._adapters = adapters
        self.block_size = block_size
        kind = model.kernels.kv_dtype(model.dtype)
        self.cache = KvCache(model.config, num_blocks * block_size, kind, model.device)
        self._attention = model.kernels.attention.over(self.cache.keys, self.cache.values, self.cache.scales)
        self.states: StateCache | None = None
        if model.config.recurrence is not None:
            self.states = StateCache(model.config, states, model.device)
        self._leader: Leader | None = None
        self._passes = None if model.group is None else StagedPasses(model.group, model)
        if self._passes is not None and self._passes.group.rank == 0:
            self._leader = Leader(self._passes, blocks=num_blocks, block_size=block_size, states=states)

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
        few: bool = False,
    ) -> Flight:
        """Run a pass over `rows`, which writes their K and V; the flight has the rows with logits, in order.

        Args:
            rows: the rows of each request.
            likelihoods: the probability that each row with logits is read; None: all are.
            taps: layers whose inputs the flight keeps (`LanguageModel.read`).
            stopped: a pass with streamed weights calls it before each layer, and raises StoppedError if true.
            few: make the logits of the shortlist alone, if there is one.
        """
        model = self.model
        head, vocab, max_logits = self._head, model.config.vocab_size, 0
        if few and self._few is not None and self.shortlist is not None:
            head, vocab = self._few, self.shortlist
        else:
            max_logits = rows_at_once(vocab, model.dtype)
        read = self._run(rows, taps, max_logits=max_logits, stopped=stopped)
        return Flight(
            read.hidden_RD,
            head,
            vocab,
            model.kernels.scan,
            likelihoods=likelihoods,
            taps=None if read.tapped_TND is None else (taps, read.tapped_TND),
            logits_RV=read.logits_RV,
        )

    def probe(self, rows: int, *, every_row: bool) -> None:
        """Run one pass like a step's, for timing: from lists to logits in host memory.

        Overwrites the caches' first slots. Makes the logits of all rows, or those of the likeliest.
        """
        part = probe_rows(rows, self.block_size, self.model.config.vocab_size)
        self.launch([part], likelihoods=None if every_row else lambda: [1.0] * rows, few=True).row(0)

    @inference
    def forward(self, rows: Sequence[Rows]) -> Tensor:
        """Run a pass over `rows`, which writes their K and V; returns the requested logits, [R, vocab]."""
        return self._head(self._run(rows).hidden_RD)

    @inference
    def follow(
        self, rows: Sequence[Rows], taps: Sequence[int], *, logits: bool = False, more: bool = False
    ) -> PassOutput | None:
        """Run this rank's part of a pass over `rows`, as rank 0 does, and keep its own `taps`.

        With `logits` it also makes the logits of its part of the vocabulary, if it has one. Returns None
        while the pass has `more` rows.
        """
        stage, passes = self.model.config.stage, self._passes
        assert passes is not None, "a follower has a group"
        own = stage.taps(taps) if passes.group.place == 0 else ()
        self._begin()
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
    ) -> PassOutput:
        """Run a pass over these rows; returns the hidden states of rows with logits; see LanguageModel."""
        self._begin()
        if self._leader is not None:
            part_of = partial(self._part, max_logits=max_logits)
            return self._leader.read(rows, part_of, taps, max_logits=max_logits)
        part, stream = self._part(rows, taps, max_logits), self.model.stream
        if stream is None:
            return part.read(None)
        with stream.passing(stopped):
            return part.read(None)

    def _begin(self) -> None:
        if self.states is not None:
            self.states.begin()

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
        states, running = (None, nullcontext()) if self.states is None else self.states.plan(rows)
        context = PassContext(
            *(batch.positions_T, self._attention.bind(batch.paths), taps, adapted), states=states
        )

        def read(stage_input_TD: Tensor | None) -> PassOutput:
            with running:
                return model.read(ids, context, chosen, max_logits=max_logits, stage_input_TD=stage_input_TD)

        return StagePart(rows, len(ids), len(ids if chosen is None else chosen), read)

    @inference
    def move(self, moves: Sequence[Move]) -> None:
        """Copy the K and V of accepted nodes, and inputs of recurrences, to their places in the text."""
        slots: tuple[list[int], list[int]] = [], []  # sources, and targets
        nodes: tuple[list[int], list[int]] = [], []
        for move in moves:
            for at, positions in enumerate((move.sources, move.targets)):
                slots[at].extend(slots_of(move.block_table, positions, self.block_size))
                if self.states is not None:
                    nodes[at].extend(self.states.places(move.states.slot, positions))
        if self._leader is not None:
            self._leader.move(*slots, *nodes)
        self.copy(*slots, *nodes)

    def copy(self, sources: Sequence[int], targets: Sequence[int], *nodes: Sequence[int]) -> None:
        """Copy the K and V of slots, and the inputs of nodes between places of the rings, on this rank."""
        self.cache.move(sources, targets)
        if self.states is not None:
            self.states.move(*nodes)


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
