"""Replacements of transformers' modules: products, experts, and code that runs row by row.

A row's bits must not depend on other rows. Products guarantee this. PyTorch's own operations do so if they
compute each row separately (norms, softmax) or round each element separately (sums, products). A
non-linearity rounds the last elements of a tensor differently, so it gets whole vectors. Other code runs one
row at a time, above all modules that multiply with matrices themselves.

Shapes: T rows, D hidden size, S choices of experts per row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from specinfer.kernels.product import Product

VECTOR: Final = 64  # elements that are whole vectors in PyTorch's kernels on every CPU, for every dtype
# Element-wise functions other than sums, products, quotients and roots, which all round alike.
_ROUNDED: Final = frozenset(
    (
        *("sigmoid", "tanh", "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "erf", "erfc", "pow"),
        *("sin", "cos", "tan", "sinh", "cosh", "atan", "silu", "gelu", "softplus", "mish", "selu", "elu"),
        *("celu", "logsigmoid", "log_sigmoid", "__pow__", "rsqrt", "hardswish", "softsign"),
        *("sigmoid_", "tanh_", "exp_", "silu_"),
    )
)


class ProductLinear(nn.Module):
    """A linear layer computed by a specinfer product; without one, in a trial pass, it returns zeros."""

    weight: nn.Parameter

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, transposed: bool) -> None:
        """Keeps both parameters, which have no memory, for code that reads their dtype.

        `transposed`: files have the weight as [inner, channels].
        """
        super().__init__()
        self.weight, self.bias = weight, bias
        self.transposed = transposed
        self.in_features, self.out_features = weight.shape if transposed else reversed(weight.shape)
        self.product: Product | None = None
        self.stack: Stack | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., inner] -> [..., channels]."""
        if x.shape[-1] != self.in_features:
            raise ValueError(f"a layer of {self.in_features} elements is given {x.shape[-1]}")
        if self.stack is not None:
            return self.stack.part(self, x)
        return multiplied(self.product, x, self.out_features, self.weight.dtype)


