"""Hybrids of attention and recurrent layers: LFM2 with short convolutions, Qwen3-Next and Qwen3.5.

Qwen's have gated delta rules, and gated attention, which rotates a quarter of each head.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

from specinfer.errors import ModelError
from specinfer.kernels.recurrence_config import GateNorm, LayerKind, Recurrence
from specinfer.models.config import Family, ModelConfig, QkNorm
from specinfer.models.families.mixtures import (
    EXPERT_STACKS,
    expert_stacks,
    experts_of_qwen,
    numbered_names,
    sigmoid_experts,
    with_experts,
    with_gguf_experts,
)
from specinfer.models.fields import Fields, boolean, count, integer, positive
from specinfer.models.gguf_config import POST_ATTENTION, GgufFamily, GgufHead
from specinfer.models.hf_config import BIASED, ConfigKeys, HfFamily, check_silu, defaults, not_computed
from specinfer.models.sources import BETA_A, FACTOR_GATE_X, GATED_QUERY, QKVZ, Inside, Names

_LFM2: Final[Fields] = {
    **defaults(eps=1e-5, context=128000, tied=True, rope_theta=1e6),
    **{"norm_eps": 1e-5, "num_key_value_heads": 8, "conv_L_cache": 3, "intermediate_size": 12288},
}
_LFM2_MOE: Final[Fields] = {
    **_LFM2,
    **{"num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792},
}
_EPSILON: Final = 1e-6  # as in transformers
# Keys of published files that repeat others.
_PASSED_OVER: Final = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
    *("use_pos_enc", "theta"),
)
_FORM: Final[Mapping[str, Any]] = {"qk_norm": QkNorm.HEAD}
_NAMES: Final = Names(
    outside={"model.embedding_norm": "model.norm"},
    inside={
        **{"operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
        **{f"self_attn.{name}_layernorm": f"self_attn.{name}_norm" for name in "qk"},
        **{"self_attn.out_proj": "self_attn.o_proj", "feed_forward.gate": "mlp.gate"},
        **{"conv.in_proj": FACTOR_GATE_X, "conv.conv": "mixer.conv", "conv.out_proj": "mixer.out_proj"},
        **numbered_names("feed_forward", "mlp"),
        **numbered_names("feed_forward.experts.*", "mlp.experts.*"),
    },
    expert_stacks=expert_stacks("feed_forward.experts"),
    whole={"feed_forward.expert_bias": "mlp.gate.choice_bias"},
)

_QWEN: Final[Fields] = {
    **defaults(eps=1e-6, context=32768, partial_rotary_factor=0.25, head_dim=256, attention_bias=False),
    **{"num_key_value_heads": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32},
}
_QWEN_MOE: Final[Fields] = {
    **_QWEN,
    **{"num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512},
    **{"shared_expert_intermediate_size": 512, "decoder_sparse_step": 1},
}
_NEXT: Final = {**_QWEN_MOE, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True}


def mixer_names(prefix: str) -> dict[str, str]:
    """Names of a recurrence's convolution, norm and last product."""
    theirs = {"conv1d": "conv", "norm": "norm", "out_proj": "out_proj"}
    return {f"{prefix}.{name}": f"mixer.{ours}" for name, ours in theirs.items()}


def mixer_vectors(prefix: str) -> dict[str, str]:
    """Full names of a recurrence's vectors."""
    theirs = {"A_log": "decay", "dt_bias": "dt_bias", "D": "skip"}
    return {f"{prefix}.{name}": f"mixer.{ours}" for name, ours in theirs.items()}


_QWEN_NAMES: Final = Names(
    inside={
        "self_attn.q_proj": GATED_QUERY,
        **{"linear_attn.in_proj_qkvz": QKVZ, "linear_attn.in_proj_qkv": QKVZ[:3]},
        **{"linear_attn.in_proj_z": QKVZ[3], "linear_attn.in_proj_ba": BETA_A},
        **{"linear_attn.in_proj_b": BETA_A[0], "linear_attn.in_proj_a": BETA_A[1]},
        **mixer_names("linear_attn"),
    },
    whole=mixer_vectors("linear_attn"),
    expert_stacks=EXPERT_STACKS,
)
_QWEN_GGUF: Final[Inside] = {
    **{**POST_ATTENTION, "attn_q": GATED_QUERY, "attn_qkv": QKVZ[:3], "attn_gate": QKVZ[3]},
    "ssm_in": QKVZ,
    **{"ssm_beta": BETA_A[0], "ssm_alpha": BETA_A[1], "ssm_ba": BETA_A},
}
_QWEN_GGUF_FORM: Final[Mapping[str, Any]] = {"qk_norm": QkNorm.HEAD, "gated_attention": True}


