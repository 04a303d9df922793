"""One model with its KV cache: rows in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.models.decoder import LanguageModel
from specinfer.runtime.batch import Rows, build_batch, slots_of
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
        config = model.config
        self.model = model
        self.block_size = block_size
        self.cache = KvCache(
            num_layers=config.num_layers,
            num_slots=num_blocks * block_size,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        self._attention = model.kernels.attention.over(self.cache.keys, self.cache.values)

    @torch.inference_mode()
    def forward(self, rows: Sequence[Rows]) -> Tensor:
        """Write K and V of `rows` and return the logits of the rows that want them, [R, vocab]."""
        model = self.model
        batch = build_batch(rows, block_size=self.block_size, device=model.device)
        attend = self._attention.bind(batch.paths)
        return model.forward(batch.token_ids_T, batch.positions_T, attend, batch.logit_rows)

    @torch.inference_mode()
    def move(self, moves: Sequence[Move]) -> None:
        """Make accepted nodes part of their sequences: copy their K and V to where the text has them."""
        sources: list[int] = []
        targets: list[int] = []
        for move in moves:
            sources.extend(slots_of(move.block_table, move.sources, self.block_size))
            targets.extend(slots_of(move.block_table, move.targets, self.block_size))
        self.cache.move(sources, targets)


class LogitRows(Sequence[NDArray[np.float32]]):
    """The logits of a pass, [R, vocab]: a row is made float32 in host memory when somebody looks at it.

    A walk down a tree looks at few of them, and a row of a large vocabulary is half a megabyte.
    """

    __slots__ = ("_rows_RV",)

    def __init__(self, logits_RV: Tensor) -> None:
        logits_RV = logits_RV.cpu()  # from a GPU all at once: a transfer waits for the pass
        is_bfloat16 = logits_RV.dtype is torch.bfloat16  # NumPy has none: its bits, then
        self._rows_RV: NDArray[Any] = (logits_RV.view(torch.uint16) if is_bfloat16 else logits_RV).numpy()

    def __len__(self) -> int:
        return len(self._rows_RV)

    @overload
    def __getitem__(self, index: int) -> NDArray[np.float32]: ...

    @overload
    def __getitem__(self, index: slice) -> LogitRows: ...

    def __getitem__(self, index: int | slice) -> NDArray[np.float32] | LogitRows:
        chosen = self._rows_RV[index]
        if isinstance(index, slice):
            part = object.__new__(LogitRows)
            part._rows_RV = chosen
            return part
        if chosen.dtype == np.uint16:  # the upper half of a float32
            bits: NDArray[np.uint32] = np.left_shift(chosen, 16, dtype=np.uint32)
            return bits.view(np.float32)
        row: NDArray[np.float32] = chosen.astype(np.float32, copy=False)
        return row


def as_rows(logits: Tensor) -> NDArray[np.float32]:
    """All rows of logits as float32 in host memory, [R, vocab]."""
    rows: NDArray[np.float32] = logits.float().cpu().numpy()
    return rows
