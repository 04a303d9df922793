"""config.json of a Hugging Face folder -> ModelConfig, and its rotary embeddings <-> Rope.

Anything it asks for that the decoder does not compute is refused with a ModelError; nothing is skipped in
silence. transformers 4 writes rope_theta, rope_scaling and partial_rotary_factor beside the other fields;
transformers 5 writes all of them into rope_parameters, where layers differ with an entry for each kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from specinfer.errors import ModelError
from specinfer.hub.foreign_format import quantized_config
from specinfer.models.config import (
    Activation,
    DynamicScaling,
    Family,
    Llama3Scaling,
    ModelConfig,
    Rope,
    YarnScaling,
)
from specinfer.models.fields import (
    MOST_LAYERS,
    all_ids,
    boolean,
    count,
    integer,
    mapping,
    number,
    optional_number,
    optional_positive,
    positive,
)

Fields = Mapping[str, object]
# What transformers fills in when config.json leaves it out (its own files often do, Gemma 3's above all).
_LLAMA_DEFAULTS: dict[str, object] = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_HF_DEFAULTS: dict[Family, dict[str, object]] = {
    Family.LLAMA: {**_LLAMA_DEFAULTS, "max_position_embeddings": 2048},
    Family.MISTRAL: {**_LLAMA_DEFAULTS, "max_position_embeddings": 131072, "sliding_window": 4096},
    Family.QWEN2: {**_LLAMA_DEFAULTS, "max_position_embeddings": 32768, "max_window_layers": 28},
    Family.QWEN3: {**_LLAMA_DEFAULTS, "max_position_embeddings": 32768, "max_window_layers": 28}
    | {"head_dim": 128},
    Family.GEMMA3: {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
}
# The classes of transformers by which configs are written.
ARCHITECTURES: Final = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.MISTRAL: "MistralForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
}
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


def ropes_from_hf(family: Family, c: Fields, head_dim: int) -> tuple[Rope, Rope | None]:
    """The embedding of layers that see everything, and that of layers with a window where it is another one.

    Raises ModelError on anything unsupported.
    """
    theta = positive(c, "rope_theta", 10000.0)
    scaling = c.get("rope_scaling")
    parameters = c.get("rope_parameters")
    if family is not Family.GEMMA3:
        return _rope(scaling if parameters is None else parameters, theta, c, head_dim), None
    local_theta = positive(c, "rope_local_base_freq", 10000.0)
    if parameters is None:
        of_all, local = _rope(scaling, theta, c, head_dim), _rope(None, local_theta, c, head_dim)
    else:
        if not isinstance(parameters, dict):
            raise ModelError(f"rope_parameters is {parameters!r}; expected one entry per layer type")
        of_all = _rope(parameters.get("full_attention"), theta, c, head_dim)
        local = _rope(parameters.get("sliding_attention"), local_theta, c, head_dim)
    if of_all.rotated != local.rotated:
        raise ModelError("partial_rotary_factor differs between layers; supported: one for all layers")
    return of_all, local


def longest_text(rope: Rope | None, said: int) -> int:
    """The tokens of the longest text, of a model whose config says so many.

    Such configs often hold the context before it was extended: YaRN and dynamic scaling are what extends it.
    """
    scaling = None if rope is None else rope.yarn or rope.dynamic
    return said if scaling is None else max(said, int(scaling.factor * scaling.original_context))


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """What cos and sin are multiplied by for YaRN of this factor, where the model says nothing else."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rope_to_hf(rope: Rope) -> dict[str, object] | None:
    """rope_scaling as transformers 4 and 5 read it; None where there is none.

    Raises ModelError for embeddings that it has no words for.
    """
    if rope.rotated is not None or rope.divisors is not None:
        raise ModelError("rotary embeddings of a part of each head, or with divisors, cannot be written")
    if rope.linear_factor != 1.0:
        return {"rope_type": "linear", "factor": rope.linear_factor}
    if rope.dynamic is not None:
        return {"rope_type": "dynamic", "factor": rope.dynamic.factor}
    if rope.llama3 is not None:
        return {
            "rope_type": "llama3",
            "factor": rope.llama3.factor,
            "low_freq_factor": rope.llama3.low_freq_factor,
            "high_freq_factor": rope.llama3.high_freq_factor,
            "original_max_position_embeddings": rope.llama3.original_context,
        }
    if rope.yarn is not None:
        return {
            "rope_type": "yarn",
            "factor": rope.yarn.factor,
            "original_max_position_embeddings": rope.yarn.original_context,
            "attention_factor": rope.yarn.attention_factor,
            "beta_fast": rope.yarn.beta_fast,
            "beta_slow": rope.yarn.beta_slow,
            "truncate": rope.yarn.truncate,
        }
    return None


def layers_to_hf(config: ModelConfig, rope_theta: float) -> dict[str, object]:
    """What config.json says of the sizes and layers of a model of one of ARCHITECTURES."""
    return {
        "model_type": str(config.family),
        "architectures": [ARCHITECTURES[config.family]],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope_theta,
        "mlp_bias": config.mlp_bias,
    }


