"""A head with its KV cache, which has the target's blocks: rows of texts and of trees in, logits out.

Positions count from the start of a text even where the head has not read it: then a request's block table
begins with a later block, and its rows `shift` positions behind the text's first token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specinfer.attention.backend import Paths
from specinfer.attention.native import NativeCache
from specinfer.errors import ensure
from specinfer.heads.block_model import BlockModel
from specinfer.heads.config import BlockConfig
from specinfer.heads.eagle_model import EagleModel
from specinfer.heads.medusa_model import MedusaModel
from specinfer.kernels.block_head import NativeBlockHead
from specinfer.runtime.batch import ModelBatch, Rows, build_batch, slots_of
from specinfer.runtime.features import TappedRows, joined
from specinfer.runtime.flight import Flight, HostFlight
from specinfer.runtime.inference import inference
from specinfer.runtime.kv_cache import KvCache
from specinfer.runtime.runner import probe_rows


@dataclass(frozen=True, slots=True)
class HeadRows:
    """One request's rows; `rows.start` and its table count from position `shift` of the text."""

    rows: Rows
    shift: int


@dataclass(slots=True, kw_only=True)
class BlockText:
    """One request's share of a block head's step: what it reads of the text, and a block behind that.

    Cache positions count from where `table` begins, which is at position `shift` of the text.
    """

    table: Sequence[int] = field(kw_only=False)
    shift: int = field(kw_only=False)
    begin: int  # the first cache position that is read
    states: Sequence[TappedRows] = ()  # the target's hidden states of what is read
    count: int = 0  # rows of it
    rows: int = 0  # of the block; 0: none
    anchor: int = 0  # its first token
    last: Tensor | None = None  # what was made of the token before the anchor, where it is not read now


