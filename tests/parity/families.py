"""A tiny random transformers model of every family we run, saved as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_SIDE_BY_SIDE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_FALCON = {**_SIDE_BY_SIDE, "ffn_hidden_size": 56}
_NEOX = {
    **_SIDE_BY_SIDE,
    "intermediate_size": 56,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_BIGCODE = {
    "vocab_size": 96,
    "n_embd": 32,
    "n_inner": 56,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MPT = {"vocab_size": 96, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128, "eos_token_id": 2}

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
    "mixtral": ("MixtralConfig", {**_DECODER, "num_local_experts": 4, "sliding_window": 5}),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            **{**_DECODER, "num_experts": 6, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            **{**_DECODER, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1]},
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {**_DECODER, "intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3},
    ),
    "granite-moe": (
        "GraniteMoeConfig",
        {
            **{**_DECODER, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2},
            **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
            **{"logits_scaling": 2.5, "attention_bias": True},
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            **{**_DECODER, "head_dim": 16, "intermediate_size": 64, "num_local_experts": 6},
            **{"num_experts_per_tok": 2, "sliding_window": 5, "pad_token_id": 0},
            "rope_parameters": {**_YARN, "truncate": False},
        },
    ),
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
    "seed-oss": ("SeedOssConfig", {**_DECODER, "head_dim": 8, "mlp_bias": True}),
    "ernie": ("Ernie4_5Config", {**_DECODER, "head_dim": 16, "use_bias": True}),
    "helium": ("HeliumConfig", {**_DECODER, "head_dim": 8, "attention_bias": True}),
    "cwm": ("CwmConfig", {**_DECODER, "head_dim": 8, "sliding_window": 5, "rope_parameters": _LLAMA3}),
    "phi3": ("Phi3Config", {**_DECODER, "sliding_window": 5, "pad_token_id": 0}),
    "phi3-partial-rope": ("Phi3Config", {**_GLM, "head_dim": 8}),
    "glm": ("GlmConfig", _GLM),
    "glm4": ("Glm4Config", {**_GLM, "attention_bias": False}),
    "opt": ("OPTConfig", _OPT),
    "opt-350m": ("OPTConfig", {**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "opt-no-bias": ("OPTConfig", {**_OPT, "enable_bias": False}),
    "gemma2": (
        "Gemma2Config",
        {**_GEMMA, "num_hidden_layers": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "olmo": ("OlmoConfig", {**_DECODER, "clip_qkv": 0.5}),
    "olmo2": ("Olmo2Config", {**_DECODER, "attention_bias": True}),
    "olmo3": (
        "Olmo3Config",
        {
            **_DECODER,
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "exaone": ("Exaone4Config", {**_DECODER, "num_hidden_layers": 5, "sliding_window": 5}),
    "exaone-full": (
        "Exaone4Config",
        {**_DECODER, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    ),
    "granite": (
        "GraniteConfig",
        {
            **_DECODER,
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "smollm3": ("SmolLM3Config", {**_DECODER, "no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "smollm3-window": (
        "SmolLM3Config",
        {
            **_DECODER,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "pad_token_id": 0,
        },
    ),
    "cohere": ("CohereConfig", {**_DECODER, "logit_scale": 0.25, "attention_bias": True}),
    "cohere2": (
        "Cohere2Config",
        {**_DECODER, "num_hidden_layers": 5, "sliding_window": 5, "logit_scale": 0.25},
    ),
    "gpt2": ("GPT2Config", _BIGCODE),
    "starcoder": ("GPTBigCodeConfig", _BIGCODE),
    "starcoder-heads": ("GPTBigCodeConfig", {**_BIGCODE, "multi_query": False, "scale_attn_weights": False}),
    "starcoder2": ("Starcoder2Config", {**_DECODER, "sliding_window": 5}),
    "starcoder2-no-bias": ("Starcoder2Config", {**_DECODER, "use_bias": False}),
    "falcon-7b": ("FalconConfig", _FALCON),
    "falcon-40b": ("FalconConfig", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-11b": (
        "FalconConfig",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-rw": (
        "FalconConfig",
        {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "mpt": ("MptConfig", {**_MPT, "attn_config": {"clip_qkv": 0.5}}),
    "mpt-heads": ("MptConfig", {**_MPT, "d_model": 48, "n_heads": 6, "attn_config": {"softmax_scale": 0.3}}),
    "gpt-neox": ("GPTNeoXConfig", _NEOX),
    "gpt-neox-serial": ("GPTNeoXConfig", {**_NEOX, "use_parallel_residual": False, "attention_bias": False}),
    "stablelm": ("StableLmConfig", {**_NEOX, "num_key_value_heads": 2, "use_qkv_bias": True}),
    "stablelm-parallel": (
        "StableLmConfig",
        {**_NEOX, "num_key_value_heads": 4, "use_parallel_residual": True},
    ),
}


def config_of(name: str, **more: object) -> Any:
    """transformers' config of that case; `more` are further fields."""
    import transformers  # seconds, which only those who make such a model should wait

    config_class, values = CASES[name]
    return getattr(transformers, config_class)(**{**values, **more})


def save_random(name: str, folder: Path, *, tied: bool, **more: object) -> torch.nn.Module:
    """Save a random model of that case and return it, float32, in eval mode; `more` is of its config."""
    import transformers  # seconds, as above

    config = config_of(name, **more, tie_word_embeddings=tied)
    # Falcon's own loop adds ALiBi twice: with the scores, and with the mask.
    config._attn_implementation = "sdpa" if getattr(config, "alibi", False) else "eager"
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases and norm weights start at 0 and 1, where swapping two of them would not show.
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.tie_weights()
    model.save_pretrained(folder)
    return model
