"""A head with its KV cache, which has the target's blocks: rows of texts and of trees in, logits out.

Positions count from the start of a text even where the head has not read it: then a request's block table
begins with a later block, and its rows `shift` positions behind the text's first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.attention.native import NativeAttend, NativeCache
from specinfer.errors import ensure
from specinfer.heads.block_model import BlockModel
from specinfer.heads.eagle_model import EagleModel
from specinfer.runtime.batch import ModelBatch, Rows, build_batch, slots_of
from specinfer.runtime.features import TappedRows, together
from specinfer.runtime.flight import Flight
from specinfer.runtime.kv_cache import KvCache
from specinfer.runtime.runner import probe_rows


@dataclass(frozen=True, slots=True)
class HeadRows:
    """One request's rows; `rows.start` and its table count from position `shift` of the text."""

    rows: Rows
    shift: int


class _Cached:
    """What both kinds have: a cache of the target's blocks, and attention over it."""

    def __init__(self, model: EagleModel | BlockModel, *, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cache = KvCache.of(model.config, num_blocks * block_size, model.dtype, model.device)
        self.attention = model.kernels.attention.over(self.cache.keys, self.cache.values)

    def batch(self, parts: Sequence[HeadRows], device: torch.device) -> ModelBatch:
        """The batch of these rows; paths may be changed until attention is bound to them."""
        return build_batch([part.rows for part in parts], block_size=self.block_size, device=device)


def _positions(batch: ModelBatch, parts: Sequence[HeadRows]) -> Tensor:
    """Where the rows stand in their texts."""
    if not any(part.shift for part in parts):
        return batch.positions_T
    shifts = np.repeat([part.shift for part in parts], [len(part.rows.token_ids) for part in parts])
    return batch.positions_T + torch.from_numpy(shifts).to(batch.positions_T.device)


class EagleRunner:
    """Runs passes of an EAGLE head."""

    def __init__(self, model: EagleModel, *, num_blocks: int, block_size: int) -> None:
        self.model = model
        self._cached = _Cached(model, num_blocks=num_blocks, block_size=block_size)

    @property
    def block_size(self) -> int:
        """Cache positions of a block."""
        return self._cached.block_size

    @property
    def cache(self) -> KvCache:
        """The head's keys and values."""
        return self._cached.cache

    @torch.inference_mode()
    def fused(self, taps_TND: Tensor) -> Tensor:
        """The features of a text's rows, [T, D], of the target's hidden states."""
        return self.model.fused(taps_TND)

    @torch.inference_mode()
    def logits(self, read_RD: Tensor) -> Tensor:
        """The logits of rows that the output layer reads, [R, U]."""
        return self.model.logits(read_RD)

    def launch(self, parts: Sequence[HeadRows], feature_TD: Tensor) -> tuple[Flight, Tensor]:
        """Write K and V of the rows; the flight of those that want logits, and what rows below each are fed.

        `feature_TD` is used up.
        """
        read_RD, fed_TD = self.run(parts, feature_TD)
        return Flight(read_RD, self.model.logits, len(self.model.ids), self.model.kernels.scan), fed_TD

    @torch.inference_mode()
    def run(self, parts: Sequence[HeadRows], feature_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The same, with what the output layer reads of those that want logits, [R, D], for the flight."""
        model = self.model
        batch = self._cached.batch(parts, model.device)
        attend = self._cached.attention.bind(batch.paths)
        read_TD, fed_TD = model.run(batch.token_ids_T, feature_TD, _positions(batch, parts), attend)
        rows = batch.logit_rows
        return read_TD if rows is None else read_TD.index_select(0, rows), fed_TD

    def probe(self, rows: int, *, every_row: bool) -> None:
        """One pass as a step makes it, to be timed: from hidden states to logits, which are of all rows."""
        ensure(every_row, "a head's rows are all asked for their logits")
        head = self.model.head
        texts = 1 if head.mask_token_id is None else -(-rows // 2)  # of two rows each; as BlockRunner says
        count = rows if head.mask_token_id is None else 1 + head.depth
        taps = torch.zeros(count, len(head.taps), head.target_hidden_size, dtype=self.model.dtype)
        part = HeadRows(probe_rows(count, self.block_size), 0)
        feature_TD = self.fused(taps.to(self.model.device))
        self.launch([part] * texts, torch.cat([feature_TD] * texts))[0].row(0)


class BlockRunner:
    """Runs passes of a block head."""

    def __init__(self, model: BlockModel, *, num_blocks: int, block_size: int) -> None:
        self.model = model
        self._cached = _Cached(model, num_blocks=num_blocks, block_size=block_size)

    @property
    def block_size(self) -> int:
        """Cache positions of a block of the cache, which is no block of guesses."""
        return self._cached.block_size

    @property
    def cache(self) -> KvCache:
        """The head's keys and values."""
        return self._cached.cache

    @torch.inference_mode()
    def read(self, parts: Sequence[HeadRows], states: Sequence[TappedRows]) -> Tensor:
        """Write K and V of texts' rows, made of the target's hidden states; their tokens do not matter.

        `states` are those of all rows, in order. Returns what was made of these, [T, D], before it was keys
        and values.
        """
        places = [_places(part) for part in parts]
        positions = np.concatenate([at + part.shift for at, part in zip(places, parts, strict=True)])
        slots = np.concatenate(
            [_slots(part, at, self.block_size) for at, part in zip(places, parts, strict=True)]
        )
        cache = self._cached.attention
        native = self.model.native(int(positions.max()) + 1)
        if native is not None and isinstance(cache, NativeCache):
            taps = [address for part in states for address in part.addresses()]
            return native.read(taps, positions, slots, cache)
        device = self.model.device
        fused_TD = self.model.fused(together(states).copied())
        keys, values = self.model.context(fused_TD, torch.from_numpy(positions).to(device))
        where = torch.from_numpy(slots).to(device)
        for layer, (k_TKH, v_TKH) in enumerate(zip(keys, values, strict=True)):
            self.cache.keys[layer][where] = k_TKH
            self.cache.values[layer][where] = v_TKH
        return fused_TD

    @torch.inference_mode()
    def guess(
        self, parts: Sequence[HeadRows], last: Sequence[Tensor], chosen: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """One pass over these blocks; writes their K and V.

        `last` is what `read` returned of the token before each block, [D] each, for heads that read it.
        Returns of the chosen rows what the output layer reads, [R, D], and what it makes of it, [R, U].
        """
        model = self.model
        batch = self._cached.batch(parts, model.device)
        if not model.head.causal:  # each row sees all of its block
            requests = batch.paths.requests_R4
            batch.paths.shared_T[:] = np.repeat(requests[:, 3], requests[:, 1] - requests[:, 0])
        attend = self._cached.attention.bind(batch.paths)
        positions_T = _positions(batch, parts)
        furthest = max(part.rows.start + len(part.rows.token_ids) + part.shift for part in parts)
        native = model.native(furthest)
        if native is not None and isinstance(attend, NativeAttend):
            begin = self._anchors(batch.token_ids_T, positions_T, parts)
            return native.guess(begin, last, positions_T.numpy(), np.array(chosen, dtype=np.int64), attend)
        begun_TD = self._begun(batch.token_ids_T, positions_T, parts, last)
        read_TD = model.run(begun_TD, positions_T, attend)
        read_RD = read_TD.index_select(0, torch.tensor(chosen, device=model.device))
        return read_RD, model.logits(read_RD)

    def _anchors(self, token_ids_T: Tensor, positions_T: Tensor, parts: Sequence[HeadRows]) -> Tensor:
        """The embeddings that blocks begin with: of anchors, [B, D], where the head reads the last states."""
        if self.model.head.reads_last:
            if len(parts) == 1:
                token_ids_T, positions_T = token_ids_T[:1], positions_T[:1]
            else:
                firsts = np.cumsum([0, *(len(part.rows.token_ids) for part in parts[:-1])])
                firsts_B = torch.from_numpy(firsts).to(self.model.device)
                token_ids_T, positions_T = token_ids_T[firsts_B], positions_T[firsts_B]
        return self.model.embedded(token_ids_T, positions_T)

    def _begun(
        self, token_ids_T: Tensor, positions_T: Tensor, parts: Sequence[HeadRows], last: Sequence[Tensor]
    ) -> Tensor:
        """What the rows begin with, [T, D]."""
        embedded = self._anchors(token_ids_T, positions_T, parts)
        if not self.model.head.reads_last:
            return embedded
        entered_BRD = self.model.entered(torch.stack([*last]), embedded)
        counts = [len(part.rows.token_ids) for part in parts]
        return torch.cat([rows_RD[:count] for rows_RD, count in zip(entered_BRD, counts, strict=True)])

    def probe(self, rows: int, *, every_row: bool) -> None:
        """A step's pass, to be timed, in which so many tokens are read, two of each text.

        For each text there is a block. That is what a step's cost depends on: a pass for texts of which more
        is read takes little longer.
        """
        ensure(every_row, "a head's rows are all asked for their logits")
        head, device = self.model.head, self.model.device
        texts = -(-rows // 2)
        taps = torch.zeros(2 * texts, len(head.taps), head.target_hidden_size, dtype=self.model.dtype)
        # All in the same slots, as a small cache has no others: it takes as long.
        read = HeadRows(probe_rows(2, self.block_size), 0)
        last_PD = self.read([read] * texts, [TappedRows(taps.to(device), range(2 * texts))])[::2]
        block = HeadRows(probe_rows(head.block_size, self.block_size), 0)
        _, logits_RU = self.guess([block] * texts, last_PD.unbind(0), range(texts * head.block_size))
        logits_RU[0].cpu()


def _slots(part: HeadRows, places: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """The cache slots of these places of the part's table."""
    return np.array(slots_of(part.rows.block_table, places.tolist(), block_size), dtype=np.int64)


def _places(part: HeadRows) -> NDArray[np.int64]:
    """The cache positions of the rows, counted as the table is."""
    return np.arange(part.rows.start, part.rows.start + len(part.rows.token_ids))
