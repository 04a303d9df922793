"""How the native layers are told of a mixture of experts (cpu/experts.cpp); models/experts.py is its twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specinfer.kernels.product import NativeProduct, Product
from specinfer.kernels.structures import ExpertsArgs, ProductArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertParts:
    """The products of a mixture: a router's, and two of each expert: gate and up in one, and down."""

    router: Product  # of float32; behind the experts' logits it has that of the shared one's gate, if any
    each: Sequence[tuple[Product, Product]]
    shared: tuple[Product, Product] | None  # of an expert that all rows have
    per_token: int
    normalized: bool  # whether the weights of a row's experts add up to 1

    @property
    def products(self) -> list[Product]:
        """All of them."""
        shared = () if self.shared is None else self.shared
        return [self.router, *(product for both in self.each for product in both), *shared]


def experts_args(parts: ExpertParts) -> ExpertsArgs:
    """These parts, all of which must be native; what they point to is kept by whoever keeps this."""
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
