"""GGUF metadata -> ModelConfig: the part common to all families; models/families has the rest.

Raises ModelError for metadata that requires computations the decoder does not support.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from specinfer.errors import ModelError
from specinfer.models.config import Family, ModelConfig, Norm, QkNorm
from specinfer.models.fields import (
    MAX_LAYERS,
    Fields,
    all_ids,
    count,
    integer,
    number,
    optional_positive,
    positive,
)
from specinfer.models.positions import LongRope, Rope, YarnScaling, longest_text, yarn_attention_factor
from specinfer.models.sources import FACTOR_GATE_X, QKV, SHARED, Inside, Names

# Tensors of GGUF files that are part of the config.
ROPE_TENSORS: Final = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
OUTSIDE: Final[Inside] = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",  # LFM2
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "altup_proj": tuple(f"model.altup_projections.{i}" for i in range(3)),
    "altup_unembd_proj": tuple(f"model.altup_unembed_projections.{i}" for i in range(3)),
}
_MLP: Final = ("gate", "up", "down")
INSIDE: Final[Inside] = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}_norm": f"self_attn.{name}_norm" for name in "qk"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in _MLP},
    **{"ffn_gate_inp": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
    **{f"ffn_{name}_shexp": f"{SHARED}{name}_proj" for name in _MLP},
    **{"ssm_conv1d": "mixer.conv", "ssm_norm": "mixer.norm", "ssm_out": "mixer.out_proj"},
    **{"shortconv.in_proj": FACTOR_GATE_X, "shortconv.conv": "mixer.conv"},
    "shortconv.out_proj": "mixer.out_proj",
}
_EXPERT_STACKS: Final = {
    **{f"ffn_{name}_exps.{end}": (f"{name}_proj",) for name in _MLP for end in ("weight", "bias")},
    "ffn_gate_up_exps.weight": ("gate_proj", "up_proj"),
}
_WHOLE: Final = {
    "attn_sinks.weight": "self_attn.sinks",
    "ssm_a": "mixer.decay",
    "ssm_d": "mixer.skip",
    "ssm_dt.bias": "mixer.dt_bias",
    "exp_probs_b.bias": "mlp.gate.choice_bias",
    "ffn_norm": "post_attention_layernorm.weight",  # Falcon-H1
    "layer_output_scale.weight": "layer_scalar",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "ffn_gate_inp.scale": "mlp.router_scale",
    "ffn_down_exps.scale": "mlp.expert_scale",
}
# Names for models with one matrix of queries, keys and values.
STACKED: Final[Inside] = {**INSIDE, "attn_qkv": QKV}
# Names for models whose norm after attention, or before the MLP, has the name of the former.
POST_ATTENTION: Final[Inside] = {**INSIDE, "post_attention_norm": "post_attention_layernorm"}
# Names for models with norms after each block.
BEHIND: Final[Inside] = {**POST_ATTENTION, "post_ffw_norm": "post_feedforward_layernorm"}
# Names for models with norms before and after each block.
BOTH_SIDES: Final[Inside] = {
    **{**BEHIND, "ffn_norm": "pre_feedforward_layernorm"},
    # Gemma 4
    **{"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection"},
    **{"post_norm": "post_per_layer_input_norm", "pre_ffw_norm_2": "pre_feedforward_layernorm_2"},
    **{f"post_ffw_norm_{number}": f"post_feedforward_layernorm_{number}" for number in (1, 2)},
    # Gemma 3n
    **{"altup_router": "altup.modality_router", "altup_router_norm": "altup.router_norm"},
    **{"altup_predict_coef": "altup.prediction_coefs", "altup_correct_coef": "altup.correction_coefs"},
    **{"laurel_l": "laurel.linear_left", "laurel_r": "laurel.linear_right"},
    "laurel_post_norm": "laurel.post_laurel_norm",
}


@dataclass(frozen=True, slots=True)
class GgufHead:
    """The description of a model in a GGUF file, without most tensor values."""

    architecture: str
    metadata: Fields
    shapes: Mapping[str, Sequence[int]]  # by name, rows first ([out, in]); some facts are only there
    rope: Mapping[str, tuple[float, ...]]  # values of the ROPE_TENSORS in the file

    @property
    def fields(self) -> dict[str, object]:
        """The metadata of its architecture, without the architecture's name."""
        begin = f"{self.architecture}."
        return {key[len(begin) :]: value for key, value in self.metadata.items() if key.startswith(begin)}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """How to read the GGUF files of one architecture: as a Llama, apart from the fields that differ."""

    architecture: str
    family: Family
    adjusted: Callable[[ModelConfig, GgufHead], ModelConfig] = lambda config, _: config  # by its own keys
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields with one value in the whole architecture
    inside: Inside | Callable[[GgufHead], Inside] = field(default_factory=lambda: INSIDE)
    neighbours: bool = False  # see Names
    ones: tuple[str, ...] = ()  # see Names
    rope: bool = True
    reads_next: bool = False  # True if its layer for further tokens is a draft head
    theta: float = 10000.0  # rope's default
    given: Callable[[GgufHead], GgufHead] = lambda head: head  # converts metadata before they are read

    def names(self, head: GgufHead) -> Names:
        """The map from a file's tensor names to the decoder's."""
        inside = self.inside(head) if callable(self.inside) else self.inside
        return Names(
            *("blk.", OUTSIDE, inside, _EXPERT_STACKS),
            whole=_WHOLE,
            neighbours=self.neighbours,
            ones=self.ones,
        )

    def config(self, head: GgufHead) -> ModelConfig:
        """The config of a file; raises ModelError for anything unsupported."""
        given = self.given(head)
        c, shapes = given.fields, given.shapes
        hidden = count(c, "embedding_length")
        heads = count(c, "attention.head_count")
        layers = integer(c, "block_count", limit=MAX_LAYERS) - next_layers(c)
        head_dim = count(c, "attention.key_length", hidden // heads)
        if integer(c, "attention.value_length", head_dim) != head_dim:
            raise ModelError(
                "the GGUF file has key and value heads of different sizes, which is not supported"
            )
        rotated = count(c, "rope.dimension_count", head_dim)
        context = integer(c, "context_length")
        part = None if rotated == head_dim else rotated
        rope = rope_from_gguf(c, context, self.theta, given.rope, part) if self.rope else None
        if "token_embd.weight" not in shapes:
            raise ModelError("the GGUF file has no token_embd.weight; it is not a complete language model")
        norm = self.fixed.get("norm", Norm.RMS)

        def has(*ends: str) -> bool:
            """True if a tensor's name ends like this."""
            return any(name.endswith(ends) for name in shapes)

        config = ModelConfig(
            family=self.family,
            vocab_size=shapes["token_embd.weight"][0],
            hidden_size=hidden,
            intermediate_size=of_all_layers(
                c, "feed_forward_length", integer(c, "expert_feed_forward_length", 0) or None
            ),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=of_all_layers(c, "attention.head_count_kv", heads),
            head_dim=head_dim,
            norm=norm,
            norm_bias="output_norm.bias" in shapes,
            norm_eps=number(c, f"attention.layer_norm_{'rms_' if norm is Norm.RMS else ''}epsilon"),
            rope=rope,
            layer_windows=(window_of(c),) * layers,
            tie_embeddings="output.weight" not in shapes,
            qkv_bias=has(".attn_q.bias", ".attn_qkv.bias"),
            o_bias=has(".attn_output.bias"),
            mlp_bias=has(".ffn_down.bias"),
            qk_norm=QkNorm.HEAD if has(".attn_q_norm.weight") else QkNorm.NONE,
            qkv_clip=optional_positive(c, "attention.clamp_kqv"),
            embedding_scale=positive(c, "embedding_scale", 1.0),
            attention_scale=positive(c, "attention.scale", float(head_dim) ** -0.5),
            attention_softcap=optional_positive(c, "attn_logit_softcapping"),
            residual_scale=positive(c, "residual_scale", 1.0),
            logit_softcap=optional_positive(c, "final_logit_softcapping"),
            max_context=longest_text(rope, context),
            eos_ids=tuple(
                dict.fromkeys(
                    token
                    for kind in ("eos", "eot", "eom")
                    for token in all_ids((head.metadata,), f"tokenizer.ggml.{kind}_token_id")
                )
            ),
        )
        return self.adjusted(replace(config, **self.fixed), head)


def of_all_layers(c: Fields, key: str, default: int | None = None) -> int:
    """A size that the file has once, or for each layer, 0 in those without it."""
    value = c.get(key)
    if not isinstance(value, list):
        return integer(c, key, default)
    sizes = {integer({key: one}, key) for one in value} - {0}
    if len(sizes) != 1:
        raise ModelError(f"{key} is {sorted(sizes)} in different layers; supported: one for all layers")
    return sizes.pop()


def next_layers(c: Fields) -> int:
    """The number of layers behind the model's own that predict further tokens."""
    return integer(c, "nextn_predict_layers", 0, limit=MAX_LAYERS)


def further_layers(architecture: str, metadata: Fields) -> range:
    """Those layers, by their numbers in the file."""
    c = GgufHead(architecture, metadata, {}, {}).fields
    layers = integer(c, "block_count", limit=MAX_LAYERS)
    return range(layers - next_layers(c), layers)


def window_of(c: Fields) -> int | None:
    """The sliding window of layers that have one."""
    return integer(c, "attention.sliding_window", 0) or None


def windows(config: ModelConfig, head: GgufHead, sees: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer, of layers for which `sees` is true."""
    window = window_of(head.fields)
    return tuple(window if sees(layer) else None for layer in range(config.num_layers))


def rope_from_gguf(
    c: Fields,
    context: int,
    theta: float,
    tensors: Mapping[str, tuple[float, ...]],
    rotated: int | None,
) -> Rope:
    """The embedding as computed by llama.cpp; `context` is the maximum length, `tensors` are ROPE_TENSORS."""
    theta = positive(c, "rope.freq_base", theta)
    divisors, short, long = map(tensors.get, ROPE_TENSORS)
    kind = c.get("rope.scaling.type", "linear" if "rope.scale_linear" in c else "none")
    scale = positive(c, "rope.scaling.attn_factor", 1.0)
    if short is not None or long is not None:
        if short is None or long is None or divisors is not None or kind not in ("none", "longrope"):
            raise ModelError(
                f"the GGUF file has {', '.join(tensors)} and {kind!r} scaling; supported: rope_factors_short "
                "and rope_factors_long together, without other scaling"
            )
        original = count(c, "rope.scaling.original_context_length", context)
        return Rope(
            theta, longrope=LongRope(short, long, original, max(original, context), scale), rotated=rotated
        )
    if divisors is not None:
        if kind not in ("none", "llama3"):
            raise ModelError(f"the GGUF file has rope_freqs and {kind!r} scaling; supported: one of them")
        return Rope(theta, divisors=divisors, rotated=rotated)
    if kind == "yarn":
        factor = positive(c, "rope.scaling.factor")
        if number(c, "rope.scaling.yarn_ext_factor", 1.0) != 1:
            raise ModelError("rope.scaling.yarn_ext_factor is not 1, which is not supported")
        log = number(c, "rope.scaling.yarn_log_multiplier", 0.0)
        scale *= positive(c, "rope.scaling.yarn_attn_factor", 1.0)
        scale *= yarn_attention_factor(factor) / (yarn_attention_factor(factor, log) if log else 1.0)
        return Rope(
            theta,
            yarn=YarnScaling(
                factor,
                count(c, "rope.scaling.original_context_length", context),
                attention_factor=scale,
                beta_fast=positive(c, "rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=positive(c, "rope.scaling.yarn_beta_slow", 1.0),
            ),
            rotated=rotated,
        )
    if scale != 1:
        raise ModelError(f"rope.scaling.attn_factor is {scale} without YaRN, which is not supported")
    if kind == "none":
        return Rope(theta, rotated=rotated)
    if kind == "linear":
        factor = positive(c, "rope.scaling.factor", positive(c, "rope.scale_linear", 1.0))
        return Rope(theta, linear_factor=factor, rotated=rotated)
    raise ModelError(
        f"the GGUF rope scaling is {kind!r}; supported: none, linear, yarn, or a rope_freqs tensor"
    )
