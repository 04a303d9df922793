"""ModelConfig: the description of a model as pure data; models/families converts foreign formats to it.

A family is a set of values of these fields plus a name map (sources.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from specinfer.errors import ModelError
from specinfer.kernels.parts import SumParts
from specinfer.models.positions import Alibi, Rope, check_rope


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
    GEMMA3 = "gemma3"
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
    TRANSFORMERS = "transformers"  # any model whose layers transformers' own code runs (models/hosted/)


class Activation(StrEnum):
    """The non-linearity of the MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    GELU = "gelu"  # exact, by the error function
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


@dataclass(frozen=True, slots=True)
class Experts:
    """The MLPs of a mixture: a router chooses `per_token` of `count` experts for each token.

    The router's softmax is over all experts, or if `normalized` over the chosen ones, so that weights add up
    to 1.
    """

    count: int
    per_token: int
    size: int  # MLP size of each expert
    normalized: bool
    shared_size: int = 0  # MLP size of an expert that every token uses, weighted by the sigmoid of its gate
    dense_layers: frozenset[int] = frozenset()  # layers with a single MLP instead
    bias: bool = False  # True if the router and its experts have biases

    def __post_init__(self) -> None:
        _positive("the size of experts", self.size)
        if not 1 <= self.per_token <= self.count:
            raise ModelError(
                f"num_experts is {self.count} and num_experts_per_tok {self.per_token}; allowed: 1 expert or "
                "more, and 1 to all of them for a token"
            )

    def active(self, rows: int) -> float:
        """Expected number of experts that `rows` tokens use, if each chooses at random."""
        return self.count * (1 - (1 - self.per_token / self.count) ** rows)


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Layers first .. end - 1 of a model of `count`, on one of several pipeline stages.

    The first stage also embeds tokens, and computes logits from the last stage's output.
    """

    first: int
    end: int
    count: int

    @property
    def begins(self) -> bool:
        """True for the first stage."""
        return self.first == 0

    @property
    def ends(self) -> bool:
        """True for the last stage, which has the final norm."""
        return self.end == self.count

    def taps(self, layers: Iterable[int]) -> list[int]:
        """The given layers of the model whose inputs this stage computes; `count` means the output."""
        return [i for i in layers if self.first <= i < self.end or (self.ends and i == self.count)]


@dataclass(frozen=True, slots=True)
class InnerRange:
    """A rank's part of MLPs of one kind; None: all of it."""

    columns: range | None = None  # rows of the first matrices, and columns of the last
    sums: SumParts | None = None  # parts of float sums over these columns; None: one part


@dataclass(frozen=True, slots=True)
class Ranges:
    """One rank's parts of a model's matrices; None: all.

    models/shard.py computes them.
    """

    queries: range | None = None  # rows of q, and columns of o
    keys: range | None = None  # rows of k, and of v
    inner: range | None = None  # rows of an MLP's first matrices, and columns of its last
    vocab: range | None = None  # rows of the output layer
    table: range | None = None  # rows of the embeddings
    stage: PipelineStage | None = None  # layers
    # Parts of float sums over the columns of o, and of an MLP's last matrix; None: one part.
    o: SumParts | None = None
    down: SumParts | None = None
    experts: InnerRange = InnerRange()  # part of every expert of a mixture
    shared_expert: InnerRange = InnerRange()


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
    residual_scale: float = 1.0  # factor of each term added to the residual stream (Granite)
    logit_scale: float = 1.0  # factor of logits (Cohere; Granite: 1 / logits_scaling)
    logit_softcap: float | None = None  # logits become cap * tanh(logits / cap)
    max_context: int
    eos_ids: tuple[int, ...] = ()
    experts: Experts | None = None  # None: every layer has one MLP
    # Hidden, since cache keys of whole models use the repr.
    part: Ranges = field(default=Ranges(), repr=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"):
            _positive(name, getattr(self, name))
        for name in ("num_kv_heads", "head_dim", "max_context"):
            _positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"the model has {self.num_heads} query heads and {self.num_kv_heads} key-value heads; "
                "the first must be a multiple of the second. The config is damaged."
            )
        for rope in (self.rope, self.local_rope):
            if rope is not None:
                check_rope(rope, self.head_dim)
        if self.norm_bias and self.norm is not Norm.LAYER:
            raise ModelError("RMSNorms have a bias, which is not supported; only LayerNorms may have one")
        if len(self.layer_windows) != self.num_layers:
            raise ModelError(
                f"the config describes the attention of {len(self.layer_windows)} layers, "
                f"but the model has {self.num_layers}"
            )
        if len({w for w in self.layer_windows if w is not None}) > 1:
            raise ModelError(
                f"sliding windows {sorted({w for w in self.layer_windows if w is not None})} differ between "
                "layers; one window size per model is supported"
            )

    @property
    def stage(self) -> PipelineStage:
        """The layers of the whole model that this part has."""
        return self.part.stage or PipelineStage(0, self.num_layers, self.num_layers)

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


def _positive(name: str, value: int) -> None:
    if value <= 0:
        raise ModelError(f"{name} is {value}; expected at least 1. The config is damaged.")
