"""A tiny random transformers model of every family we run, saved as a folder."""

from __future__ import annotations

from pathlib import Path

import torch

# The paths every test walks are a dozen tokens long, so a window of 5 hides some of them.
_DECODER = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "ffn_dim": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA = {
    **_DECODER,
    "num_hidden_layers": 7,  # five with a window, one without, one with
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
}

_GLM = {
    **_DECODER,
    "head_dim": 16,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", _DECODER),
    "llama-biases": ("LlamaConfig", {**_DECODER, "attention_bias": True, "mlp_bias": True}),
    "llama-relu": ("LlamaConfig", {**_DECODER, "hidden_act": "relu"}),
    "llama-llama3-rope": ("LlamaConfig", {**_DECODER, "rope_parameters": _LLAMA3}),
    "llama-linear-rope": (
        "LlamaConfig",
        {**_DECODER, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("MistralConfig", {**_DECODER, "head_dim": 16, "sliding_window": 5}),
    "mistral-full": ("MistralConfig", {**_DECODER, "sliding_window": None}),
    "qwen2": ("Qwen2Config", _DECODER),
    "qwen2-window": (
        "Qwen2Config",
        {**_DECODER, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**_DECODER, "head_dim": 16}),
    "qwen3-biases": ("Qwen3Config", {**_DECODER, "head_dim": 8, "attention_bias": True}),
    "gemma": ("GemmaConfig", {**_DECODER, "head_dim": 16, "attention_bias": True}),
    "gemma3": ("Gemma3TextConfig", _GEMMA),
    "gemma3-softcap": (
        "Gemma3TextConfig",
        {
            **_GEMMA,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3Config", {**_DECODER, "sliding_window": 5, "pad_token_id": 0}),
    "phi3-partial-rope": ("Phi3Config", {**_GLM, "head_dim": 8}),
    "glm": ("GlmConfig", _GLM),
    "glm4": ("Glm4Config", {**_GLM, "attention_bias": False}),
    "opt": ("OPTConfig", _OPT),
    "opt-350m": ("OPTConfig", {**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "opt-no-bias": ("OPTConfig", {**_OPT, "enable_bias": False}),
}


def save_random(name: str, folder: Path, *, tied: bool, **more: object) -> torch.nn.Module:
    """Save a random model of that case and return it, float32, in eval mode; `more` is of its config."""
    import transformers  # seconds, which only those who make such a model should wait

    config_class, values = CASES[name]
    config = getattr(transformers, config_class)(**{**values, **more}, tie_word_embeddings=tied)
    config._attn_implementation = "eager"
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norm weights start at 0 and 1, where swapping two of them would not show.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.tie_weights()
    model.save_pretrained(folder)
    return model
