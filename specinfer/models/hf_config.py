"""config.json of a Hugging Face folder -> ModelConfig.

Anything it asks for that the decoder does not compute is refused with a ModelError; nothing is skipped in
silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specinfer.errors import ModelError
from specinfer.hub.foreign_format import quantized_config
from specinfer.models.config import Activation, Family, ModelConfig
from specinfer.models.fields import (
    MOST_LAYERS,
    all_ids,
    count,
    integer,
    mapping,
    number,
    optional_positive,
    positive,
)
from specinfer.models.hf_rope import longest_text, ropes_from_hf

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

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
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
