"""NativeBlockHead: a block head's part of a step in one native call (cpu/block_head.cpp).

A head has one or two layers, so the overhead between ops would dominate: reading two tokens and guessing five
took 1.3 ms for 0.4 ms of weights. heads/block.py computes the same op by op.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from specinfer.kernels.attention import NativeCache
from specinfer.kernels.decoder import MakeRotations, NativeLayers, RotationTables
from specinfer.kernels.product import FLOATS
from specinfer.kernels.structures import TYPES, BlockHeadArgs, BlockStepArgs

_NUMBERS: Final = 8  # numbers per text in a call


class NativeBlockHead:
    """A block head whose parts are all native, on caches of the same library.

    Threads may share it, since calls keep no state. It holds no cache, so a cache may be freed earlier.
    """

    __slots__ = ("_args", "_kept", "_layers", "_library", "_named", "_rotations", "_size", "_type")

    def __init__(
        self,
        args: BlockHeadArgs,
        kept: Sequence[object],
        layers: NativeLayers,
        rotations: MakeRotations,
        dtype: torch.dtype,
    ) -> None:
        """`args` lack the type, the layers and the rotations; `kept` owns the memory that they point to."""
        self._library = layers.library
        self._layers = layers
        self._kept = kept
        self._type = dtype
        self._size, self._named = args.fc.channels, args.output.channels
        args.type, args.layers, args.num_layers = TYPES[FLOATS[dtype]], layers.args, len(layers.args)
        self._args = args
        self._rotations = RotationTables([args.rotations], rotations)

    def reach(self, positions: int) -> None:
        """Extend the rotation tables to at least `positions` positions."""
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
        """Read texts, and guess a block after those that have one; writes K and V of all their rows.

        Args:
            texts: eight numbers per text, the fields of BlockText in cpu/block_head.h.
            taps: addresses of the hidden states of each row that is read, in order, each [N, target's D] of
                the head's dtype.
            tables: block tables of all texts, concatenated.
            guesses: number of rows that guess.
            block_size: positions in a block of the cache.
            cache: caches of the head's layers.

        Returns the fused state of the last row read of each text, [texts, D]; for all guessing rows the input
        of the output layer, [R, D], and its logits, [R, U]. Raises IndexError if a text has an invalid slot,
        position or token.
        """
        self._layers.check(cache, self._type)
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
        guessed = sum(max(0, rows - self._args.skipped) for rows in texts[5::_NUMBERS])
        rows = sum(texts[4::_NUMBERS]), guessed
        if rows != (len(taps), guesses):
            raise ValueError(f"got {len(taps)} hidden states and {guesses} guesses; texts require {rows}")
        there = self._library.step_blocks(
            *(ctypes.byref(self._args), ctypes.byref(step), ctypes.byref(cache.args)),
            *(last_ND.data_ptr(), read_RD.data_ptr(), logits_RU.data_ptr()),
        )
        if not there:
            raise IndexError(f"texts {[*texts]} in blocks {[*tables]} have an invalid slot or token")
        return last_ND, read_RD, logits_RU