def multiplied(product: Product | None, x: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """x [..., inner] -> [..., channels of the product]; zeros without a product.

    x is rounded to `dtype` first: code may compute in float32 within a model in bfloat16.
    """
    if product is None:
        return x.new_zeros(*x.shape[:-1], channels)
    x_TD = x.reshape(-1, x.shape[-1]).to(dtype)
    return product(x_TD.contiguous()).view(*x.shape[:-1], channels)


class Stack:
    """Linear layers called in sequence with the same tensor, computed by one product.

    Each channel has a separate sum, so results do not change.
    """

    def __init__(self, layers: Sequence[ProductLinear]) -> None:
        self.layers = layers
        self.product: Product | None = None
        self._places = {id(layer): place for place, layer in enumerate(layers)}
        self._channels = [layer.out_features for layer in layers]
        self._given: Tensor | None = None
        self._parts: Sequence[Tensor] = ()

    def part(self, layer: ProductLinear, x: Tensor) -> Tensor:
        """The output of one of these layers for x."""
        if self._given is not x:
            self._given = x
            made = multiplied(self.product, x, sum(self._channels), layer.weight.dtype)
            self._parts = made.split_with_sizes(self._channels, -1)
        place = self._places[id(layer)]
        part = self._parts[place]
        if place == len(self._channels) - 1:
            self._given, self._parts = None, ()
        return part


@dataclass(frozen=True, slots=True)
class ProductExperts:
    """Experts as products, in the order of their numbers; empty in a trial pass, which returns zeros."""

    experts: Sequence[Sequence[Product]]  # for gate and up, or up alone, and for down

    def __call__(self, module: nn.Module, x_TD: Tensor, chosen_TS: Tensor, weights_TS: Tensor) -> Tensor:
        """The forward of a module of experts, [T, D].

        Rows are grouped by expert, and results are added in the order of the experts, independent of other
        rows.
        """
        out_TD = torch.zeros_like(x_TD)
        places: dict[int, list[tuple[int, int]]] = {}
        for row, chosen in enumerate(chosen_TS.tolist()):
            for slot, expert in enumerate(chosen):
                places.setdefault(expert, []).append((row, slot))
        own: Any = module
        for number in sorted(places):
            if number >= len(self.experts):
                continue  # in a trial, or no expert
            rows, slots = torch.tensor(places[number], device=x_TD.device).T
            first, down = self.experts[number]
            y = first(x_TD[rows])
            y = own._apply_gate(y) if own.has_gate else own.act_fn(y)
            y = down(y.contiguous())
            if own.has_post_expert_norm:
                y = own.post_expert_norm(y)
            y = y * weights_TS[rows, slots, None]
            out_TD.index_add_(0, rows, y.to(out_TD.dtype))
        return out_TD


class WholeVectors:
    """A module's forward with non-linearities padded to whole vectors, so that all elements round alike.

    Other operations are unchanged. Intercepting each of them costs microseconds, so `settle` ends it if no
    pass before it had a vector to fill.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._mode: _InWholeVectors | None = _InWholeVectors()

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The module's forward."""
        if self._mode is None:
            return self._forward(*given, **named)
        with self._mode:
            return self._forward(*given, **named)

    def settle(self) -> None:
        """Call the module's forward directly from now on, unless a vector was filled."""
        if self._mode is not None and not self._mode.has_filled:
            self._mode = None


class _InWholeVectors(TorchFunctionMode):
    """Pads rows for element-wise functions with zeros."""

    has_filled = False  # True after a row was padded

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if getattr(func, "__name__", "") in _ROUNDED and args and isinstance(args[0], Tensor):
            x = args[0]
            others = all(not isinstance(one, Tensor) or one.dim() == 0 for one in args[1:])
            if others and x.dim() and (missing := -x.shape[-1] % VECTOR):
                self.has_filled = True
                longer: Tensor = func(F.pad(x, (0, missing)), *args[1:], **named)
                return longer.narrow(-1, 0, x.shape[-1]).contiguous()
        return func(*args, **named)


@dataclass(slots=True)
class PassRows:
    """The number of rows of the current pass."""

    count: int = 1


class RowByRow:
    """A stateless module's forward that runs one row at a time."""

    def __init__(self, forward: Callable[..., Any], rows: PassRows) -> None:
        self.forward = forward
        self._rows = rows

    def __call__(self, *given: Any, **named: Any) -> Any:
        """The module's forward; tensors with as many rows as the pass are split by row."""
        count = self._rows.count
        if count == 1:
            return self.forward(*given, **named)
        axes = [_axis(one, count) for one in given]
        named_axes = {name: _axis(one, count) for name, one in named.items()}
        found = []
        self._rows.count = 1  # modules below get one row, whose other dimensions may have any size
        try:
            for row in range(count):
                of_row = [_row(one, axis, row) for one, axis in zip(given, axes, strict=True)]
                named_of_row = {name: _row(one, named_axes[name], row) for name, one in named.items()}
                found.append(self.forward(*of_row, **named_of_row))
        finally:
            self._rows.count = count
        usual = next((axis for axis in (*axes, *named_axes.values()) if axis is not None), None)
        return found[0] if usual is None else _joined(found, usual)


def _axis(given: object, count: int) -> int | None:
    """The dimension of a tensor with the rows of the pass, or None."""
    if not isinstance(given, Tensor):
        return None
    if given.dim() > 0 and given.shape[0] == count:
        return 0
    return 1 if given.dim() > 1 and given.shape[:2] == (1, count) else None


def _row(given: Any, axis: int | None, row: int) -> Any:
    return given if axis is None else given.narrow(axis, row, 1).clone()


def _joined(found: Sequence[Any], usual: int) -> Any:
    first = found[0]
    if isinstance(first, Tensor):
        if first.dim() == 0:
            return found[-1]
        axis = usual if first.dim() > usual and first.shape[usual] == 1 else 0
        return torch.cat(list(found), axis)
    if isinstance(first, tuple | list):
        return type(first)(_joined(parts, usual) for parts in zip(*found, strict=True))
    return first
