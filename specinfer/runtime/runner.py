"""One model with its KV cache: rows in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.attention.backend import AttentionBackend, AttentionBatch
from specinfer.models.decoder import LanguageModel
from specinfer.models.linear import packs
from specinfer.runtime.batch import PAD, Rows, build_batch, slots_of
from specinfer.runtime.kv_cache import KvCache


@dataclass(frozen=True, slots=True)
class Move:
    """Cache positions of one request whose K and V become those of other positions: a commit."""

    block_table: Sequence[int]
    sources: Sequence[int]
    targets: Sequence[int]


class ModelRunner:
    """Runs forward passes of one model over the slots of its own KV cache."""

    def __init__(
        self, model: LanguageModel, backend: AttentionBackend, *, num_blocks: int, block_size: int
    ) -> None:
        config = model.config
        self.model = model
        self._backend = backend
        self.block_size = block_size
        windows = {w for w in config.layer_windows if w is not None}
        assert len(windows) <= 1, f"one sliding window per model is supported, got {windows}"
        self._window = next(iter(windows), None)
        self.cache = KvCache(
            num_layers=config.num_layers,
            num_slots=num_blocks * block_size + PAD,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=model.dtype,
            device=model.device,
        )

    @torch.inference_mode()
    def forward(self, rows: Sequence[Rows]) -> Tensor:
        """Write K and V of `rows` and return the logits of the rows that want them, [R, vocab]."""
        model = self.model
        batch = build_batch(
            rows,
            block_size=self.block_size,
            window=self._window,
            dtype=model.dtype,
            device=model.device,
            by_paths=packs(model.dtype, model.device),  # where products keep rows independent, attention does
        )
        attend = _BoundAttention(self.cache, self._backend, batch.attention)
        return model.forward(batch.token_ids_T, batch.positions_T, attend, batch.logit_rows)[
            : batch.num_logits
        ]

    @torch.inference_mode()
    def move(self, moves: Sequence[Move]) -> None:
        """Make accepted nodes part of their sequences: copy their K and V to where the text has them."""
        sources: list[int] = []
        targets: list[int] = []
        for move in moves:
            sources.extend(slots_of(move.block_table, move.sources, self.block_size))
            targets.extend(slots_of(move.block_table, move.targets, self.block_size))
        self.cache.move(sources, targets)


def as_rows(logits: Tensor) -> NDArray[np.float32]:
    """Logits as float32 rows in host memory, [R, vocab], where sampling and verification read them."""
    rows: NDArray[np.float32] = logits.float().cpu().numpy()
    return rows


class _BoundAttention:
    """The Attend a model is handed: one cache, one backend, one batch."""

    __slots__ = ("_backend", "_batch", "_cache")

    def __init__(self, cache: KvCache, backend: AttentionBackend, batch: AttentionBatch) -> None:
        self._cache = cache
        self._backend = backend
        self._batch = batch

    def __call__(
        self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, scale: float, windowed: bool
    ) -> Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[self._batch.write_slots_T] = k_TKH
        values[self._batch.write_slots_T] = v_TKH
        return self._backend.attend(q_TNH, keys, values, self._batch, scale=scale, windowed=windowed)
