"""The layers of a decoder in one native call (cpu/layers.cpp).

Calling an op takes a few microseconds, and a layer has nine: of a pass of SmolLM2-135M in 4 bits, of 4.8 ms,
the calls took 1.7. models/decoder.py computes the same op by op, where anything but native ops takes part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specinfer.attention.backend import Heads, Rotation
from specinfer.attention.native import NativeAttend
from specinfer.kernels.ops import NativeOps, Ops
from specinfer.kernels.product import NativeProduct, Product


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """One layer: x += attention(norm(x)), then x += mlp(norm(x)), with or without norms of what is added."""

    before_attention_D: Tensor  # weights of RMSNorms
    before_mlp_D: Tensor
    after_attention_D: Tensor | None
    after_mlp_D: Tensor | None
    heads: Heads
    products: tuple[Product, Product, Product, Product]  # qkv, o, gate and up, down
    local: bool  # turned by the second of two rotations


class NativeLayers:
    """Layers whose every part is native; `kernels.build.load_library` comes before it."""

    __slots__ = ("_layers",)

    def __init__(self, eps: float, *, gelu: bool) -> None:
        """No layers yet. Gates are gelu's, in its tanh form, or silu's."""
        self._layers: Any = torch.classes.specinfer.Layers(eps, gelu)

    @classmethod
    def of(cls, layers: Sequence[LayerParts], ops: Ops, *, gelu: bool) -> NativeLayers | None:
        """These layers, or None where they have a part that is not native."""
        if not isinstance(ops, NativeOps):
            return None
        native = cls(layers[0].heads.norm_eps, gelu=gelu)
        return native if all(native._add(layer) for layer in layers) else None

    def __call__(self, x_TD: Tensor, turns: Rotation, local_turns: Rotation, attend: NativeAttend) -> Tensor:
        """What is still to be added to x, [T, D]; sums x up to there, writes K and V of every row."""
        tables = [turns.cos, turns.sin, local_turns.cos, local_turns.sin]
        y_TD: Tensor = self._layers.run(
            x_TD, tables, attend.keys, attend.values, attend.paths, attend.write_slots_T
        )
        return y_TD

    def _add(self, layer: LayerParts) -> bool:
        """Add a layer behind the others, if its products are native; returns whether they are."""
        products = [product for product in layer.products if isinstance(product, NativeProduct)]
        if len(products) < len(layer.products):
            return False
        norms = layer.before_attention_D, layer.before_mlp_D, layer.after_attention_D, layer.after_mlp_D
        heads = layer.heads
        self._layers.add(
            [norm for norm in norms if norm is not None],
            [norm for norm in (heads.q_norm_H, heads.k_norm_H) if norm is not None],
            [product.kind for product in products],
            [list(product.weight) for product in products],
            [product.bias for product in products],
            [product.channels for product in products],
            heads.scale,
            heads.window or 0,
            layer.local,
        )
        return True
