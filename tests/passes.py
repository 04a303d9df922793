"""Passes of a model over a cache of its own, in whichever pieces a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
    """The logits of `logit_rows` (None: of every row), [R, V], by all of a model."""
    context = PassContext(positions_T, attend)
    residual, _ = model.run_layers(model.embed(token_ids_T, positions_T), context)
    return model.logits(model.final_norm(residual, logit_rows))


class Passes:
    """A model and a cache of so many blocks of 4."""

    def __init__(self, model: LanguageModel, num_blocks: int = 10) -> None:
        self.model = model
        self.cache = KvCache.of(model.config, num_blocks * BLOCK, model.dtype, model.device)
        self._attention = model.kernels.attention.over(self.cache.keys, self.cache.values)

    @torch.inference_mode()
    def run(
        self, *rows: Rows, cuts: Sequence[int] = (), taps: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """What the head reads of every row, and the taps; layers are run in pieces, cut before `cuts`."""
        model = self.model
        batch = build_batch(rows, block_size=BLOCK, device=model.device)
        attend = self._attention.bind(batch.paths)
        residual = model.embed(batch.token_ids_T, batch.positions_T)
        if not cuts:
            residual, tapped = model.run_layers(residual, PassContext(batch.positions_T, attend, taps))
            return model.final_norm(residual), tapped
        parts: list[Tensor] = []
        ends = [0, *cuts, model.config.num_layers]
        for piece, (first, last) in enumerate(pairwise(ends)):
            behind = last + 1 if piece == len(cuts) else last  # of two pieces, the one it opens has a tap
            here = [tap for tap in taps if first <= tap < behind]
            context = PassContext(batch.positions_T, attend, here)
            residual, tapped = model.run_layers(residual, context, range(first, last))
            if tapped is not None:
                parts.append(tapped)
        return model.final_norm(residual), torch.cat(parts, dim=1) if parts else None