def _rope(parameters: object, theta: float, c: Fields, head_dim: int) -> Rope:
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise ModelError(f"the rope parameters are {parameters!r}; expected a JSON object")
    theta = positive(parameters, "rope_theta", theta)
    share = positive(parameters, "partial_rotary_factor", positive(c, "partial_rotary_factor", 1.0))
    if share > 1:
        raise ModelError(f"partial_rotary_factor is {share}; allowed: more than 0, up to 1")
    rotated = int(head_dim * share)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    nested = any(isinstance(value, dict) for value in parameters.values())
    if not isinstance(kind, str) or kind not in _SCALINGS or nested:
        shown = {key: value for key, value in parameters.items() if not isinstance(value, list)}
        raise ModelError(f"the rope scaling is {shown!r}; supported: {', '.join(_SCALINGS)}")
    return _SCALINGS[kind](parameters, c, theta, None if rotated == head_dim else rotated)


def _plain(p: Fields, c: Fields, theta: float, rotated: int | None) -> Rope:
    return Rope(theta, rotated=rotated)


def _linear(p: Fields, c: Fields, theta: float, rotated: int | None) -> Rope:
    return Rope(theta, linear_factor=positive(p, "factor"), rotated=rotated)


def _llama3(p: Fields, c: Fields, theta: float, rotated: int | None) -> Rope:
    factor = positive(p, "factor")
    low, high = positive(p, "low_freq_factor"), positive(p, "high_freq_factor")
    if low >= high:
        raise ModelError(f"low_freq_factor is {low}; expected less than high_freq_factor, {high}")
    return Rope(theta, llama3=Llama3Scaling(factor, low, high, _original(p, c)), rotated=rotated)


def _dynamic(p: Fields, c: Fields, theta: float, rotated: int | None) -> Rope:
    factor = positive(p, "factor")
    if factor < 1:
        raise ModelError(f"factor is {factor}; allowed of dynamic rope scaling: 1 or more")
    # transformers reads no other length for this kind.
    return Rope(theta, dynamic=DynamicScaling(factor, count(c, "max_position_embeddings")), rotated=rotated)


def _yarn(p: Fields, c: Fields, theta: float, rotated: int | None) -> Rope:
    original = _original(p, c)
    factor = positive(p, "factor", count(c, "max_position_embeddings") / original)
    scale = optional_number(p, "attention_factor")
    if scale is None:
        scale = yarn_attention_factor(factor)
        both = optional_number(p, "mscale"), optional_number(p, "mscale_all_dim")
        if both[0] and both[1]:
            scale = yarn_attention_factor(factor, both[0]) / yarn_attention_factor(factor, both[1])
    if not scale > 0:
        raise ModelError(f"attention_factor is {scale}; allowed: more than 0")
    return Rope(
        theta,
        yarn=YarnScaling(
            factor,
            original,
            attention_factor=scale,
            beta_fast=optional_positive(p, "beta_fast") or 32.0,
            beta_slow=optional_positive(p, "beta_slow") or 1.0,
            truncate=boolean(p, "truncate", True),
        ),
        rotated=rotated,
    )


def _original(p: Fields, c: Fields) -> int:
    """The context before it was extended; the field beside the parameters wins, as in transformers."""
    name = "original_max_position_embeddings"
    return count(c, name, count(p, name, count(c, "max_position_embeddings")))


_SCALINGS: Mapping[str, Callable[[Fields, Fields, float, int | None], Rope]] = {
    "default": _plain,
    "linear": _linear,
    "llama3": _llama3,
    "dynamic": _dynamic,
    "yarn": _yarn,
}


def config_from_hf(
    config: Mapping[str, object], generation_config: Mapping[str, object] | None = None
) -> ModelConfig:
    """The config of a Hugging Face folder; raises ModelError on anything unsupported.

    `config` is config.json as transformers 4 or 5 writes it; `generation_config`, if the folder has
    one, adds end-of-text ids (chat models list the end of a turn only there).
    """
    model_type = config.get("model_type")
    text = config
    if model_type == "gemma3":
        text = mapping(config, "text_config")
    families = {
        "llama": Family.LLAMA,
        "mistral": Family.MISTRAL,
        "qwen2": Family.QWEN2,
        "qwen3": Family.QWEN3,
        "gemma3": Family.GEMMA3,
        "gemma3_text": Family.GEMMA3,
        "opt": Family.OPT,
    }
    if not isinstance(model_type, str) or model_type not in families:
        raise ModelError(
            f"model_type is {model_type!r}; supported: {', '.join(sorted(families))}. "
            "docs/add_a_model.md says how to add one."
        )
    check_unquantized(config)
    check_unquantized(text)
    family = families[model_type]
    ids = (text, config, generation_config or {})
    if family is Family.OPT:
        return _opt_from_hf(text, ids)
    return _decoder_from_hf(family, {**_HF_DEFAULTS[family], **text}, ids)


