"""ModelConfig: the description of a model as pure data; models/families converts foreign formats to it.

A family is a set of values of these fields plus a name map (sources.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from specinfer.errors import ModelError
from specinfer.kernels.recurrence_config import LayerKind, Recurrence
from specinfer.models.altup_config import AltUp
from specinfer.models.fields import check_size
from specinfer.models.positions import Alibi, Rope, check_rope
from specinfer.models.ranges import PipelineStage, Ranges


class Family(StrEnum):
    """The supported architectures."""

    LLAMA = "llama"
    MISTRAL = "mistral"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    MIXTRAL = "mixtral"
    QWEN2_MOE = "qwen2_moe"
    QWEN3_MOE = "qwen3_moe"
    OLMOE = "olmoe"
    GPT_OSS = "gpt_oss"
    GRANITE_MOE = "granitemoe"
    LLAMA4 = "llama4_text"
    GEMMA3 = "gemma3"
    GEMMA3N = "gemma3n"
    GEMMA4 = "gemma4"
    PHI3 = "phi3"
    GLM = "glm"
    GLM4 = "glm4"
    OLMO = "olmo"
    OLMO2 = "olmo2"
    OLMO3 = "olmo3"
    GRANITE = "granite"
    SMOLLM3 = "smollm3"
    SEED_OSS = "seed_oss"
    ERNIE4_5 = "ernie4_5"
    HELIUM = "helium"
    CWM = "cwm"
    EXAONE4 = "exaone4"
    COHERE = "cohere"
    COHERE2 = "cohere2"
    GPT2 = "gpt2"
    STARCODER = "gpt_bigcode"
    STARCODER2 = "starcoder2"
    FALCON = "falcon"
    MPT = "mpt"
    NEOX = "gpt_neox"
    STABLELM = "stablelm"
    OPT = "opt"
    LFM2 = "lfm2"
    LFM2_MOE = "lfm2_moe"
    QWEN3_NEXT = "qwen3_next"
    QWEN3_5 = "qwen3_5_text"
    QWEN3_5_MOE = "qwen3_5_moe_text"
    GRANITE_HYBRID = "granitemoehybrid"
    BAMBA = "bamba"
    NEMOTRON_H = "nemotron_h"
    FALCON_H1 = "falcon_h1"
    TRANSFORMERS = "transformers"  # any model whose layers transformers' own code runs (models/hosted/)


class Activation(StrEnum):
    """The non-linearity of the MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    GELU = "gelu"  # exact, by the error function
    RELU2 = "relu2"  # the square of relu
    CLAMPED_SWISH = "clamped_swish"  # min(x, 7) * sigmoid(1.702 x), times clamp(up, -7, 7) + 1 (gpt-oss)


class Norm(StrEnum):
    """The kind of norm of the layers, and of the final norm."""

    RMS = "rms"
    LAYER = "layer"  # LayerNorm: the mean is subtracted


class NormPlace(StrEnum):
    """Places of the norms of a block f, attention or MLP; x is the residual stream.

    The names of their tensors, as in Llama, Gemma and OLMo 2:

        BEFORE     input_layernorm, post_attention_layernorm (which precedes the MLP)
        BOTH       input_layernorm, post_attention_layernorm, pre_feedforward_layernorm,
                   post_feedforward_layernorm
        BEHIND     post_attention_layernorm, post_feedforward_layernorm
    """

    BEFORE = "before"  # x += f(norm(x))
    BOTH = "both"  # x += norm(f(norm(x))) (Gemma 2 and 3)
    BEHIND = "behind"  # x += norm(f(x)) (OLMo 2 and 3)


class QkNorm(StrEnum):
    """The RMSNorm of queries and keys, before rope."""

    NONE = "none"
    HEAD = "head"  # per head, with the same weights for all (Qwen3, Gemma 3)
    WHOLE = "whole"  # over all queries, and over all keys, of a row (OLMo 2 and 3, OLMoE)
    PLAIN = "plain"  # per head without weights, in layers with rope (Llama 4)


