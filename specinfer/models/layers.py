"""Parts of a decoder layer: norms, attention block, MLP.

Shapes: T rows of a step, D hidden size, F MLP size.
Small operations dominate a step besides reading weights, so q, k, v are one product and gate, up another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specinfer.attention.backend import AlibiSpec, Attend, AttentionSpec, Rotation
from specinfer.kernels.low_rank import DOWN, OUT, QKV, UP, AdaptedLayer, times
from specinfer.kernels.ops import NormParts, Ops
from specinfer.kernels.product import Product
from specinfer.models.config import Activation, ModelConfig, Norm, QkNorm
from specinfer.models.shared_sums import EmbeddingTable
from specinfer.models.weight_memory import Weights


class RowNorm:
    """RMSNorm or LayerNorm, preceded by a residual sum."""

    __slots__ = ("_ops", "parts")

    def __init__(self, parts: NormParts, ops: Ops) -> None:
        self.parts = parts
        self._ops = ops

    @classmethod
    def of(cls, name: str, config: ModelConfig, weights: Weights) -> RowNorm:
        """The norm of that name, of the model's kind."""
        parts = NormParts(
            weights.tensor(f"{name}.weight", plus=config.norm_weight_offset),
            config.norm_eps,
            config.norm is Norm.LAYER,
            weights.tensor(f"{name}.bias") if config.norm_bias else None,
        )
        return cls(parts, weights.kernels.ops)

    def __call__(self, x_TD: Tensor, y_TD: Tensor | None = None) -> Tensor:
        """x += y in place, if there is a y; returns the norm of x, [T, D]."""
        return self._ops.add_norm(x_TD, y_TD, self.parts)

    def of_sum(self, x_TD: Tensor, y_TD: Tensor | None, rows_R: Tensor | None) -> Tensor:
        """The norm of x + y, if there is a y, for these rows (None: all), [R, D]; x is unchanged."""
        return self._ops.norm_of_sum(x_TD, y_TD, self.parts, rows_R)


class MLP:
    """down(act(gate(x)) * up(x)), gate and up stacked in one matrix [2 F, D]; or down(act(up(x)))."""

    __slots__ = ("_act", "_activation", "down", "up")

    def __init__(self, up: Product, down: Product, activation: Activation, ops: Ops, *, gated: bool) -> None:
        """`up` computes gate, then up, if `gated`."""
        self.up = up
        self.down = down
        self._activation = activation.value
        self._act = ops.gate if gated else ops.activate

    @property
    def products(self) -> tuple[Product, Product]:
        """Its products, in order."""
        return self.up, self.down

    def __call__(self, x_TD: Tensor, adapted: AdaptedLayer | None = None) -> Tensor:
        """[T, D] -> [T, D]."""
        inner_TF = self._act(times(self.up, UP, x_TD, adapted), self._activation)
        return times(self.down, DOWN, inner_TF, adapted)


class Attention:
    """Projections around `attend`."""

    __slots__ = ("clip", "heads", "o", "qkv")

    def __init__(self, heads: AttentionSpec, qkv: Product, o: Product, clip: float | None) -> None:
        """`clip` limits the absolute values of q, k and v."""
        self.heads = heads
        self.qkv = qkv
        self.o = o
        self.clip = clip

    def __call__(
        self, x_TD: Tensor, rotation: Rotation | None, attend: Attend, adapted: AdaptedLayer | None = None
    ) -> Tensor:
        """[T, D] -> [T, D]; `attend` writes this layer's K and V."""
        qkv_TC = times(self.qkv, QKV, x_TD, adapted)
        if self.clip is not None:
            qkv_TC = qkv_TC.clamp_(-self.clip, self.clip)
        return times(self.o, OUT, attend(self.heads, qkv_TC, rotation), adapted)


def attention_spec(layer: int, config: ModelConfig, weights: Weights, prefix: str) -> AttentionSpec:
    """The attention of a layer whose tensor names start with `prefix`."""

    def norm(name: str) -> Tensor | None:
        if config.qk_norm is QkNorm.NONE:
            return None
        return weights.tensor(f"{prefix}.{name}.weight", plus=config.norm_weight_offset)

    sinks_N: Tensor | None = None
    if config.attention_sinks:
        sinks_N, own = weights.tensor(f"{prefix}.sinks"), config.part.queries
        if own is not None:
            sinks_N = sinks_N[own.start // config.head_dim : own.stop // config.head_dim]
    alibi: AlibiSpec | None = None
    if config.alibi is not None:
        slopes_N = torch.tensor(config.alibi.slopes, device=weights.device)
        if config.alibi.rounded:
            slopes_N = slopes_N.bfloat16().float()
        alibi = AlibiSpec(slopes_N, config.alibi.rounded)
    return AttentionSpec(
        layer=layer,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.attention_scale,
        window=config.layer_windows[layer],
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        norm_eps=config.norm_eps,
        whole_norms=config.qk_norm is QkNorm.WHOLE,
        softcap=config.attention_softcap,
        alibi=alibi,
        sinks_N=sinks_N,
    )


def embedding_and_output(
    config: ModelConfig, weights: Weights, embeddings: str
) -> tuple[EmbeddingTable, Product]:
    """The embeddings, and the product for logits, with its own matrix or the embeddings'.

    A rank has those of its part of the vocabulary; only the first pipeline stage has them.

    Tied embeddings are copied in the layout of products. The copy takes V * D * 2 bytes and pays off: a
    product with the plain matrix takes nearly twice as long.
    """
    if not config.stage.begins:
        return EmbeddingTable(None), _no_logits
    table, rows = weights.table(f"{embeddings}.weight", config.part.table), [config.part.vocab]
    if config.tie_embeddings:
        return table, weights.linear(embeddings, tied=table, rows=rows)
    return table, weights.linear("lm_head", rows=rows)


def _no_logits(x: Tensor) -> Tensor:
    raise AssertionError("only the first stage computes logits")