def check_unquantized(config: Mapping[str, object]) -> None:
    """Raise ModelError where a config.json says that the weights are quantized, however they are."""
    if (method := quantized_config(config)) is not None:
        raise ModelError(
            f"config.json says that the weights are quantized by {method}, which is not read; supported: "
            "unquantized safetensors, or a GGUF file. Give the model it was made from; the option "
            "quantization makes int8 or int4 of that."
        )


def _decoder_from_hf(
    family: Family, c: Mapping[str, object], ids: Sequence[Mapping[str, object]]
) -> ModelConfig:
    gemma = family is Family.GEMMA3
    for feature in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if c.get(feature):
            raise ModelError(f"config.json sets {feature} = {c[feature]!r}, which is not supported")
    activation_key = "hidden_activation" if gemma else "hidden_act"
    activation = _activation(c.get(activation_key, "gelu_pytorch_tanh" if gemma else "silu"))
    hidden = count(c, "hidden_size")
    heads = count(c, "num_attention_heads")
    layers = integer(c, "num_hidden_layers", most=MOST_LAYERS)
    head_dim = count(c, "head_dim", hidden // heads)
    bias = bool(c.get("attention_bias", False))
    rope, local_rope = ropes_from_hf(family, c, head_dim)
    scalar = positive(c, "query_pre_attn_scalar", float(head_dim)) if gemma else float(head_dim)
    return ModelConfig(
        family=family,
        vocab_size=integer(c, "vocab_size"),
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=integer(c, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=integer(c, "num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=number(c, "rms_norm_eps"),
        rope=rope,
        local_rope=local_rope,
        layer_windows=_hf_windows(family, c, layers),
        tie_embeddings=bool(c["tie_word_embeddings"]),
        qkv_bias=True if family is Family.QWEN2 else bias and family is not Family.MISTRAL,
        o_bias=bias and family not in (Family.QWEN2, Family.MISTRAL),
        mlp_bias=bool(c.get("mlp_bias", False)) and family is Family.LLAMA,
        qk_norm=family in (Family.QWEN3, Family.GEMMA3),
        embedding_scale=hidden**0.5 if gemma else 1.0,
        norm_weight_offset=1.0 if gemma else 0.0,
        sandwich_norms=gemma,
        activation=activation,
        attention_scale=scalar**-0.5,
        logit_softcap=optional_positive(c, "final_logit_softcapping") if gemma else None,
        max_context=longest_text(rope, integer(c, "max_position_embeddings")),
        eos_ids=all_ids(ids, "eos_token_id"),
    )


def _opt_from_hf(c: Mapping[str, object], ids: Sequence[Mapping[str, object]]) -> ModelConfig:
    if not c.get("layer_norm_elementwise_affine", True):
        raise ModelError("config.json sets layer_norm_elementwise_affine = false, which is not supported")
    activation = _activation(c.get("activation_function", "relu"))
    hidden = count(c, "hidden_size")
    heads = count(c, "num_attention_heads")
    if hidden % heads:
        raise ModelError(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    layers = integer(c, "num_hidden_layers", most=MOST_LAYERS)
    bias = bool(c.get("enable_bias", True))
    norm_first = bool(c.get("do_layer_norm_before", True))
    return ModelConfig(
        family=Family.OPT,
        vocab_size=integer(c, "vocab_size"),
        hidden_size=hidden,
        embedding_size=integer(c, "word_embed_proj_dim", hidden),
        intermediate_size=integer(c, "ffn_dim"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        norm_eps=1e-5,  # torch.nn.LayerNorm's default; OPT's config has no field for it
        rope=None,
        layer_windows=(None,) * layers,
        tie_embeddings=bool(c.get("tie_word_embeddings", True)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        activation=activation,
        attention_scale=(hidden // heads) ** -0.5,
        max_context=integer(c, "max_position_embeddings", 2048),
        eos_ids=all_ids(ids, "eos_token_id"),
        norm_first=norm_first,
        final_norm=norm_first and not c.get("_remove_final_layer_norm", False),
    )


def _hf_windows(family: Family, c: Mapping[str, object], layers: int) -> tuple[int | None, ...]:
    window = None if c.get("sliding_window") is None else integer(c, "sliding_window")
    if family is Family.LLAMA:
        return (None,) * layers
    if family in (Family.QWEN2, Family.QWEN3) and not c.get("use_sliding_window", False):
        window = None
    kinds = c.get("layer_types")
    if isinstance(kinds, list):
        unknown = sorted({str(k) for k in kinds} - {"full_attention", "sliding_attention"})
        if unknown:
            raise ModelError(
                f"layer_types holds {unknown}; supported: 'full_attention' and 'sliding_attention'"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if family is Family.GEMMA3:
        pattern = count(c, "sliding_window_pattern")
        return tuple(window if (i + 1) % pattern else None for i in range(layers))
    if family is Family.MISTRAL:
        return (window,) * layers
    first = integer(c, "max_window_layers")
    return tuple(window if i >= first else None for i in range(layers))


def _activation(name: object) -> Activation:
    if isinstance(name, str) and name in _ACTIVATIONS:
        return _ACTIVATIONS[name]
    raise ModelError(f"the activation is {name!r}; supported: {', '.join(sorted(_ACTIVATIONS))}")