@dataclass(frozen=True, slots=True)
class Experts:
    """The MLPs of a mixture: a router chooses `per_token` of `count` experts for each token.

    The router's softmax is over all experts, or if `normalized` over the chosen ones, so that weights add up
    to 1. With `sigmoid` an expert's score is the sigmoid of its logit instead. A `choice_bias` is added to it
    in choosing experts. Weights are `scale` times the score; if `normalized`, it is first divided by the sum
    of the chosen scores + `epsilon`.
    """

    count: int
    per_token: int
    size: int  # MLP size of each expert
    normalized: bool
    shared_size: int = 0  # MLP size of an expert that every token uses, weighted by the sigmoid of its gate
    dense_layers: frozenset[int] = frozenset()  # layers with a single MLP instead
    bias: bool = False  # True if the router and its experts have biases
    shared_gated: bool = True  # otherwise that expert has the weight 1
    gated: bool = True  # down(act(gate(x)) * up(x)); else down(act(up(x)))
    sigmoid: bool = False
    choice_bias: bool = False
    scale: float = 1.0
    epsilon: float = 0.0
    beside: bool = False  # True if every layer has an MLP as well (beside.py)
    scales_inputs: bool = False  # the inputs of experts are multiplied by the weights, not the outputs

    def __post_init__(self) -> None:
        check_size("the size of experts", self.size)
        if not 1 <= self.per_token <= self.count:
            raise ModelError(
                f"num_experts is {self.count} and num_experts_per_tok {self.per_token}; allowed: 1 expert or "
                "more, and 1 to all of them for a token"
            )

    def active(self, rows: int) -> float:
        """Expected number of experts that `rows` tokens use, if each chooses at random."""
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)


@dataclass(frozen=True, slots=True)
class LayerHeads:
    """The key-value heads of a layer."""

    head_dim: int
    num_kv_heads: int
    values_are_keys: bool = False  # values are the product of k, before its norm and its rotation


