"""Argument structures of a mixture of experts for native layers (cpu/experts.cpp); see models/experts.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specinfer.kernels.product import NativeProduct, Product
from specinfer.kernels.structures import ExpertsArgs, ProductArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParts:
    """The products of a mixture: the router, and per expert gate and up stacked, and down."""

    router: Product  # float32; after the experts' logits it has the logit of the shared expert's gate, if any
    each: Sequence[tuple[Product, Product]]
    shared: tuple[Product, Product] | None  # an expert that every row uses
    per_token: int
    normalized: bool  # the weights of a row's experts add up to 1

    @property
    def products(self) -> list[Product]:
        """All products."""
        shared = () if self.shared is None else self.shared
        return [self.router, *(product for both in self.each for product in both), *shared]


def experts_args(parts: ExpertParts) -> ExpertsArgs:
    """The structure for these parts, all native; the caller must keep their memory."""
    gate_up, down = (_array([both[which] for both in parts.each]) for which in (0, 1))
    args = ExpertsArgs(
        router=_args(parts.router),
        gate_up=gate_up,
        down=down,
        count=len(parts.each),
        per_token=parts.per_token,
        normalized=parts.normalized,
        shared=parts.shared is not None,
    )
    if parts.shared is not None:
        args.shared_gate_up, args.shared_down = map(_args, parts.shared)
    return args


def _array(products: Sequence[Product]) -> object:
    return (ProductArgs * len(products))(*map(_args, products))


def _args(product: Product) -> ProductArgs:
    assert isinstance(product, NativeProduct), "native layers have native products"
    return product.args
