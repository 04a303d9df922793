"""The layers of a decoder in one native call (cpu/layers.cpp).

Calling an op takes a few microseconds, and a layer has nine: of a pass of SmolLM2-135M in 4 bits, of 4.8 ms,
the calls took 1.7. models/decoder.py computes the same op by op, where anything but native ops takes part.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specinfer.attention.backend import AttentionSpec, Rotation
from specinfer.attention.native import NativeAttend, heads_args
from specinfer.kernels.library import LayerArgs, StreamArgs, TapsArgs
from specinfer.kernels.ops import NativeOps, Ops
from specinfer.kernels.product import NativeProduct, Product, check_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """One layer: x += attention(norm(x)), then x += mlp(norm(x)), with or without norms of what is added."""

    before_attention_D: Tensor  # weights of RMSNorms
    before_mlp_D: Tensor
    after_attention_D: Tensor | None
    after_mlp_D: Tensor | None
    heads: AttentionSpec
    products: tuple[Product, Product, Product, Product]  # qkv, o, gate and up, down
    local: bool  # uses the sliding-window layers' RoPE


class NativeLayers:
    """Layers whose every part is native."""

    __slots__ = ("_kept", "_library", "_size", "args", "eps", "gelu")

    def __init__(self, layers: Sequence[LayerParts], ops: NativeOps, *, gelu: bool) -> None:
        """All products must be native. Gates are gelu's, in its tanh form, or silu's."""
        self._library = ops.library
        self.gelu = gelu
        self.eps = layers[0].heads.norm_eps
        self._size = layers[0].before_attention_D.numel()
        self._kept = list(layers)  # whose memory `args` points to
        self.args = (LayerArgs * len(layers))(*map(_layer_args, layers))

    @classmethod
    def of(cls, layers: Sequence[LayerParts], ops: Ops, *, gelu: bool) -> NativeLayers | None:
        """These layers, or None where they have a part that is not native."""
        products = [product for layer in layers for product in layer.products]
        if not isinstance(ops, NativeOps) or not all(isinstance(p, NativeProduct) for p in products):
            return None
        return cls(layers, ops, gelu=gelu)

    @property
    def heads(self) -> AttentionSpec:
        """The heads of the first layer, which are those of all in size and number."""
        return self._kept[0].heads

    def __call__(
        self,
        x_TD: Tensor,
        y_TD: Tensor | None,
        rope: Rotation,
        local_rope: Rotation,
        attend: NativeAttend,
        layers: range,
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """What these layers leave to be added to x, [T, D], and the inputs of those in `taps`, [T, N, D].

        Where there is a y, it is what was left before; sums x up to there, and writes K and V of every row.
        `taps` may be any of the layers, and the number behind the last of them for what that one puts out.
        """
        code = check_rows(x_TD, self._size)
        if y_TD is not None and (y_TD.shape != x_TD.shape or check_rows(y_TD, self._size) != code):
            raise ValueError(f"y must be as x is, {list(x_TD.shape)}, got {list(y_TD.shape)} of {y_TD.dtype}")
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= len(self.args):
            raise ValueError(f"layers {layers} of a model of {len(self.args)}")
        if len(attend.cache.key_addresses) != len(self.args):
            raise ValueError(
                f"caches of {len(attend.cache.key_addresses)} layers for a model of {len(self.args)}"
            )
        attend.check(x_TD.dtype, len(x_TD), self.heads, rope)
        attend.check(x_TD.dtype, len(x_TD), self.heads, local_rope)
        left_TD = torch.empty_like(x_TD)
        stream = StreamArgs(x_TD.data_ptr(), None if y_TD is None else y_TD.data_ptr(), left_TD.data_ptr())
        tapped_TND = x_TD.new_empty(len(x_TD), len(taps), self._size) if taps else None
        ids = (ctypes.c_int64 * len(taps))(*taps)
        out = None if tapped_TND is None else tapped_TND.data_ptr()
        tapping = TapsArgs(ctypes.addressof(ids), len(taps), out)
        self._library.layers(
            self.args,
            layers.start,
            layers.stop,
            code,
            self.gelu,
            self.eps,
            ctypes.byref(attend.paths),
            _addresses([rope.cos, rope.sin, local_rope.cos, local_rope.sin]),
            attend.cache.key_addresses,
            attend.cache.value_addresses,
            ctypes.byref(stream),
            ctypes.byref(tapping),
        )
        return left_TD, tapped_TND


def _layer_args(layer: LayerParts) -> LayerArgs:
    norms = layer.before_attention_D, layer.before_mlp_D, layer.after_attention_D, layer.after_mlp_D
    products = [product.args for product in layer.products if isinstance(product, NativeProduct)]
    addresses = [None if norm is None else norm.data_ptr() for norm in norms]
    return LayerArgs(*addresses, heads_args(layer.heads), *products, layer.local)


def _addresses(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
