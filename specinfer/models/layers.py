"""Parts of a decoder layer: norms, rotary embeddings (RoFormer), the numbers of attention, MLP.

Shapes: T rows of a step, D hidden size, F MLP size. In rotations, which have the half-split form of Hugging
Face models, H is the head size and F the number of frequencies, one per rotated pair of elements.
Small operations dominate a step besides reading weights, so q, k, v are one product and gate, up another.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from specinfer.attention.backend import AlibiSpec, AttentionSpec, Rotation
from specinfer.kernels.low_rank import DOWN, UP, AdaptedLayer, times
from specinfer.kernels.ops import NormParts, Ops
from specinfer.kernels.product import Product
from specinfer.models.config import Activation, ModelConfig, Norm, QkNorm
from specinfer.models.positions import DynamicScaling, Llama3Scaling, Rope, YarnScaling
from specinfer.models.shared_sums import EmbeddingTable
from specinfer.models.weight_memory import Weights

_MIN_POSITIONS: Final = 512  # minimum number of tabulated positions


class RotaryEmbedding:
    """Rotations of any positions on a device; each is a function of its position alone."""

    __slots__ = ("_dynamic", "_exponents_F", "_frequencies_F", "_scale_F", "_theta")

    def __init__(self, rope: Rope, head_dim: int, device: torch.device | None = None) -> None:
        self._theta, self._dynamic = rope.theta, rope.dynamic
        self._exponents_F = _exponents(rope, head_dim).to(device)
        self._frequencies_F = rope_frequencies(rope, head_dim).to(device)
        self._scale_F: Tensor | None = None
        if rope.attention_factor != 1.0:
            scale_F = torch.ones(head_dim // 2)
            scale_F[: len(self._exponents_F)] = rope.attention_factor
            self._scale_F = scale_F.to(device)

    @property
    def device(self) -> torch.device:
        """The device of its rotations."""
        return self._frequencies_F.device

    def at(self, positions: Tensor) -> Rotation:
        """The rotations at these positions, of any shape: cos and sin are [..., H / 2]."""
        places = positions.to(torch.float32)[..., None]
        angles = places * self._frequencies_F
        if self._dynamic is not None:
            angles = self._extended(positions, places, angles, self._dynamic)
        cos, sin = angles.cos(), angles.sin()
        if self._scale_F is not None:
            cos, sin = cos * self._scale_F, sin * self._scale_F
        return Rotation(cos, sin)

    def _extended(self, positions: Tensor, places: Tensor, angles: Tensor, scaling: DynamicScaling) -> Tensor:
        """Replace the angles of rows beyond the original context, which have their own theta."""
        size = 2 * len(self._exponents_F)
        length = (positions + 1).clamp(min=scaling.original_context)
        grown = scaling.factor * length / scaling.original_context - (scaling.factor - 1)
        theta = self._theta * grown ** (size / (size - 2))
        own = places * (1.0 / theta[..., None] ** self._exponents_F)
        own = F.pad(own, (0, angles.shape[-1] - size // 2))
        return torch.where(places >= scaling.original_context, own, angles)


def rope_embeddings(config: ModelConfig, device: torch.device) -> list[RotaryEmbedding]:
    """The embeddings of layers without a window, and of those with one if they differ."""
    sizes = (config.global_heads or config).head_dim, config.head_dim
    ropes = zip((config.rope, config.local_rope), sizes, strict=True)
    return [RotaryEmbedding(rope, size, device) for rope, size in ropes if rope is not None]


def turns(embeddings: Sequence[RotaryEmbedding], positions: Tensor) -> dict[str, Rotation | None]:
    """The rotations at these positions by a layer's kind of them (LayerParts.rope)."""
    turned = [one.at(positions) for one in embeddings]
    return {"none": None, "global": turned[0], "local": turned[-1]} if turned else {"none": None}


