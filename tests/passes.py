"""Passes of a model over its own KV cache, in any chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specinfer.attention.backend import Attend
from specinfer.models.language_model import LanguageModel, PassContext
from specinfer.runtime.batch import Rows, build_batch
from specinfer.runtime.kv_cache import KvCache

BLOCK = 4


def forward(
    model: LanguageModel,
    token_ids_T: Tensor,
    positions_T: Tensor,
    attend: Attend,
    logit_rows: Tensor | None = None,
) -> Tensor:
    """Return the logits, [R, V], at `logit_rows`, or at every row if None."""
    context = PassContext(positions_T, attend)
    residual, _ = model.run_layers(model.embed(token_ids_T, positions_T), context)
    return model.logits(model.final_norm(residual, logit_rows))


class Passes:
    """A model and a KV cache of ten blocks of 4 slots."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.cache = KvCache(model.config, 10 * BLOCK, model.dtype, model.device)
        self._attention = model.kernels.attention.over(self.cache.keys, self.cache.values)

    @torch.inference_mode()
    def run(self, *rows: Rows, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """Return the output layer's input of every row, and the taps."""
        model = self.model
        batch = build_batch(rows, block_size=BLOCK, device=model.device)
        context = PassContext(batch.positions_T, self._attention.bind(batch.paths), taps)
        read = model.read(batch.token_ids_T, context)
        return read.hidden_RD, read.tapped_TND
