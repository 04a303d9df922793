"""A decoder's pass in one native call (cpu/decoder.cpp).

Around its layers a pass looks embeddings up, makes rotations, norms what the output layer reads and calls
that: a dozen small calls, which weights that stream past have made slow. Of a pass of SmolLM2-135M in int8,
of 6.3 ms, they took 0.4. models/decoder.py computes the same step by step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from specinfer.attention.native import NativeAttend, NativeCache
from specinfer.kernels.layers import NativeLayers
from specinfer.kernels.library import TYPES, DecoderArgs, DecoderRowsArgs, TapsArgs
from specinfer.kernels.ops import NativeOps, Ops
from specinfer.kernels.product import FLOATS, NativeProduct, Product
from specinfer.kernels.rotations import MakeRotations, RotationTables

_NO_TOKEN: Final = 1  # as in cpu/decoder.h
_NO_POSITION: Final = 2


class NativeDecoder:
    """A decoder whose layers are native, from token ids to what its output layer reads, or to logits.

    Engines in several threads may share it: what a call is given is of the call. It knows no cache, which
    would live as long as it does.
    """

    __slots__ = (
        "_args",
        "_embedding_VD",
        "_layers",
        "_library",
        "_norm_D",
        "_output",
        "_rotations",
    )

    def __init__(
        self,
        layers: NativeLayers,
        ops: NativeOps,
        embedding_VD: Tensor,
        scale: float,
        norm_D: Tensor,
        *,
        output: Product,
        rotations: MakeRotations,
    ) -> None:
        """`embedding_VD` is contiguous and of the dtype of `norm_D`, the last norm's weight.

        `output` makes logits here if it is native. `rotations` makes those of global layers and those of
        sliding-window ones.
        """
        self._library = ops.library
        self._layers = layers
        self._embedding_VD = embedding_VD
        self._norm_D = norm_D
        self._output = output if isinstance(output, NativeProduct) else None
        self._args = DecoderArgs(
            type=TYPES[FLOATS[norm_D.dtype]],
            gelu=layers.gelu,
            eps=layers.eps,
            scale=scale,
            embedding=embedding_VD.data_ptr(),
            tokens=len(embedding_VD),
            layers=layers.args,
            num_layers=len(layers.args),
            norm=norm_D.data_ptr(),
        )
        if self._output is not None:
            self._args.output = self._output.args
        self._rotations = RotationTables(list(self._args.rotations), rotations)

    @classmethod
    def of(
        cls,
        layers: NativeLayers | None,
        ops: Ops,
        embedding_VD: Tensor,
        scale: float,
        norm_D: Tensor,
        *,
        output: Product,
        rotations: MakeRotations,
    ) -> NativeDecoder | None:
        """The decoder, or None where it has a part that is not native."""
        looked_up = embedding_VD.is_contiguous() and embedding_VD.dtype is norm_D.dtype
        if layers is None or not isinstance(ops, NativeOps) or not looked_up:
            return None
        return cls(layers, ops, embedding_VD, scale, norm_D, output=output, rotations=rotations)

    def __call__(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        rows_R: Tensor | None,
        attend: NativeAttend,
        taps: Sequence[int],
        most_logits: int,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What the output layer reads of these rows (None: all), [R, D], taps, and perhaps logits, [R, V].

        Writes K and V of every row. `taps` are layers of the decoder or the number of all, and their inputs
        [T, N, D]; there are logits if at most so many rows are chosen. Raises IndexError for a token the
        embeddings lack and for a position below 0, ValueError for other caches and numbers.
        """
        self._check(attend.cache)
        count, size = attend.paths.rows, self._norm_D.numel()
        _check_numbers("token ids", token_ids_T, count)
        _check_numbers("positions", positions_T, count)
        chosen = count
        if rows_R is not None:
            chosen = rows_R.numel()
            _check_numbers("chosen rows", rows_R, chosen)
        read_RD = self._norm_D.new_empty(chosen, size)
        tapped_TND = self._norm_D.new_empty(count, len(taps), size) if taps else None
        logits_RV: Tensor | None = None
        if self._output is not None and 0 < chosen <= most_logits:
            logits_RV = self._norm_D.new_empty(chosen, self._output.channels)
        ids = (ctypes.c_int64 * len(taps))(*taps)
        out = None if tapped_TND is None else tapped_TND.data_ptr()
        rows = DecoderRowsArgs(
            token_ids_T.data_ptr(),
            positions_T.data_ptr(),
            None if rows_R is None else rows_R.data_ptr(),
            chosen,
        )
        call = partial(
            self._library.decode,
            *(ctypes.byref(self._args), ctypes.byref(rows), ctypes.byref(attend.paths)),
            *(attend.cache.key_addresses, attend.cache.value_addresses),
            *(ctypes.byref(TapsArgs(ctypes.addressof(ids), len(taps), out)), read_RD.data_ptr()),
            None if logits_RV is None else logits_RV.data_ptr(),
        )
        fault = call()
        if fault == _NO_POSITION and int(positions_T.min()) >= 0:
            self._rotations.reach(1 + int(positions_T.max()))
            fault = call()
        if fault:
            raise IndexError(
                f"token ids must be 0 .. {len(self._embedding_VD) - 1}"
                if fault == _NO_TOKEN
                else f"positions must be 0 or more, got {int(positions_T.min())}"
            )
        return read_RD, tapped_TND, logits_RV

    def _check(self, cache: NativeCache) -> None:
        """Raise ValueError where a cache is not one of this decoder's."""
        if cache.checked is self:
            return
        layers = len(self._layers.args)
        if len(cache.key_addresses) != layers:
            raise ValueError(f"caches of {len(cache.key_addresses)} layers for a model of {layers}")
        cache.check(self._norm_D.dtype, self._layers.heads)
        cache.checked = self


def _check_numbers(name: str, numbers: Tensor, count: int) -> None:
    if numbers.dtype is not torch.int64 or not numbers.is_contiguous() or numbers.numel() != count:
        raise ValueError(
            f"{count} {name} must be contiguous int64, got {list(numbers.shape)} {numbers.dtype}"
        )