def rotations(embeddings: Sequence[RotaryEmbedding], longest: int, positions: int) -> list[Rotation]:
    """For each embedding the rotations of positions 0, 1, ...: at least `positions`, and spare ones.

    A text has at most `longest` positions.
    """
    to_come = 1 << (max(positions, _MIN_POSITIONS) - 1).bit_length()
    count = max(positions, min(to_come, longest))
    return [one.at(torch.arange(count, device=one.device)) for one in embeddings]


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """The angle per position of each pair of elements, [head_dim / 2], float32; 0 for unrotated pairs."""
    exponents = _exponents(rope, head_dim)
    frequencies = 1.0 / rope.theta**exponents
    if rope.llama3 is not None:
        frequencies = _llama3(frequencies, rope.llama3)
    if rope.yarn is not None:
        frequencies = _yarn(rope, rope.yarn, exponents)
    divisors = rope.divisors if rope.longrope is None else rope.longrope.divisors
    if divisors is not None:
        frequencies = frequencies / torch.tensor(divisors, dtype=torch.float32)
    return F.pad(frequencies / rope.linear_factor, (0, head_dim // 2 - len(frequencies)))


def _exponents(rope: Rope, head_dim: int) -> Tensor:
    """Negated exponents of theta for each frequency, [rotated / 2]."""
    size = head_dim if rope.rotated is None else rope.rotated
    return torch.arange(0, size, 2, dtype=torch.float32) / size


def _yarn(rope: Rope, scaling: YarnScaling, exponents: Tensor) -> Tensor:
    """YaRN: keep frequencies with many turns within the original context, divide the others."""
    size = 2 * len(exponents)

    def dimension(turns: float) -> float:
        """The dimension with that number of turns."""
        return size * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    width = high - low or 0.001
    divided = ((torch.arange(len(exponents), dtype=torch.float32) - low) / width).clamp(0, 1)
    powers = rope.theta**exponents
    return 1.0 / (scaling.factor * powers) * divided + 1.0 / powers * (1 - divided)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1: keep short wavelengths, divide long ones, blend between the two."""
    wavelengths = 2 * math.pi / frequencies
    long = scaling.original_context / scaling.low_freq_factor
    short = scaling.original_context / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    blend = (scaling.original_context / wavelengths - scaling.low_freq_factor) / span
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    scaled = torch.where(wavelengths > long, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < short, frequencies, scaled)


@dataclass(frozen=True, slots=True)
class RowNorm:
    """RMSNorm or LayerNorm, preceded by a residual sum."""

    parts: NormParts
    ops: Ops

    @classmethod
    def of(cls, name: str, config: ModelConfig, weights: Weights) -> Self:
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
        return self.ops.add_norm(x_TD, y_TD, self.parts)

    def of_sum(self, x_TD: Tensor, y_TD: Tensor | None, rows_R: Tensor | None) -> Tensor:
        """The norm of x + y, if there is a y, for these rows (None: all), [R, D]; x is unchanged."""
        return self.ops.norm_of_sum(x_TD, y_TD, self.parts, rows_R)


@dataclass(frozen=True, slots=True)
class MLP:
    """down(act(gate(x)) * up(x)), gate and up stacked in one matrix [2 F, D]; or down(act(up(x)))."""

    up: Product  # computes gate, then up, if `gated`
    down: Product
    activation: Activation
    ops: Ops
    gated: bool
    sparsity: float = 0.0  # as in models/config.py

    @property
    def products(self) -> tuple[Product, Product]:
        """Its products, in order."""
        return self.up, self.down

    def __call__(self, x_TD: Tensor, adapted: AdaptedLayer | None = None) -> Tensor:
        """[T, D] -> [T, D]."""
        made_TC = times(self.up, UP, x_TD, adapted)
        if self.sparsity:
            self.ops.cut_off(made_TC[:, : made_TC.shape[1] // 2], self.sparsity)
        act = self.ops.gate if self.gated else self.ops.activate
        inner_TF = act(made_TC, self.activation.value)
        return times(self.down, DOWN, inner_TF, adapted)


def attention_spec(layer: int, config: ModelConfig, weights: Weights, prefix: str) -> AttentionSpec:
    """The attention of a layer whose tensor names start with `prefix`."""

    heads, rows = config.heads_of(layer), config.query_rows(layer)

    def norm(name: str) -> Tensor | None:
        if config.qk_norm is QkNorm.NONE or (name == "k_norm" and "k_proj" not in rows):
            return None
        if config.qk_norm is QkNorm.PLAIN:
            ones_H = torch.ones(heads.head_dim, dtype=weights.dtype, device=weights.device)
            return None if layer in config.layers_without_rope else ones_H
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
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        scale=config.attention_scale,
        window=config.layer_windows[layer],
        q_norm=norm("q_norm"),
        k_norm=norm("k_norm"),
        norm_eps=config.norm_eps,
        whole_norms=config.qk_norm is QkNorm.WHOLE,
        softcap=config.attention_softcap,
        alibi=alibi,
        sinks_N=sinks_N,
        gated=config.gated_attention,
        kv_matrices=sum(name in rows for name in ("k_proj", "v_proj")),
        value_norm=config.value_norm,
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
