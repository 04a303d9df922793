"""The layers of a head: `transformer_layer_config` of a checkpoint -> ModelConfig, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from specinfer.errors import ModelError
from specinfer.models.config import Activation, Family, ModelConfig
from specinfer.models.fields import count
from specinfer.models.hf_config import config_from_hf
from specinfer.models.hf_rope import rope_to_hf

# What transformers fills in: a config is written as what differs from its class.
_QWEN: dict[str, object] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN,
}
_CLASSES = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
}
_MOST_LAYERS = 64
_SLIDING = "sliding_attention"


def body_from_hf(config: Mapping[str, object]) -> ModelConfig:
    """The layers a checkpoint describes, which all see the whole text.

    Raises ModelError for what heads' layers cannot be: experts, windows that are shorter than the context.
    """
    kind = config.get("model_type", "qwen3")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise ModelError(
            f"a head's layers are of model_type {kind!r}; supported: {', '.join(sorted(_DEFAULTS))}"
        )
    layers = count(config, "num_hidden_layers", 1)
    if layers > _MOST_LAYERS:
        raise ModelError(f"a head has {layers} layers; allowed: 1 to {_MOST_LAYERS}")
    given = {key: value for key, value in config.items() if value is not None}
    body = config_from_hf({**_DEFAULTS[kind], **given, "model_type": kind, "eos_token_id": None})
    window = body.window
    if window is not None and window < body.max_context:
        raise ModelError(
            f"a head's layers have a sliding window of {window} in a context of {body.max_context}; "
            "supported: layers that see all of a text"
        )
    return replace(body, layer_windows=(None,) * body.num_layers, eos_ids=())


def is_causal(config: Mapping[str, object], *, windows_are_causal: bool = True) -> bool:
    """Whether rows of a block see only those before them: as `is_causal` says, else where there are windows.

    That is how both vLLM and the `speculators` library read it. Raises ModelError where layers differ.
    """
    said = config.get("is_causal")
    if isinstance(said, bool):
        return said
    if said is not None:
        raise ModelError(f"is_causal is {said!r}; expected true or false")
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        return False
    causal = {windows_are_causal and kind == _SLIDING for kind in kinds}
    if len(causal) > 1:
        raise ModelError(f"layers of a block see it in different ways: {kinds}; supported: all alike")
    return causal.pop()


def body_to_hf(body: ModelConfig, *, causal_block: bool = False) -> dict[str, object]:
    """What `body_from_hf` reads; `causal_block` says so of a block's rows, in words both readers know.

    Raises ModelError for layers the format has no words for.
    """
    rope = body.rope
    if body.family not in _CLASSES or rope is None:
        raise ModelError(f"layers of {body.family} cannot be written as a head's; use llama's or qwen3's")
    if body.activation is not Activation.SILU:
        raise ModelError(f"layers with {body.activation} cannot be written as a head's; use silu")
    written: dict[str, object] = {
        "model_type": body.family.value,
        "architectures": [_CLASSES[body.family]],
        "vocab_size": body.vocab_size,
        "hidden_size": body.hidden_size,
        "intermediate_size": body.intermediate_size,
        "num_hidden_layers": body.num_layers,
        "num_attention_heads": body.num_heads,
        "num_key_value_heads": body.num_kv_heads,
        "head_dim": body.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": body.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": rope_to_hf(rope),
        # Of dynamic scaling it is the context before it was extended.
        "max_position_embeddings": rope.dynamic.original_context if rope.dynamic else body.max_context,
        "attention_bias": body.qkv_bias,
        "mlp_bias": body.mlp_bias,
        "tie_word_embeddings": False,
    }
    if causal_block:
        written |= {
            "is_causal": True,
            "layer_types": [_SLIDING] * body.num_layers,
            "use_sliding_window": True,
            "sliding_window": body.max_context,
        }
    return written
