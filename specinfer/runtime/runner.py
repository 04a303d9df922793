"""One model with its KV cache: rows in, a flight out, which is asked for answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specinfer.models.language_model import LanguageModel, PassContext, Read
from specinfer.runtime.batch import Rows, build_batch, chain_rows, slots_of
from specinfer.runtime.flight import Flight, HostFlight, rows_at_once
from specinfer.runtime.inference import inference
from specinfer.runtime.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class Move:
    """Cache positions of one request whose K and V become those of other positions: a commit."""

    block_table: Sequence[int]
    sources: Sequence[int]
    targets: Sequence[int]


class ModelRunner:
    """Runs forward passes of one model over the slots of its own KV cache."""

    def __init__(self, model: LanguageModel, *, num_blocks: int, block_size: int) -> None:
        self.model = model
        self.block_size = block_size
        self.cache = KvCache.of(model.config, num_blocks * block_size, model.dtype, model.device)
        self._attention = model.kernels.attention.over(self.cache.keys, self.cache.values)

    @property
    def max_context(self) -> int:
        """Tokens of the longest text the model can read."""
        return self.model.config.max_context

    @inference
    def launch(
        self,
        rows: Sequence[Rows],
        *,
        likelihoods: Callable[[], Sequence[float]] | None = None,
        taps: Sequence[int] = (),
    ) -> Flight:
        """Write K and V of `rows`; the flight is asked about those that want logits, in order.

        `likelihoods` says of each of these how likely it is asked for (None: all will be), and `taps` names
        the layers whose inputs the flight keeps (`LanguageModel.read`).
        """
        model = self.model
        vocab = model.config.vocab_size
        read = self._run(rows, taps, most_logits=rows_at_once(vocab, model.dtype))
        return HostFlight(
            read.hidden_RD,
            model.logits,
            vocab,
            model.kernels.scan,
            likelihoods=likelihoods,
            taps=None if read.tapped_TND is None else (taps, read.tapped_TND),
            logits_RV=read.logits_RV,
        )

    def probe(self, rows: int, *, every_row: bool) -> None:
        """One pass as a step makes it, to be timed: from lists to logits in host memory.

        Writes into the cache's first slots. The logits of all rows are made, or those of the likeliest.
        """
        part = probe_rows(rows, self.block_size)
        self.launch([part], likelihoods=None if every_row else lambda: [1.0] * rows).row(0)

    @inference
    def forward(self, rows: Sequence[Rows]) -> Tensor:
        """Write K and V of `rows` and return all logits of those that want them, [R, vocab]."""
        return self.model.logits(self._run(rows).hidden_RD)

    def _run(self, rows: Sequence[Rows], taps: Sequence[int] = (), *, most_logits: int = 0) -> Read:
        """A pass over these rows, of which those that want logits are read; see LanguageModel."""
        model = self.model
        batch = build_batch(rows, block_size=self.block_size, device=model.device)
        context = PassContext(batch.positions_T, self._attention.bind(batch.paths), taps)
        return model.read(batch.token_ids_T, context, batch.logit_rows, most_logits=most_logits)

    @inference
    def move(self, moves: Sequence[Move]) -> None:
        """Make accepted nodes part of their sequences: copy their K and V to where the text has them."""
        sources: list[int] = []
        targets: list[int] = []
        for move in moves:
            sources.extend(slots_of(move.block_table, move.sources, self.block_size))
            targets.extend(slots_of(move.block_table, move.targets, self.block_size))
        self.cache.move(sources, targets)


def probe_rows(rows: int, block_size: int) -> Rows:
    """So many rows of a text in the cache's first blocks, any of which may be asked for its logits."""
    return replace(chain_rows([0] * rows, 0, range(-(-rows // block_size)), logits=True), logits_from=0)


def as_rows(logits: Tensor) -> NDArray[np.float32]:
    """All rows of logits as float32 in host memory, [R, vocab]."""
    rows: NDArray[np.float32] = logits.float().cpu().numpy()
    return rows
