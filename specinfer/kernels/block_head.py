"""A block head's share of a step in two native calls: reading texts, and its pass (cpu/block_head.cpp).

A head has a layer or two, so what lies between its products is most of what it would take op by op: reading
two tokens and guessing five took 1.3 ms for 0.4 ms of weights. heads/block_model.py has the same op by op.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specinfer.attention.native import NativeAttend, NativeCache
from specinfer.kernels.layers import LayerParts, NativeLayers
from specinfer.kernels.library import TYPES, BlockHeadArgs, CachesArgs, ProductArgs
from specinfer.kernels.ops import NativeOps, Ops
from specinfer.kernels.product import FLOATS, NativeProduct, Product, check_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeadParts:
    """What a block head computes with; heads/block_model.py says what each is."""

    fc: Product
    hidden_norm_D: Tensor
    context: Product
    entry: Product | None
    entry_norm_D: Tensor | None
    layers: Sequence[LayerParts]
    norm_D: Tensor
    output: Product


class NativeBlockHead:
    """A block head whose every part is native, over caches of the same library."""

    __slots__ = ("_args", "_kept", "_layers", "_library", "_named", "_size", "_type")

    def __init__(self, parts: BlockHeadParts, layers: NativeLayers, ops: NativeOps) -> None:
        """All products are native, and `layers` are those of the parts."""
        fc, context, output = (_args(product) for product in (parts.fc, parts.context, parts.output))
        self._library = ops.library
        self._layers = layers
        self._kept: list[object] = [parts]  # whose memory the arguments point to
        self._type = parts.norm_D.dtype
        self._size, self._named = fc.channels, output.channels
        self._args = BlockHeadArgs(
            type=TYPES[FLOATS[self._type]],
            gelu=layers.gelu,
            eps=layers.eps,
            fc=fc,
            context=context,
            output=output,
            hidden_norm=parts.hidden_norm_D.data_ptr(),
            norm=parts.norm_D.data_ptr(),
            layers=layers.args,
            num_layers=len(layers.args),
        )
        if parts.entry is not None and parts.entry_norm_D is not None:
            self._args.entry, self._args.entry_norm = _args(parts.entry), parts.entry_norm_D.data_ptr()

    @classmethod
    def of(cls, parts: BlockHeadParts, layers: NativeLayers | None, ops: Ops) -> NativeBlockHead | None:
        """The head, or None where it has a part that is not native."""
        products = [parts.fc, parts.context, parts.output, *([] if parts.entry is None else [parts.entry])]
        if layers is None or not isinstance(ops, NativeOps):
            return None
        return cls(parts, layers, ops) if all(isinstance(p, NativeProduct) for p in products) else None

    @property
    def positions(self) -> int:
        """How many positions have rotations."""
        return int(self._args.positions)

    def rotate(self, cos: Tensor, sin: Tensor) -> None:
        """Take over the rotations of positions 0, 1, ..., float32 [positions, H / 2], both contiguous."""
        self._kept[1:] = [cos, sin]
        self._args.cos, self._args.sin, self._args.positions = cos.data_ptr(), sin.data_ptr(), len(cos)

    def read(
        self, taps: Sequence[int], positions: NDArray[np.int64], slots: NDArray[np.int64], cache: NativeCache
    ) -> Tensor:
        """Write K and V of a text's rows to their slots; what was made of their hidden states before, [T, D].

        `taps` are addresses of each row's hidden states, [N, target's D] of the head's dtype and contiguous.
        Raises IndexError for a position without a rotation, and for a slot that the cache lacks.
        """
        rows = len(taps)
        self._check(positions, rows)
        self._check(slots, rows)
        fused_TD = self._kept_like(rows)
        caches = self._caches(cache)
        there = self._library.read_texts(
            *(ctypes.byref(self._args), (ctypes.c_void_p * rows)(*taps), positions.ctypes.data),
            *(slots.ctypes.data, rows, ctypes.byref(caches), fused_TD.data_ptr()),
        )
        if not there:
            raise IndexError(f"positions {positions.tolist()} or slots {slots.tolist()} that are not there")
        return fused_TD

    def guess(
        self,
        begin: Tensor,
        last: Sequence[Tensor],
        positions: NDArray[np.int64],
        chosen: NDArray[np.int64],
        attend: NativeAttend,
    ) -> tuple[Tensor, Tensor]:
        """One pass over blocks: what the output layer reads of chosen rows, [R, D], and logits, [R, U].

        `begin` is what each row begins with, [T, D], and used up; of a head with an entry product it is of
        each block its anchor's embedding, [B, D], and `last` what `read` made of the token before it, [D].
        """
        code, blocks = check_rows(begin, self._size), attend.paths.num_requests
        rows = blocks if self._args.entry.weight else attend.paths.rows
        if code != self._args.type or len(begin) != rows:
            raise ValueError(f"blocks begin with {rows} rows of {self._type}, got {len(begin)}")
        if self._args.entry.weight and not all(
            row.shape == (self._size,) and row.dtype is self._type and row.is_contiguous() for row in last
        ):
            raise ValueError(f"the rows before {blocks} blocks must each be [{self._size}] of {self._type}")
        if self._args.entry.weight and len(last) != blocks:
            raise ValueError(f"{len(last)} rows before {blocks} blocks")
        self._check(positions, attend.paths.rows)
        self._check(chosen, len(chosen))
        attend.check(self._type, attend.paths.rows, self._layers.heads, None)
        read_RD = begin.new_empty(len(chosen), self._size)
        logits_RU = begin.new_empty(len(chosen), self._named)
        caches = self._caches(attend.cache)
        there = self._library.guess_blocks(
            *(ctypes.byref(self._args), ctypes.byref(attend.paths), positions.ctypes.data, begin.data_ptr()),
            *((ctypes.c_void_p * len(last))(*(row.data_ptr() for row in last)), chosen.ctypes.data),
            *(len(chosen), ctypes.byref(caches), read_RD.data_ptr(), logits_RU.data_ptr()),
        )
        if not there:
            raise IndexError(f"positions {positions.tolist()} or rows {chosen.tolist()} that are not there")
        return read_RD, logits_RU

    def _kept_like(self, rows: int) -> Tensor:
        kept = self._kept[0]
        assert isinstance(kept, BlockHeadParts)
        return kept.norm_D.new_empty(rows, self._size)

    def _caches(self, cache: NativeCache) -> CachesArgs:
        if len(cache.key_addresses) != len(self._layers.args) or cache.dtype is not self._type:
            raise ValueError(f"caches of {len(cache.key_addresses)} layers and {cache.dtype}")
        heads = self._layers.heads
        if cache.shape[1:] != (heads.num_kv_heads, heads.head_dim):
            raise ValueError(f"caches {list(cache.shape)} for {heads.num_kv_heads} heads of {heads.head_dim}")
        keys, values = map(ctypes.addressof, (cache.key_addresses, cache.value_addresses))
        return CachesArgs(keys, values, cache.shape[0])

    @staticmethod
    def _check(numbers: NDArray[np.int64], count: int) -> None:
        if numbers.dtype != np.int64 or numbers.shape != (count,) or not numbers.flags.c_contiguous:
            raise TypeError(f"{count} contiguous int64 numbers are wanted, got {numbers.shape}")


def _args(product: Product) -> ProductArgs:
    assert isinstance(product, NativeProduct)
    return product.args