@dataclass(frozen=True, slots=True)
class PerLayer:
    """Per-layer embeddings: each token has `size` values for each layer, which adds a term made of them.

    Their table has `vocab` rows; tokens behind it have those of token 0.
    """

    size: int
    vocab: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything the decoder needs besides the weights.

    The config of a rank's part has the heads, MLP size and layers of that part, and otherwise the model's
    values.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope | None  # None: positions are learned, ALiBi's, or unused
    local_rope: Rope | None = None  # for layers with a window, if different (Gemma 3)
    layers_without_rope: frozenset[int] = frozenset()  # SmolLM3, Cohere 2
    layer_windows: tuple[int | None, ...]  # [num_layers]; position p sees positions > p - window
    learned_positions: bool = False  # added to embeddings, from a table of max_context positions
    position_offset: int = 0  # rows of that table before position 0 (OPT: 2)
    alibi: Alibi | None = None
    tie_embeddings: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    qkv_clip: float | None = None  # limit of the values of queries, keys and values (MPT)
    embedding_scale: float = 1.0
    norm: Norm = Norm.RMS
    norm_bias: bool = False  # in LayerNorms
    norm_weight_offset: float = 0.0  # Gemma stores RMSNorm weights as w - 1
    norm_place: NormPlace = NormPlace.BEFORE
    parallel_block: bool = False  # x += attention(norm(x)) + mlp(norm(x)) (Falcon, GPT-NeoX, Cohere)
    shared_norm: bool = False  # both blocks of a parallel layer use input_layernorm
    gated_mlp: bool = True  # down(act(gate(x)) * up(x)); else down(act(up(x)))
    activation: Activation = Activation.SILU
    attention_scale: float
    attention_softcap: float | None = None  # scores become cap * tanh(scores / cap) (Gemma 2)
    attention_sinks: bool = False  # a learned logit per head without a value (gpt-oss)
    gated_attention: bool = False  # attended values times the sigmoid of a gate of each (Qwen3.5)
    residual_scale: float = 1.0  # factor of each term added to the residual stream (Granite)
    logit_scale: float = 1.0  # factor of logits (Cohere; Granite: 1 / logits_scaling)
    logit_softcap: float | None = None  # logits become cap * tanh(logits / cap)
    max_context: int
    eos_ids: tuple[int, ...] = ()
    experts: Experts | None = None  # None: every layer has one MLP
    layer_kinds: tuple[LayerKind, ...] = ()  # [num_layers]; empty: all are attention
    layers_without_mlp: frozenset[int] = frozenset()  # by their numbers in the whole model (Nemotron-H)
    recurrence: Recurrence | None = None  # None: no layer has a state
    # Factors of the file's tensors by their names inside a layer, which weights have when they are read
    # (Falcon-H1).
    weight_factors: tuple[tuple[str, float], ...] = ()
    global_heads: LayerHeads | None = None  # if layers without a window have other heads (Gemma 4)
    # The last layers that have no keys and values: each attends to those of the last layer before them that
    # has a window, or none, as they do (Gemma 3n and 4).
    shared_layers: int = 0
    keys_elsewhere: bool = field(default=False, repr=False)  # all layers use another model's (assistant.py)
    layer_inner: tuple[int, ...] = ()  # MLP sizes of all layers, if they differ
    value_norm: bool = False  # an RMSNorm over each head's value, without weights
    output_factor: bool = False  # a learned factor of each layer's output (Gemma 4)
    per_layer: PerLayer | None = None
    altup: AltUp | None = None
    # Hidden, since cache keys of whole models use the repr.
    part: Ranges = field(default=Ranges(), repr=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            check_size(name, getattr(self, name))
        for name in ("num_kv_heads", "head_dim", "max_context"):
            check_size(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"the model has {self.num_heads} query heads and {self.num_kv_heads} key-value heads; "
                "the first must be a multiple of the second. The config is damaged."
            )
        for rope, windowed in ((self.rope, self.local_rope is None), (self.local_rope, True)):
            if rope is not None:
                own = None if windowed else self.global_heads
                check_rope(rope, self.head_dim if own is None else own.head_dim)
        if self.global_heads is not None and self.num_heads % self.global_heads.num_kv_heads:
            raise ModelError(
                f"the model has {self.num_heads} query heads and {self.global_heads.num_kv_heads} key-value "
                "heads in layers without a window; the first must be a multiple of the second. The config is "
                "damaged."
            )
        if self.norm_bias and self.norm is not Norm.LAYER:
            raise ModelError("RMSNorms have a bias, which is not supported; only LayerNorms may have one")
        if len(self.layer_windows) != self.num_layers:
            raise ModelError(
                f"the config describes the attention of {len(self.layer_windows)} layers, "
                f"but the model has {self.num_layers}"
            )
        listed = len(self.layer_kinds)
        if listed and (listed != self.num_layers or (self.recurrence is None and self.recurrent_layers)):
            raise ModelError(
                f"the config has kinds of {listed} layers for {self.num_layers}, or no sizes "
                "of the state of recurrent ones. The config is damaged."
            )
        if len({w for w in self.layer_windows if w is not None}) > 1:
            raise ModelError(
                f"sliding windows {sorted({w for w in self.layer_windows if w is not None})} differ between "
                "layers; one window size per model is supported"
            )
        shared = 0 if self.keys_elsewhere else self.shared_layers
        keyed = max(0, self.num_layers - shared)  # layers that have keys
        if shared and not set(self.layer_windows[keyed:]) <= set(self.layer_windows[:keyed]):
            raise ModelError(
                f"the last {self.shared_layers} of {self.num_layers} layers use the keys and values of "
                "earlier ones, and there is none of their kind. The config is damaged."
            )

    @property
    def stage(self) -> PipelineStage:
        """The layers of the whole model that this part has."""
        return self.part.stage or PipelineStage(0, self.num_layers, self.num_layers)

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of a layer, by its number in this part."""
        return self.layer_kinds[layer] if self.layer_kinds else LayerKind.ATTENTION

    @property
    def attention_layers(self) -> list[int]:
        """Numbers of the layers with keys and values, in this part."""
        kinds = (LayerKind.ATTENTION, LayerKind.BOTH)
        return [layer for layer in range(self.num_layers) if self.kind_of(layer) in kinds]

    @property
    def recurrent_layers(self) -> list[int]:
        """Numbers of the layers with a state, in this part."""
        kinds = (LayerKind.ATTENTION, LayerKind.NONE)
        return [layer for layer in range(self.num_layers) if self.kind_of(layer) not in kinds]

    def extends(self, tokens: int) -> bool:
        """True if texts of that many tokens need other rotations (LongRope)."""
        longrope = None if self.rope is None else self.rope.longrope
        return longrope is not None and tokens > longrope.original_context

    def for_texts_of(self, tokens: int) -> ModelConfig:
        """The config for texts of up to `tokens` tokens, if it differs (LongRope)."""
        longrope = None if self.rope is None else self.rope.longrope
        if self.rope is None or longrope is None or not self.extends(tokens):
            return self
        return replace(
            self,
            rope=replace(self.rope, longrope=replace(longrope, extended=True)),
            max_context=longrope.extended_context,
        )

    def experts_of(self, layer: int) -> Experts | None:
        """The mixture of a layer, by its number in the whole model; None for a single MLP."""
        dense = self.experts is None or layer in self.experts.dense_layers
        return None if dense else self.experts

    def heads_of(self, layer: int) -> LayerHeads:
        """The key-value heads of a layer, by its number in this part."""
        if self.global_heads is not None and self.layer_windows[layer] is None:
            return self.global_heads
        return LayerHeads(self.head_dim, self.num_kv_heads)

    def query_rows(self, layer: int) -> dict[str, int]:
        """The rows of the product that makes a layer's q, k and v, by the names of its matrices, in order."""
        own = self.heads_of(layer)
        q, kv = self.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
        rows = {"q_proj": q}
        if self.cache_of(layer) == layer:
            rows |= {"k_proj": kv} if own.values_are_keys else {"k_proj": kv, "v_proj": kv}
        return rows | {"gate_proj": q} if self.gated_attention else rows

    def cache_of(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to; -1: one of another model."""
        own = self.num_layers - self.shared_layers
        if layer < own:
            return layer
        return max((i for i in range(own) if self.layer_windows[i] == self.layer_windows[layer]), default=-1)

    def inner_of(self, layer: int) -> int:
        """The size of a layer's MLP."""
        return self.layer_inner[layer] if self.layer_inner else self.intermediate_size

    @property
    def layers_differ(self) -> bool:
        """True if layers differ in their matrices, or have further ones (Gemma 3n and 4)."""
        return bool(self.global_heads or self.shared_layers or self.layer_inner or self.per_layer)

    @property
    def op_by_op(self) -> bool:
        """True if no native call computes the layers."""
        experts = self.experts
        own = experts is not None and (experts.beside or experts.scales_inputs)
        return self.altup is not None or own

    @property
    def plain_layers(self) -> bool:
        """True if layers have the form of Llama or Qwen: RMSNorm before each block, a gated MLP and rope.

        Biases, norms of query and key heads, and windows are allowed.
        """
        return (
            (self.norm, self.norm_place) == (Norm.RMS, NormPlace.BEFORE)
            and self.gated_mlp
            and self.experts is None
            and self.rope is not None
            and not (self.parallel_block or self.layers_without_rope or self.attention_sinks)
            and (self.qkv_clip, self.attention_softcap) == (None, None)
            and self.qk_norm is not QkNorm.WHOLE
            and self.residual_scale == 1.0
        )

    @property
    def window(self) -> int | None:
        """The sliding window of the layers that have one; None if no layer has."""
        return next((w for w in self.layer_windows if w is not None), None)
