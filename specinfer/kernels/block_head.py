"""A block head's share of a step in one native call: what it reads, and its pass (cpu/block_head.cpp).

A head has a layer or two, so what lies between its products is most of what it would take op by op: reading
two tokens and guessing five took 1.3 ms for 0.4 ms of weights. heads/block.py has the same op by op.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from specinfer.attention.native import NativeCache
from specinfer.kernels.decoder import LayerParts, MakeRotations, NativeLayers, RotationTables
from specinfer.kernels.ops import NormParts
from specinfer.kernels.product import FLOATS, NativeProduct, Product
from specinfer.kernels.structures import TYPES, BlockHeadArgs, BlockStepArgs, ProductArgs

_NUMBERS: Final = 8  # of a text in a call


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeadParts:
    """What a block head computes with; heads/block.py says what each is."""

    fc: Product
    hidden_norm: NormParts
    context: Product
    entry: Product | None
    entry_norm: NormParts | None
    layers: Sequence[LayerParts]
    norm: NormParts
    output: Product
    embedding_VD: Tensor
    embedding_scale: float
    mask_token_id: int
    causal: bool
    skipped: int  # rows of a block, from its first on, that guess nothing
    rotations: MakeRotations


class NativeBlockHead:
    """A block head whose every part is native, over caches of the same library.

    Engines in several threads may share it: what a call is given is of the call. It knows no cache, which
    would live as long as it does.
    """

    __slots__ = ("_args", "_kept", "_layers", "_library", "_named", "_rotations", "_size", "_type")

    def __init__(self, parts: BlockHeadParts, layers: NativeLayers) -> None:
        """All products are native, and `layers` are those of the parts."""
        fc, context, output = (_args(product) for product in (parts.fc, parts.context, parts.output))
        self._library = layers.library
        self._layers = layers
        self._kept = parts  # whose memory the arguments point to
        self._type = parts.norm.weight_D.dtype
        self._size, self._named = fc.channels, output.channels
        self._args = BlockHeadArgs(
            type=TYPES[FLOATS[self._type]],
            fc=fc,
            context=context,
            output=output,
            hidden_norm=parts.hidden_norm.args,
            norm=parts.norm.args,
            layers=layers.args,
            num_layers=len(layers.args),
            scale=parts.embedding_scale,
            causal=parts.causal,
            skipped=parts.skipped,
            embedding=parts.embedding_VD.data_ptr(),
            tokens=len(parts.embedding_VD),
            mask=parts.mask_token_id,
        )
        if parts.entry is not None and parts.entry_norm is not None:
            self._args.entry, self._args.entry_norm = _args(parts.entry), parts.entry_norm.args
        self._rotations = RotationTables([self._args.rotations], parts.rotations)

    def reach(self, positions: int) -> None:
        """Have rotations of so many positions at the least."""
        self._rotations.reach(positions)

    def step(
        self,
        texts: Sequence[int],
        taps: Sequence[int],
        tables: Sequence[int],
        guesses: int,
        *,
        block_size: int,
        cache: NativeCache,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Read texts, and guess a block behind those that have one; writes K and V of all their rows.

        Args:
            texts: eight numbers of each, as cpu/block_head.h has a BlockText.
            taps: of each row that is read, in order, the address of its hidden states, [N, target's D] of the
                head's dtype.
            tables: of all texts, one after another.
            guesses: how many rows guess.
            block_size: positions of a block of the cache.
            cache: of the head's layers.

        Returns what was made of the last row that was read of each text, [texts, D]; of all rows that guess
        what the output layer reads, [R, D], and its logits, [R, U]. Raises IndexError where a text leads to a
        slot, position or token that is not there.
        """
        self._layers.check(cache, self._type)
        kept = self._kept
        count = len(texts) // _NUMBERS
        last_ND = torch.empty(count, self._size, dtype=self._type)
        read_RD = torch.empty(guesses, self._size, dtype=self._type)
        logits_RU = torch.empty(guesses, self._named, dtype=self._type)
        numbers = array("q", texts)
        numbers.extend(taps)
        numbers.extend(tables)
        at = numbers.buffer_info()[0]
        behind = at + 8 * (len(texts) + len(taps))
        step = BlockStepArgs(at, count, at + 8 * len(texts), behind, len(tables), block_size)
        guessed = sum(max(0, rows - kept.skipped) for rows in texts[5::_NUMBERS])
        rows = sum(texts[4::_NUMBERS]), guessed
        if rows != (len(taps), guesses):
            raise ValueError(f"hidden states of {len(taps)} rows and {guesses} guesses; texts name {rows}")
        there = self._library.step_blocks(
            *(ctypes.byref(self._args), ctypes.byref(step), ctypes.byref(cache.args)),
            *(last_ND.data_ptr(), read_RD.data_ptr(), logits_RU.data_ptr()),
        )
        if not there:
            raise IndexError(f"texts {[*texts]} in blocks {[*tables]} lead to what is not there")
        return last_ND, read_RD, logits_RU


def _args(product: Product) -> ProductArgs:
    assert isinstance(product, NativeProduct)
    return product.args