class BlockGuesses(NamedTuple):
    """What a block head has made in a step."""

    last: list[Tensor | None]  # of the last row that was read of each text, [D]; None: nothing was
    read_RD: Tensor  # what the output layer read of all rows that guess, text by text
    logits_RU: Tensor  # and made of it


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

    @inference
    def fused(self, taps_TND: Tensor) -> Tensor:
        """The features of a text's rows, [T, D], of the target's hidden states."""
        return self.model.fused(taps_TND)

    @inference
    def logits(self, read_RD: Tensor) -> Tensor:
        """The logits of rows that the output layer reads, [R, U]."""
        return self.model.logits(read_RD)

    def launch(self, parts: Sequence[HeadRows], feature_TD: Tensor) -> tuple[Flight, Tensor]:
        """Write K and V of the rows; the flight of those that want logits, and what rows below each are fed.

        `feature_TD` is used up.
        """
        read_RD, fed_TD = self.run(parts, feature_TD)
        return HostFlight(read_RD, self.model.logits, len(self.model.ids), self.model.kernels.scan), fed_TD

    @inference
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
    def head(self) -> BlockConfig:
        """What the head is."""
        return self.model.head

    @property
    def cache(self) -> KvCache:
        """The head's keys and values."""
        return self._cached.cache

    @inference
    def step(self, texts: Sequence[BlockText]) -> BlockGuesses:
        """Read these texts, and one pass over the blocks behind them; writes K and V of all their rows."""
        cache = self._cached.attention
        furthest = max(text.shift + text.begin + text.count + text.rows for text in texts)
        native = self.model.native(furthest)
        if native is not None and isinstance(cache, NativeCache):
            return self._native_step(native, cache, texts)
        last = self._read([text for text in texts if text.count])
        made = [next(last) if text.count else None for text in texts]
        blocks = [text for text in texts if text.rows]
        before = [
            text.last if new is None else new for text, new in zip(texts, made, strict=True) if text.rows
        ]
        return BlockGuesses(made, *self._guess(blocks, before))

    def _native_step(
        self, native: NativeBlockHead, cache: NativeCache, texts: Sequence[BlockText]
    ) -> BlockGuesses:
        numbers: list[int] = []
        taps: list[int] = []
        tables: list[int] = []
        guesses, skipped = 0, self.model.head.skipped
        for text in texts:
            last = 0 if text.last is None else text.last.data_ptr()
            numbers += (len(tables), len(text.table), text.shift, text.begin, text.count, text.rows)
            numbers += (text.anchor, last)
            tables += text.table
            for part in text.states:
                taps += part.addresses()
            guesses += max(0, text.rows - skipped)
        last_ND, *guessed = native.step(
            *(numbers, taps, tables, guesses), block_size=self.block_size, cache=cache
        )
        return BlockGuesses([last_ND[i] if text.count else None for i, text in enumerate(texts)], *guessed)

    def _read(self, texts: Sequence[BlockText]) -> Iterator[Tensor]:
        """Read what there is of these texts, op by op; what was made of the last row of each, [D]."""
        if not texts:
            return iter(())
        device, size = self.model.device, self.block_size
        places = [range(text.begin, text.begin + text.count) for text in texts]
        positions = [p + text.shift for text, part in zip(texts, places, strict=True) for p in part]
        slots = [
            s for text, part in zip(texts, places, strict=True) for s in slots_of(text.table, part, size)
        ]
        fused_TD = self.model.fused(joined([part for text in texts for part in text.states]))
        keys, values = self.model.context(fused_TD, torch.tensor(positions, device=device))
        where = torch.tensor(slots, device=device)
        for layer, (k_TKH, v_TKH) in enumerate(zip(keys, values, strict=True)):
            self.cache.keys[layer][where] = k_TKH
            self.cache.values[layer][where] = v_TKH
        return iter([fused_TD[end - 1] for end in accumulate(text.count for text in texts)])

    def _guess(self, texts: Sequence[BlockText], last: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """What the output layer reads of the rows of these blocks that guess, and its logits, op by op."""
        model, head = self.model, self.model.head
        if not texts:
            return torch.empty(0, model.config.hidden_size), torch.empty(0, len(model.ids))
        positions: list[int] = []
        chosen: list[int] = []
        for text in texts:
            first = text.shift + text.begin + text.count
            chosen += range(len(positions) + head.skipped, len(positions) + text.rows)
            positions += range(first, first + text.rows)
        attend = self._cached.attention.bind(_block_paths(texts, self.block_size, causal=head.causal))
        positions_T = torch.tensor(positions, device=model.device)
        if head.reads_last:
            anchors = [text.anchor for text in texts]
            places = [text.shift + text.begin + text.count for text in texts]
            anchors_BD = model.embedded(*torch.tensor([anchors, places], device=model.device))
            entered_BRD = model.entered(torch.stack([one for one in last if one is not None]), anchors_BD)
            blocks = zip(texts, entered_BRD, strict=True)
            begun_TD = torch.cat([rows_RD[: text.rows] for text, rows_RD in blocks])
        else:
            ids = [
                token for text in texts for token in (text.anchor, *[head.mask_token_id] * (text.rows - 1))
            ]
            begun_TD = model.embedded(torch.tensor(ids, device=model.device), positions_T)
        read_TD = model.run(begun_TD, positions_T, attend)
        read_RD = read_TD.index_select(0, torch.tensor(chosen, device=model.device))
        return read_RD, model.logits(read_RD)

    def probe(self, rows: int, *, every_row: bool) -> None:
        """A step's pass, to be timed, in which so many tokens are read, two of each text.

        For each text there is a block. That is what a step's cost depends on: a pass for texts of which more
        is read takes little longer.
        """
        ensure(every_row, "a head's rows are all asked for their logits")
        head, device = self.model.head, self.model.device
        texts = -(-rows // 2)
        taps = torch.zeros(2, len(head.taps), head.target_hidden_size, dtype=self.model.dtype)
        states = [TappedRows(taps.to(device), range(2))]
        # All in the same slots, as a small cache has no others: it takes as long.
        table = range(-(-(2 + head.block_size) // self.block_size))
        text = BlockText(table, 0, begin=0, states=states, count=2, rows=head.block_size, anchor=0)
        self.step([text] * texts).logits_RU[0].cpu()


def _block_paths(texts: Sequence[BlockText], block_size: int, *, causal: bool) -> Paths:
    """What rows of blocks see: the text, and of their own block the rows up to theirs, or all of it."""
    requests: list[int] = []
    shared: list[int] = []
    num_blocks = 0
    for text in texts:
        first, begin = len(shared), text.begin + text.count
        shared += [begin + (row + 1 if causal else text.rows) for row in range(text.rows)]
        requests += (first, len(shared), num_blocks, begin + text.rows)
        num_blocks += len(text.table)
    tail_ends = [0] * (len(shared) + 1)
    tables = [text.table for text in texts]
    return Paths.of(requests, shared, tail_ends, [], tables=tables, block_size=block_size)


class MedusaRunner:
    """Runs Medusa's heads, which have no cache."""

    def __init__(self, model: MedusaModel) -> None:
        self.model = model

    @inference
    def run(self, states: Sequence[TappedRows], levels: int) -> tuple[Tensor, Tensor]:
        """What output layers read of the first levels of texts that end in these states, and their logits.

        Both are contiguous, a text's levels one after another: [texts * levels, D or U].
        """
        read_BLD, logits_BLU = self.model.run(joined(states)[:, 0], levels)
        return read_BLD.flatten(0, 1), logits_BLU.flatten(0, 1)

    def probe(self, rows: int, *, every_row: bool) -> None:
        """A step's pass, to be timed, all levels: of texts with two rows each, as BlockRunner says."""
        ensure(every_row, "a head's rows are all asked for their logits")
        model = self.model
        state = torch.zeros(1, 1, model.head.target_hidden_size, dtype=model.dtype, device=model.device)
        self.run([TappedRows(state, [0])] * -(-rows // 2), model.head.depth)[1][0].cpu()
