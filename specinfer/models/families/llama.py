"""Llama and its relatives: RMSNorm, rope and a gated MLP.

They differ in biases, windows, norm places, factors and fused projections. Mistral, Qwen2, Qwen3, SmolLM3,
Seed-OSS, ERNIE 4.5, Helium, CWM, EXAONE 4, Granite, and Phi-3 and Phi-4, whose long variants have LongRoPE.
GLM-4 rotates half of each head and, from the 0414 models on, has four norms.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from specinfer.errors import ModelError
from specinfer.models.config import Family, ModelConfig, NormPlace, QkNorm
from specinfer.models.families.mixtures import (
    granite_factors,
    granite_logits,
    window_everywhere,
    with_gguf_experts,
)
from specinfer.models.fields import Fields, count, integer, number
from specinfer.models.gguf_config import BEHIND, BOTH_SIDES, INSIDE, POST_ATTENTION, GgufFamily, GgufHead
from specinfer.models.gguf_config import window_of as gguf_window
from specinfer.models.gguf_config import windows as gguf_windows
from specinfer.models.hf_config import (
    ALL_BIASED,
    BIASED,
    USUAL,
    ConfigKeys,
    HfFamily,
    but_every,
    defaults,
    switched_window,
    window_of,
    windows,
    with_rope,
)
from specinfer.models.next_layer import MIMO
from specinfer.models.sources import GATE_UP, QKV, Names

# Defaults of transformers for keys that config.json omits.
_LLAMA: Final = defaults(eps=1e-6, context=2048)
_MISTRAL: Final = defaults(eps=1e-6, context=131072, sliding_window=4096)
_MINISTRAL: Final = defaults(
    eps=1e-5, context=262144, num_key_value_heads=8, head_dim=128, sliding_window=None
)
_MINISTRAL_ROPE: Final[Fields] = {
    **{"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    **{"original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1},
}
_QWEN: Final = defaults(eps=1e-6, context=32768, sliding_window=4096, max_window_layers=28)
_QWEN_VL: Final[Fields] = {**_QWEN, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "max_window_layers": 80}
_QWEN_VL_NAMES: Final = ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
_QWEN3_VL: Final = defaults(eps=1e-6, context=128000, head_dim=128, rope_theta=500000.0)
_SMOLLM3: Final = defaults(
    eps=1e-6, context=32768, tied=True, num_key_value_heads=4, no_rope_layer_interval=4, rope_theta=2000000.0
)
_SEED: Final = defaults(eps=1e-6, context=524288, num_key_value_heads=8, head_dim=128, attention_bias=True)
_ERNIE: Final = defaults(
    eps=1e-5, context=131072, tied=True, num_key_value_heads=2, head_dim=128, rope_theta=500000.0
)
_ERNIE_KEYS: Final = ConfigKeys(qkv_bias="use_bias", o_bias="use_bias", mlp_bias="use_bias")
_HELIUM: Final = defaults(eps=1e-8, context=4096, num_key_value_heads=20, head_dim=128, rope_theta=100000.0)
_CWM: Final = defaults(
    eps=1e-5, context=131072, num_key_value_heads=8, head_dim=128, sliding_window=8192, rope_theta=1000000.0
)
_CWM_ROPE: Final[Fields] = {
    **{"rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}
_CWM_ENDS: Final = (128001, 128008, 128009)  # end-of-text ids if config.json has none
_EXAONE: Final = defaults(
    eps=1e-5, context=2048, num_key_value_heads=32, sliding_window=4096, sliding_window_pattern=4
)
_EXAONE_NORMS: Final[Mapping[str, Any]] = {"qk_norm": QkNorm.HEAD, "norm_place": NormPlace.BEHIND}
_GRANITE: Final = defaults(eps=1e-6, context=2048)
_PHI: Final = defaults(eps=1e-5, context=4096, original_max_position_embeddings=4096)
_OLD_NAMES: Final = ("su", "yarn")  # earlier names of longrope
_GLM: Final[Fields] = {
    **defaults(eps=1.5625e-07, context=131072, num_key_value_heads=2, head_dim=128),
    **{"partial_rotary_factor": 0.5, "attention_bias": True},
}
_GLM_ENDS: Final = (151329, 151336, 151338)  # end-of-text ids if config.json has none
_GLM_KEYS: Final = ConfigKeys(qkv_bias="attention_bias")
_GLM_4: Final[Mapping[str, Any]] = {"norm_place": NormPlace.BOTH}
_FUSED: Final = {"mlp.gate_up_proj": GATE_UP}
_FUSED_GGUF: Final = {"attn_qkv": QKV, "ffn_up": GATE_UP}


def _qwen(config: ModelConfig, c: Fields) -> ModelConfig:
    first = integer(c, "max_window_layers")
    return replace(config, layer_windows=windows(c, switched_window(c), lambda layer: layer >= first))


def _ministral_given(c: Fields) -> Fields:
    return with_rope(c, _MINISTRAL_ROPE)


def _ministral(config: ModelConfig, c: Fields) -> ModelConfig:
    """Later positions than those of the original context scale their queries, so texts end there."""
    rope = c["rope_parameters"] if c.get("rope_parameters") is not None else c["rope_scaling"]
    assert isinstance(rope, Mapping), "rope_from_hf has read it"
    if rope.get("llama_4_scaling_beta"):
        original = count(rope, "original_max_position_embeddings", config.max_context)
        config = replace(config, max_context=min(config.max_context, original))
    return window_everywhere(config, c)


def _ministral_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    if not number(head.fields, "attention.temperature_scale", 0.0):
        return config
    original = count(head.fields, "rope.scaling.original_context_length", config.max_context)
    return replace(config, max_context=min(config.max_context, original))


def _smollm3(config: ModelConfig, c: Fields) -> ModelConfig:
    plain = without_rope(c, config.num_layers)
    found = windows(c, switched_window(c), lambda layer: layer in plain)
    return replace(config, layer_windows=found, layers_without_rope=plain)


def without_rope(c: Fields, layers: int) -> frozenset[int]:
    """The layers without rope: every fourth, or those whose entry of a list is 0."""
    flags = c.get("no_rope_layers")
    if flags is None or flags == []:
        every = count(c, "no_rope_layer_interval")
        flags = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(flags, list) or len(flags) < layers or any(one not in (0, 1) for one in flags):
        raise ModelError(
            f"no_rope_layers is {str(flags)[:80]}; expected 0 or 1 for each of {layers} layers. "
            "The config is damaged."
        )
    return frozenset(layer for layer in range(layers) if not flags[layer])


def _smollm3_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    """No key holds the layers without rope; llama.cpp uses every fourth."""
    return replace(config, layers_without_rope=without_rope(_SMOLLM3, config.num_layers))


def _llama_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    """Files of Mistral and Mixtral have the architecture llama, too."""
    if not integer(head.fields, "expert_count", 0):
        return config
    return with_gguf_experts(replace(config, family=Family.MIXTRAL), head, normalized=True)


def _cwm_given(c: Fields) -> Fields:
    c = with_rope(c, _CWM_ROPE)
    return {**c, "sliding_window": None} if c["sliding_window"] == 0 else c  # as in transformers


def _cwm(config: ModelConfig, c: Fields) -> ModelConfig:
    found = windows(c, window_of(c), lambda layer: layer % 4 != 0)
    return replace(config, layer_windows=found, eos_ids=config.eos_ids or _CWM_ENDS)


def _exaone(config: ModelConfig, c: Fields) -> ModelConfig:
    window = window_of(c)
    # The pattern is ignored if layer_types is set; it is "LLLG" in some files.
    ignored = window is None or c.get("layer_types") is not None
    pattern = 1 if ignored else count(c, "sliding_window_pattern")
    return _with_windows(config, windows(c, window, but_every(pattern)), window)


def _with_windows(config: ModelConfig, found: tuple[int | None, ...], window: int | None) -> ModelConfig:
    """If some layers have a window, the others have no rope."""
    plain = [] if window is None else [layer for layer, own in enumerate(found) if own is None]
    return replace(config, layer_windows=found, layers_without_rope=frozenset(plain))


def _exaone_from_gguf(config: ModelConfig, head: GgufHead) -> ModelConfig:
    pattern = count(head.fields, "attention.sliding_window_pattern", 4)
    return _with_windows(config, gguf_windows(config, head, but_every(pattern)), gguf_window(head.fields))


def _phi3(config: ModelConfig, c: Fields) -> ModelConfig:
    window = window_of(c)
    if window is not None and window >= integer(c, "max_position_embeddings"):
        window = None  # Phi-4-mini's exceeds its context
    return replace(config, layer_windows=(window,) * config.num_layers)


def _with_new_names(c: Fields) -> Fields:
    """Replace the earlier names of longrope."""
    key = "rope_scaling" if c.get("rope_parameters") is None else "rope_parameters"
    rope = c.get(key)
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) not in _OLD_NAMES:
        return c
    return {**c, key: {**rope, "rope_type": "longrope"}}


def _glm(config: ModelConfig, c: Fields) -> ModelConfig:
    return replace(config, eos_ids=config.eos_ids or _GLM_ENDS)


HF: Final = (
    HfFamily(Family.LLAMA, _LLAMA, ALL_BIASED),
    HfFamily(Family.MISTRAL, _MINISTRAL, USUAL, _ministral, given=_ministral_given, also=("ministral3",)),
    HfFamily(Family.MISTRAL, _MISTRAL, USUAL, window_everywhere),
    HfFamily(Family.QWEN2, _QWEN_VL, USUAL, _qwen, {"qkv_bias": True}, also=_QWEN_VL_NAMES),
    HfFamily(
        *(Family.QWEN2, _QWEN, USUAL, _qwen, {"qkv_bias": True}),
        also=("mimo",),
        others=("model.mtp_layers.",),
        next_names=MIMO,
        passed_over=frozenset({"attention_bias"}),  # as in every Qwen2
    ),
    HfFamily(Family.QWEN2, _QWEN, USUAL, _qwen, {"qkv_bias": True}),
    HfFamily(Family.QWEN3, _QWEN3_VL, BIASED, fixed={"qk_norm": QkNorm.HEAD}, also=("qwen3_vl_text",)),
    HfFamily(Family.QWEN3, {**_QWEN, "head_dim": 128}, BIASED, _qwen, {"qk_norm": QkNorm.HEAD}),
    HfFamily(Family.SMOLLM3, _SMOLLM3, ALL_BIASED, _smollm3),
    HfFamily(Family.SEED_OSS, _SEED, replace(ALL_BIASED, o_bias="attention_out_bias")),
    HfFamily(Family.ERNIE4_5, _ERNIE, _ERNIE_KEYS, names=Names(neighbours=True)),
    HfFamily(Family.HELIUM, _HELIUM, replace(ALL_BIASED, o_bias=""), names=Names(neighbours=True)),
    HfFamily(Family.CWM, _CWM, ConfigKeys(mlp_bias="mlp_bias"), _cwm, given=_cwm_given),
    HfFamily(Family.EXAONE4, _EXAONE, USUAL, _exaone, _EXAONE_NORMS),
    HfFamily(Family.GRANITE, _GRANITE, ALL_BIASED, granite_factors),
    HfFamily(
        Family.PHI3,
        _PHI,
        USUAL,
        _phi3,
        given=_with_new_names,
        names=Names(inside={"self_attn.qkv_proj": QKV, **_FUSED}),
    ),
    HfFamily(Family.GLM, _GLM, _GLM_KEYS, _glm, names=Names(inside=_FUSED, neighbours=True)),
    HfFamily(
        Family.GLM4,
        _GLM,
        _GLM_KEYS,
        _glm,
        _GLM_4,
        names=Names(
            inside={
                **_FUSED,
                "post_self_attn_layernorm": "post_attention_layernorm",
                "post_attention_layernorm": "pre_feedforward_layernorm",
                "post_mlp_layernorm": "post_feedforward_layernorm",
            },
            neighbours=True,
        ),
    ),
)
GGUF: Final = (
    GgufFamily("llama", Family.LLAMA, _llama_from_gguf, neighbours=True),
    GgufFamily("mistral3", Family.MISTRAL, _ministral_from_gguf, neighbours=True),
    GgufFamily("qwen2", Family.QWEN2),
    GgufFamily("qwen3", Family.QWEN3),
    GgufFamily("qwen2vl", Family.QWEN2),
    GgufFamily("qwen3vl", Family.QWEN3),
    GgufFamily("smollm3", Family.SMOLLM3, _smollm3_from_gguf, neighbours=True),
    GgufFamily("seed_oss", Family.SEED_OSS, inside=POST_ATTENTION),
    GgufFamily("ernie4_5", Family.ERNIE4_5, neighbours=True),
    GgufFamily("exaone4", Family.EXAONE4, _exaone_from_gguf, _EXAONE_NORMS, BEHIND),
    GgufFamily("granite", Family.GRANITE, granite_logits, neighbours=True),
    GgufFamily("phi3", Family.PHI3, inside={**INSIDE, **_FUSED_GGUF}),
    GgufFamily("chatglm", Family.GLM, inside={**INSIDE, **_FUSED_GGUF}, neighbours=True),
    GgufFamily("glm4", Family.GLM4, fixed=_GLM_4, inside={**BOTH_SIDES, **_FUSED_GGUF}, neighbours=True),
)
