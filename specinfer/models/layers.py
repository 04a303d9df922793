"""The parts of a decoder layer: norms, attention block, MLP.

Shapes: T rows of a step, D hidden size, F MLP size.
Small operations are what a step costs beyond its bytes, so q, k, v are one product and gate, up another.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from specinfer.attention.backend import Attend, AttentionSpec, Rotation
from specinfer.kernels.ops import Ops
from specinfer.kernels.product import Product
from specinfer.models.config import Activation, ModelConfig
from specinfer.models.weight_memory import EmbeddingTable, Weights


class RMSNorm:
    """x / rms(x) * weight, with the residual sum in front of it."""

    __slots__ = ("_eps", "_ops", "weight_D")

    def __init__(self, weight_D: Tensor, eps: float, ops: Ops) -> None:
        self.weight_D = weight_D
        self._eps = eps
        self._ops = ops

    def __call__(self, x_TD: Tensor, y_TD: Tensor | None = None) -> Tensor:
        """x += y in place, where there is a y; returns x normalised, [T, D]."""
        return self._ops.add_rms_norm(x_TD, y_TD, self.weight_D, self._eps)

    def of_sum(self, x_TD: Tensor, y_TD: Tensor | None, rows_R: Tensor | None) -> Tensor:
        """x + y normalised, where there is a y, of these rows (None: all), [R, D]; x stays as it is."""
        return self._ops.rms_norm_of_sum(x_TD, y_TD, self.weight_D, self._eps, rows_R)


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


def _relu_mul(gate_up_T2F: Tensor) -> Tensor:
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.relu(gate_TF) * up_TF


class GatedMLP:
    """down(act(gate(x)) * up(x)), gate and up stacked in one matrix [2 F, D]."""

    __slots__ = ("_gated", "down", "gate_up")

    def __init__(self, gate_up: Product, down: Product, activation: Activation, ops: Ops) -> None:
        self.gate_up = gate_up
        self.down = down
        self._gated: Callable[[Tensor], Tensor] = {
            Activation.SILU: ops.silu_mul,
            Activation.GELU_TANH: ops.gelu_tanh_mul,
            Activation.RELU: _relu_mul,
        }[activation]

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        return self.down(self._gated(self.gate_up(x_TD)))


class Attention:
    """Projections around `attend`."""

    __slots__ = ("heads", "o", "qkv")

    def __init__(
        self,
        layer: int,
        config: ModelConfig,
        qkv: Product,
        o: Product,
        qk_norm: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
    ) -> None:
        self.qkv = qkv
        self.o = o
        self.heads = AttentionSpec(
            layer=layer,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            window=config.layer_windows[layer],
            q_norm_H=qk_norm[0],
            k_norm_H=qk_norm[1],
            norm_eps=config.norm_eps,
        )

    def __call__(self, x_TD: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
        """[T, D] -> [T, D]; `attend` writes this layer's K and V."""
        return self.o(attend(self.heads, self.qkv(x_TD), rotation))


def embedding_and_output(
    config: ModelConfig, weights: Weights, embeddings: str
) -> tuple[EmbeddingTable, Product]:
    """The embeddings, and the product that makes logits, of a matrix of its own or of these.

    A rank has those of its part of the vocabulary, and of pipeline stages the first one has them.

    A copy of tied embeddings, laid out as products read them, costs V * D * 2 bytes, and pays: a product with
    the plain matrix takes nearly twice as long.
    """
    if not config.stage.begins:
        return EmbeddingTable(None), _makes_none
    table, rows = weights.table(f"{embeddings}.weight", config.part.table), [config.part.vocab]
    if config.tie_embeddings:
        return table, weights.linear(embeddings, tied=table, rows=rows)
    return table, weights.linear("lm_head", rows=rows)


def _makes_none(x: Tensor) -> Tensor:
    raise AssertionError("the first stage makes logits")
