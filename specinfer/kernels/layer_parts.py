"""LayerParts: the products, norms and numbers of a layer, for the native call of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from specinfer.attention.backend import AttentionSpec
from specinfer.kernels.ops import NormParts, SigmoidScores
from specinfer.kernels.product import Product
from specinfer.kernels.recurrence import RecurrenceParts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParts:
    """The products of a mixture of experts: the router, and per expert gate and up stacked, and down.

    Experts without a gate have up in place of both.
    """

    router: Product  # float32; after the experts' logits it has the logit of the shared expert's gate, if any
    each: Sequence[tuple[Product, Product]]
    shared: tuple[Product, Product] | None  # an expert that every row uses
    shared_gated: bool = True  # it weighs the sigmoid of its gate; otherwise 1
    gated: bool = True
    scores: SigmoidScores | None = None
    per_token: int
    normalized: bool  # the weights of a row's experts add up to 1

    @property
    def products(self) -> list[Product]:
        """All products."""
        shared = () if self.shared is None else self.shared
        return [self.router, *(product for both in self.each for product in both), *shared]


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerParts:
    """A layer's term of per-layer inputs: x += after(out(act(gate(x)) * inputs))."""

    gate: Product
    out: Product
    after: NormParts
    first: int  # column of this layer's inputs among those of all layers


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """One layer: x += attention(norm(x)), then x += mlp(norm(x)), or another form in models/config.py.

    A recurrence is in place of attention, or added to it. A layer may have no MLP, or an MLP alone.
    """

    norms: Sequence[NormParts | None]  # before attention, before the MLP, after attention, after the MLP
    heads: AttentionSpec | None  # None: no attention
    # qkv, o (with attention); gate and up (or up alone), down (with one MLP)
    products: tuple[Product, ...]
    experts: ExpertParts | None = None
    recurrence: RecurrenceParts | None = None
    rope: Literal["global", "local", "none"]  # "local": the rotation of sliding-window layers
    parallel: bool  # x += attention + mlp, both of the same x
    activation: str
    gated: bool
    clip: float | None  # limit of the values of q, k and v
    scale: float  # factor of each term added to x
    per_layer: PerLayerParts | None = None
    factor: Tensor | None = None  # of the layer's output, float32 [1]

    @property
    def all_products(self) -> list[Product]:
        """Every product of the layer."""
        own = [*self.products, *([] if self.experts is None else self.experts.products)]
        if self.recurrence is not None:
            own += filter(None, [*self.recurrence.products, self.recurrence.gates])
        if self.per_layer is not None:
            own += self.per_layer.gate, self.per_layer.out
        return own
