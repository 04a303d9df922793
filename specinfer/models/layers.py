"""The parts of a decoder layer: norms, attention block, MLP.

Shapes: T rows of a step, D hidden size, N query heads, K key-value heads, H head size, F MLP size.
Small operations are what a step costs beyond its bytes, so q, k, v are one product and gate, up another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.attention.backend import Attend
from specinfer.models.config import Activation, ModelConfig
from specinfer.models.linear import Linear
from specinfer.models.rope import Rotation


class RMSNorm:
    """x / rms(x) * weight over the last dimension."""

    __slots__ = ("_eps", "_shape", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] normalised, in x's dtype."""
        return F.rms_norm(x, self._shape, self._weight, self._eps)


class LayerNorm:
    """(x - mean(x)) / std(x) * weight + bias over the last dimension."""

    __slots__ = ("_bias", "_eps", "_shape", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps
        self._shape = tuple(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., D] normalised, in x's dtype."""
        return F.layer_norm(x, self._shape, self._weight, self._bias, self._eps)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.RELU: F.relu,
}


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up stacked in one matrix [2 F, D]."""

    __slots__ = ("_activation", "_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        gate_TF, up_TF = self._gate_up(x_TD).chunk(2, dim=-1)
        return self._down(self._activation(gate_TF) * up_TF)


class Attention:
    """Projections around `attend`, with optional head norms and rope.

    Query and key heads lie side by side in the product's output, so one norm and one rotation serve both.
    """

    __slots__ = (
        "_heads",
        "_kv_heads",
        "_layer",
        "_o",
        "_qk_eps",
        "_qk_norm_NH",
        "_qkv",
        "_scale",
        "_windowed",
    )

    def __init__(
        self, layer: int, config: ModelConfig, qkv: Linear, o: Linear, qk_norm: tuple[Tensor, Tensor] | None
    ) -> None:
        self._layer = layer
        self._heads = config.num_heads
        self._kv_heads = config.num_kv_heads
        self._scale = config.attention_scale
        self._windowed = config.layer_windows[layer] is not None
        self._qkv = qkv
        self._o = o
        self._qk_eps = config.norm_eps
        self._qk_norm_NH: Tensor | None = None  # [N + K, H], the weight of each head's norm
        if qk_norm is not None:
            q_H, k_H = qk_norm
            self._qk_norm_NH = torch.stack([q_H] * self._heads + [k_H] * self._kv_heads)

    def __call__(self, x_TD: Tensor, rotate: Rotation | None, attend: Attend) -> Tensor:
        """[T, D] -> [T, D]; `attend` writes this layer's K and V."""
        rows = x_TD.shape[0]
        heads, kv_heads = self._heads, self._kv_heads
        qkv = self._qkv(x_TD).view(rows, heads + 2 * kv_heads, -1)
        qk, v_TKH = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self._qk_norm_NH is not None:
            qk = F.rms_norm(qk, (qk.shape[-1],), None, self._qk_eps) * self._qk_norm_NH
        if rotate is not None:
            qk = rotate(qk)
        attended_TNH = attend(
            self._layer,
            qk[:, :heads],
            qk[:, heads:],
            v_TKH,
            scale=self._scale,
            windowed=self._windowed,
        )
        return self._o(attended_TNH.reshape(rows, -1))
