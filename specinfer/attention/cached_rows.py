"""CachedRows: K or V of a layer by slot, as they are or in int8.

Shapes: P slots, T rows, K key-value heads, H head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Scales = Sequence[tuple[Tensor, Tensor]]  # K's and V's for each layer, [P, K]; empty unless rows are int8
_LEAST = 1e-30  # a head whose numbers are all smaller is stored as zeros


@dataclass(frozen=True, slots=True)
class CachedRows:
    """K or V of one layer, [P, K, H]; if int8, with a scale for each row and head, bfloat16 [P, K].

    A row is rounded when it is written, so its bits are its own. cpu/quantized_rows.h makes the same bits.
    """

    rows_PKH: Tensor
    scales_PK: Tensor | None = None

    def write(self, slots_T: Tensor, x_TKH: Tensor) -> None:
        """Store rows in these slots."""
        if self.scales_PK is None:
            self.rows_PKH[slots_T] = x_TKH
            return
        most_TK = x_TKH.float().abs().amax(-1)
        none_TK = most_TK < _LEAST
        scales_TK = (most_TK / 127).masked_fill(none_TK, 0).bfloat16()
        by_TK = scales_TK.float().masked_fill(none_TK, 1)
        self.rows_PKH[slots_T] = (x_TKH.float() / by_TK.unsqueeze(-1)).round().to(torch.int8)
        self.scales_PK[slots_T] = scales_TK

    def read(self, slots_S: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of these slots in `dtype`, [S, K, H]."""
        rows_SKH = self.rows_PKH.index_select(0, slots_S)
        if self.scales_PK is None:
            return rows_SKH
        scales_SK = self.scales_PK.index_select(0, slots_S).float()
        return (rows_SKH.float() * scales_SK.unsqueeze(-1)).to(dtype)


def cached_rows(
    keys: Sequence[Tensor], values: Sequence[Tensor], scales: Scales
) -> tuple[list[CachedRows], list[CachedRows]]:
    """Return K and V of each layer."""
    if not scales:
        return [CachedRows(k) for k in keys], [CachedRows(v) for v in values]
    return (
        [CachedRows(k, own) for k, (own, _) in zip(keys, scales, strict=True)],
        [CachedRows(v, own) for v, (_, own) in zip(values, scales, strict=True)],
    )