def with_kinds(
    config: ModelConfig, c: Fields, kinds: Mapping[str, LayerKind], recurrence: Recurrence
) -> ModelConfig:
    """The config with the kinds of layers that config.json lists, by its names of them."""
    listed = c.get("layer_types")
    if not isinstance(listed, list) or len(listed) != config.num_layers or not set(listed) <= kinds.keys():
        raise ModelError(
            f"layer_types is {str(listed)[:80]}; expected {config.num_layers} of "
            f"{', '.join(map(repr, kinds))}. The config is damaged, or of a newer kind."
        )
    found = tuple(kinds[kind] for kind in listed)
    if set(found) == {LayerKind.ATTENTION}:
        return config
    return replace(config, layer_kinds=found, recurrence=recurrence)


def _with_tie(c: Fields) -> Fields:
    """Add the key that has another name in older files."""
    return {**c, "tie_word_embeddings": boolean(c, "tie_embedding", bool(c["tie_word_embeddings"]))}


def _lfm2_given(c: Fields) -> Fields:
    """Add the keys that older files have under other names."""
    given = dict(_with_tie(c))
    if c.get("layer_types") is None:
        layers = range(integer(c, "num_hidden_layers"))
        full = c.get("full_attn_idxs")
        attends = layers if full is None else full
        if not isinstance(attends, list | range):
            raise ModelError(f"full_attn_idxs is {full!r}; expected a list of layers. The config is damaged.")
        given["layer_types"] = ["full_attention" if layer in attends else "conv" for layer in layers]
    size = integer(c, "block_ff_dim", integer(c, "intermediate_size"))
    if boolean(c, "block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        if c.get("block_ffn_dim_multiplier", 1.0) is not None:
            size = int(positive(c, "block_ffn_dim_multiplier", 1.0) * size)
            step = count(c, "block_multiple_of", 256)
            size = -(-size // step) * step
    return {**given, "intermediate_size": size}


def _lfm2(config: ModelConfig, c: Fields) -> ModelConfig:
    biased = boolean(c, "conv_bias", False)
    recurrence = Recurrence(
        kind=LayerKind.SHORT_CONV,
        taps=count(c, "conv_L_cache"),
        channels=config.hidden_size,
        conv_bias=biased,
        bias=biased,
        out_bias=biased,
    )
    kinds = {"full_attention": LayerKind.ATTENTION, "conv": LayerKind.SHORT_CONV}
    return with_kinds(config, c, kinds, recurrence)


def _lfm2_moe(config: ModelConfig, c: Fields) -> ModelConfig:
    dense = frozenset(range(min(integer(c, "num_dense_layers"), config.num_layers)))
    biased = boolean(c, "use_expert_bias", True)
    experts = sigmoid_experts(c, "num_experts", dense_layers=dense, choice_bias=biased, epsilon=_EPSILON)
    return with_experts(_lfm2(config, c), experts)


def _qwen_given(c: Fields) -> Fields:
    """Add the keys that transformers fills in."""
    check_silu(c, "hidden_act", "a gated delta rule")
    if not boolean(c, "attn_output_gate", True):
        raise not_computed("attn_output_gate", False, c["model_type"])
    if c.get("layer_types") is not None:
        return c
    layers, every = range(integer(c, "num_hidden_layers")), count(c, "full_attention_interval", 4)
    kinds = ["full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in layers]
    return {**c, "layer_types": kinds}


def _qwen_moe_given(c: Fields) -> Fields:
    return _qwen_given({**c, "norm_topk_prob": True, "intermediate_size": count(c, "moe_intermediate_size")})


def _qwen(config: ModelConfig, c: Fields, *, tiled: bool = False) -> ModelConfig:
    keys = "num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    heads, groups, key_size, value_size, taps = (count(c, f"linear_{key}") for key in keys)
    recurrence = Recurrence(
        kind=LayerKind.GATED_DELTA,
        taps=taps,
        channels=2 * groups * key_size + heads * value_size,
        heads=heads,
        groups=groups,
        tiled=tiled,
        key_size=key_size,
        value_size=value_size,
        norm=GateNorm.BEFORE,
        norm_groups=heads,
        norm_eps=config.norm_eps,
    )
    kinds = {"full_attention": LayerKind.ATTENTION, "linear_attention": LayerKind.GATED_DELTA}
    return with_kinds(config, c, kinds, recurrence)


def _qwen_moe(config: ModelConfig, c: Fields) -> ModelConfig:
    config = _qwen(config, c)
    if not integer(c, "num_experts"):
        return config
    shared = count(c, "shared_expert_intermediate_size")
    return with_experts(config, experts_of_qwen(c, config.num_layers, integer(c, "num_experts"), shared))


def _lfm2_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    c = head.fields
    kv_heads = c.get("attention.head_count_kv")
    if not isinstance(kv_heads, list) or len(kv_heads) != config.num_layers:
        raise ModelError("the GGUF file has no attention.head_count_kv of each layer; get the file again")
    given = {
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "conv_L_cache": count(c, "shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.conv.bias") for name in head.shapes),
    }
    return _lfm2(config, given)


def _lfm2_moe_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    return with_gguf_experts(_lfm2_from_gguf(config, head), head, normalized=True, epsilon=_EPSILON)


def _qwen_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    c = head.fields
    keys = {"num_key_heads": "group_count", "key_head_dim": "state_size", "conv_kernel_dim": "conv_kernel"}
    given: dict[str, object] = {f"linear_{ours}": count(c, f"ssm.{theirs}") for ours, theirs in keys.items()}
    heads, groups = count(c, "ssm.time_step_rank"), count(c, "ssm.group_count")
    given |= {"linear_num_value_heads": heads, "linear_value_head_dim": count(c, "ssm.inner_size") // heads}
    every = c.get("full_attention_interval")
    given |= {"num_hidden_layers": config.num_layers, "full_attention_interval": every}
    # llama.cpp's converter reorders the value heads of Qwen3.5, but not those of Qwen3-Next.
    tiled = heads != groups and config.family is not Family.QWEN3_NEXT
    return _qwen(config, _qwen_given(given), tiled=tiled)


def _qwen_moe_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    return with_gguf_experts(_qwen_from_gguf(config, head), head, normalized=True)


_LFM2_GGUF: Final = partial(GgufFamily, fixed=_FORM, theta=1e6)
_QWENS_GGUF: Final = partial(GgufFamily, fixed=_QWEN_GGUF_FORM, inside=_QWEN_GGUF, reads_next=True)
GGUF: Final = (
    _LFM2_GGUF("lfm2", Family.LFM2, _lfm2_from_gguf),
    _LFM2_GGUF("lfm2moe", Family.LFM2_MOE, _lfm2_moe_from_gguf),
    _QWENS_GGUF("qwen35", Family.QWEN3_5, _qwen_from_gguf),
    _QWENS_GGUF("qwen35moe", Family.QWEN3_5_MOE, _qwen_moe_from_gguf),
    _QWENS_GGUF("qwen3next", Family.QWEN3_NEXT, _qwen_moe_from_gguf),
)
_LFM2S: Final = partial(
    HfFamily,
    keys=ConfigKeys(norm_eps="norm_eps"),
    fixed=_FORM,
    names=_NAMES,
    passed_over=frozenset(_PASSED_OVER),
)
_QWENS: Final = partial(
    HfFamily,
    keys=BIASED,
    fixed={**_QWEN_GGUF_FORM, "norm_weight_offset": 1.0},
    names=_QWEN_NAMES,
    others=("mtp.",),
)
HF: Final = (
    _LFM2S(Family.LFM2, _LFM2, adjusted=_lfm2, given=_lfm2_given),
    _LFM2S(Family.LFM2_MOE, _LFM2_MOE, adjusted=_lfm2_moe, given=_with_tie),
    _QWENS(Family.QWEN3_NEXT, _NEXT, adjusted=_qwen_moe, given=_qwen_given),
    _QWENS(Family.QWEN3_5, _QWEN, adjusted=_qwen, given=_qwen_given),
    _QWENS(Family.QWEN3_5_MOE, _QWEN_MOE, adjusted=_qwen_moe, given=_qwen_moe_given),
)
