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
from specinfer.kernels.product import NativeProduct, Product


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """One layer: x += attention(norm(x)), then x += mlp(norm(x)), with or without norms of what is added."""

    before_attention_D: Tensor  # weights of RMSNorms
    before_mlp_D: Tensor
    after_attention_D: Tensor | None
    after_mlp_D: Tensor | None
    heads: Heads
    qkv: Product
    o: Product
    gate_up: Product
    down: Product
    local: bool  # turned by the second of two rotations


class NativeLayers:
    """Layers whose every part is native; `kernels.build.load_library` comes before it."""

    __slots__ = ("_layers",)

    def __init__(self, layers: Sequence[LayerParts], *, gelu: bool) -> None:
        """Gates are gelu's (its tanh form), or silu's. Raises TypeError for a product that is not native."""
        self._layers: Any = torch.classes.specinfer.Layers(layers[0].heads.norm_eps, gelu)
        for layer in layers:
            products = [_native(p) for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
            norms = layer.before_attention_D, layer.before_mlp_D, layer.after_attention_D, layer.after_mlp_D
            heads = layer.heads
            self._layers.add(
                [norm for norm in norms if norm is not None],
                [norm for norm in (heads.q_norm_H, heads.k_norm_H) if norm is not None],
                [list(product.weight) for product in products],
                [product.bias for product in products],
                [product.channels for product in products],
                heads.scale,
                heads.window or 0,
                layer.local,
            )

    def __call__(self, x_TD: Tensor, turns: Rotation, local_turns: Rotation, attend: NativeAttend) -> Tensor:
        """What is still to be added to x, [T, D]; sums x up to there, writes K and V of every row."""
        tables = [turns.cos, turns.sin, local_turns.cos, local_turns.sin]
        y_TD: Tensor = self._layers.run(
            x_TD, tables, attend.keys, attend.values, attend.paths, attend.write_slots_T
        )
        return y_TD


def _native(product: Product) -> NativeProduct:
    if not isinstance(product, NativeProduct):
        raise TypeError(f"{product} is no native product")
    return product
