"""A tiny random transformers model of every family we run, saved as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

# The paths every test walks are a dozen tokens long, so a window of 5 hides some of them.
_ENDS: dict[str, object] = {"bos_token_id": 1, "eos_token_id": 2}
_DECODER: dict[str, object] = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **_ENDS,
}
_OPT: dict[str, object] = {
    **{"vocab_size": 96, "hidden_size": 32, "ffn_dim": 56, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"max_position_embeddings": 128, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1},
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 32},
    **{"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
_GEMMA: dict[str, object] = {
    **_DECODER,
    "num_hidden_layers": 7,  # five with a window, one without, one with
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 5,
}
_HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_GLM = {**_DECODER, "head_dim": 16, "pad_token_id": 0, "rope_parameters": _HALF}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_BY_LAYER = {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
_SIDE_BY_SIDE = {
    name: value
    for name, value in _DECODER.items()
    if name not in ("intermediate_size", "num_key_value_heads")
}
_FALCON = {**_SIDE_BY_SIDE, "ffn_hidden_size": 56}
_NEOX = {**_SIDE_BY_SIDE, "intermediate_size": 56, "rope_parameters": _HALF}
_CODE = {"vocab_size": 96, "n_embd": 32, "n_inner": 56, "n_layer": 3, "n_head": 4, "n_positions": 128} | _ENDS
_MPT = {"vocab_size": 96, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 128, "eos_token_id": 2}

CASES: dict[str, tuple[str, dict[str, object]]] = {}


def _case(name: str, kind: str, base: dict[str, object] = _DECODER, /, **more: object) -> None:
    """Add a case: transformers' config class without its last word, and its fields."""
    CASES[name] = f"{kind}Config", {**base, **more}


_case("llama", "Llama")
_case("llama-biases", "Llama", attention_bias=True, mlp_bias=True)
_case("llama-relu", "Llama", hidden_act="relu")
_case("llama-llama3-rope", "Llama", rope_parameters=_LLAMA3)
_case("llama-linear-rope", "Llama", rope_parameters=_LINEAR)
_case("mistral", "Mistral", head_dim=16, sliding_window=5)
_case("mistral-full", "Mistral", sliding_window=None)
_case("qwen2", "Qwen2")
_case("qwen2-window", "Qwen2", use_sliding_window=True, sliding_window=5, max_window_layers=1)
_case("qwen3", "Qwen3", head_dim=16)
_case("qwen3-biases", "Qwen3", head_dim=8, attention_bias=True)
_case("gemma", "Gemma", head_dim=16, attention_bias=True)
_case("mixtral", "Mixtral", num_local_experts=4, sliding_window=5)
_case(
    *("qwen2-moe", "Qwen2Moe", _DECODER),
    num_experts=6,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
)
_QWEN3_MOE = {"head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_case("qwen3-moe", "Qwen3Moe", _DECODER | _QWEN3_MOE, norm_topk_prob=True, mlp_only_layers=[1])
_case("olmoe", "Olmoe", intermediate_size=24, num_experts=8, num_experts_per_tok=3)
_GRANITES = {"intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "logits_scaling": 2.5}
_FACTORS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
_case("granite-moe", "GraniteMoe", _DECODER | _GRANITES | _FACTORS, attention_bias=True)
_case(
    *("gpt-oss", "GptOss", {**_DECODER, "head_dim": 16, "intermediate_size": 64, "pad_token_id": 0}),
    num_local_experts=6,
    num_experts_per_tok=2,
    sliding_window=5,
    rope_parameters={**_YARN, "truncate": False},
)
_LLAMA4: dict[str, object] = {
    **{**_DECODER, "num_hidden_layers": 5, "head_dim": 16, "intermediate_size": 24},
    **{"intermediate_size_mlp": 96, "num_local_experts": 6, "num_experts_per_tok": 2},
}
_SHARP = {**_LLAMA3, "high_freq_factor": 1.0}  # nothing between the kept and the divided frequencies
_case("llama4", "Llama4Text", _LLAMA4, attention_chunk_size=64, rope_parameters=_SHARP)
_INTERLEAVED = {"interleave_moe_layer_step": 2, "use_qk_norm": False, "no_rope_layers": [1, 0, 1]}
_case("llama4-interleaved", "Llama4Text", _LLAMA4 | _INTERLEAVED, num_hidden_layers=3, attention_bias=True)
_case("gemma3", "Gemma3Text", _GEMMA)
_FULL_GEMMA = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
_ROPES = {**_BY_LAYER, "full_attention": _FULL_GEMMA}
_case("gemma3-softcap", "Gemma3Text", _GEMMA, final_logit_softcapping=3.0, rope_parameters=_ROPES)
_GEMMA_4 = {
    **_DECODER,
    **{
        "num_hidden_layers": 9,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 3,
    },
    **{"head_dim": 16, "global_head_dim": 24, "sliding_window": 5, "final_logit_softcapping": 3.0},
    **{"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "pad_token_id": 0},
    **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96},
}
_case("gemma4", "Gemma4Text", _GEMMA_4)
_SINGLE = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "final_logit_softcapping": None}
_case(
    *("gemma4-large", "Gemma4Text", _GEMMA_4 | _SINGLE),
    num_hidden_layers=3,
    layer_types=None,
    attention_k_eq_v=True,
    num_global_key_value_heads=1,
    attention_bias=True,
)
_MIXTURE = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24}
_case("gemma4-experts", "Gemma4Text", _GEMMA_4 | _SINGLE | _MIXTURE, num_hidden_layers=3, layer_types=None)
_GEMMA_3N = {
    **{k: v for k, v in _GEMMA_4.items() if k not in ("global_head_dim", "use_double_wide_mlp")},
    **{"intermediate_size": [56] * 6 + [72] * 3, "activation_sparsity_pattern": [0.6, 0.0, 0.9] * 3},
    **{"vocab_size_per_layer_input": 60, "laurel_rank": 12, "altup_active_idx": 1},
}
_case("gemma3n", "Gemma3nText", _GEMMA_3N)
_case("gemma3n-unscaled", "Gemma3nText", _GEMMA_3N, altup_correct_scale=False, attention_bias=True)
_case("seed-oss", "SeedOss", head_dim=8, mlp_bias=True)
_case("ernie", "Ernie4_5", head_dim=16, use_bias=True)
_case("helium", "Helium", head_dim=8, attention_bias=True)
_case("cwm", "Cwm", head_dim=8, sliding_window=5, rope_parameters=_LLAMA3)
_case("phi3", "Phi3", sliding_window=5, pad_token_id=0)
_case("phi3-partial-rope", "Phi3", _GLM, head_dim=8)
_case("glm", "Glm", _GLM)
_case("glm4", "Glm4", _GLM, attention_bias=False)
_case("opt", "OPT", _OPT)
_case("opt-no-bias", "OPT", _OPT, enable_bias=False)
_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
_case("gemma2", "Gemma2", _GEMMA | _CAPS, num_hidden_layers=3)
_case("olmo", "Olmo", clip_qkv=0.5)
_case("olmo2", "Olmo2", attention_bias=True)
_case(
    *("olmo3", "Olmo3", _DECODER),
    num_hidden_layers=5,
    sliding_window=5,
    rope_parameters={**_BY_LAYER, "full_attention": _YARN},
)
_case("exaone", "Exaone4", num_hidden_layers=5, sliding_window=5)
_case("exaone-full", "Exaone4", sliding_window=None, layer_types=["full_attention"] * 3)
_GRANITE = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5}
_case("granite", "Granite", _DECODER | _GRANITE, attention_bias=True, mlp_bias=True, logits_scaling=2.0)
_case("smollm3", "SmolLM3", no_rope_layers=[1, 0, 1], pad_token_id=0)
_WINDOW = {"use_sliding_window": True, "sliding_window": 5}
_case("smollm3-window", "SmolLM3", _DECODER | _WINDOW, no_rope_layer_interval=2, pad_token_id=0)
_case("cohere", "Cohere", logit_scale=0.25, attention_bias=True)
_case("cohere2", "Cohere2", num_hidden_layers=5, sliding_window=5, logit_scale=0.25)
_case("gpt2", "GPT2", _CODE)
_case("starcoder", "GPTBigCode", _CODE)
_case("starcoder-heads", "GPTBigCode", _CODE, multi_query=False, scale_attn_weights=False)
_case("starcoder2", "Starcoder2", sliding_window=5)
_case("starcoder2-no-bias", "Starcoder2", use_bias=False)
_case("falcon-7b", "Falcon", _FALCON)
_NEW = {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
_case("falcon-40b", "Falcon", _NEW)
_case("falcon-11b", "Falcon", _NEW, num_ln_in_parallel_attn=1)
_case("falcon-rw", "Falcon", _FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True)
_case("mpt", "Mpt", _MPT, attn_config={"clip_qkv": 0.5})
_case("mpt-heads", "Mpt", _MPT, d_model=48, n_heads=6, attn_config={"softmax_scale": 0.3})
_case("gpt-neox", "GPTNeoX", _NEOX)
_case("gpt-neox-serial", "GPTNeoX", _NEOX, use_parallel_residual=False, attention_bias=False)
_case("stablelm", "StableLm", _NEOX, num_key_value_heads=2, use_qkv_bias=True)
_case("stablelm-parallel", "StableLm", _NEOX, num_key_value_heads=4, use_parallel_residual=True)
_LFM2 = {
    **{**_DECODER, "num_hidden_layers": 4, "pad_token_id": 0, "block_auto_adjust_ff_dim": False},
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
_case("lfm2", "Lfm2", _LFM2)
_case(
    "lfm2-biases", "Lfm2", _LFM2, conv_bias=True, conv_L_cache=4, layer_types=["full_attention", "conv"] * 2
)
_ADJUSTED = {"block_auto_adjust_ff_dim": True, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3}
_case("lfm2-adjusted", "Lfm2", _LFM2 | _ADJUSTED, layer_types=None, full_attn_idxs=[3])
_DELTA: dict[str, object] = {
    **{"num_hidden_layers": 4, "head_dim": 16, "linear_key_head_dim": 12, "linear_value_head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "full_attention_interval": 2},
}
_case("qwen3.5", "Qwen3_5Text", _DECODER | _DELTA, partial_rotary_factor=0.5)
_SAME = {"linear_num_value_heads": 2, "attention_bias": True, "linear_conv_kernel_dim": 3}
_MIXED = ["full_attention", "full_attention", "linear_attention", "linear_attention"]
_case("qwen3.5-same-heads", "Qwen3_5Text", {**_DECODER, **_DELTA, **_SAME}, layer_types=_MIXED)
_SHARED = {"shared_expert_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 3}
_DELTA_MOE = {**_DECODER, **_DELTA, **_SHARED, "moe_intermediate_size": 24}
_case("qwen3.5-moe", "Qwen3_5MoeText", _DELTA_MOE)
_case("qwen3-next", "Qwen3Next", _DELTA_MOE, decoder_sparse_step=2)
_case("qwen3-next-dense", "Qwen3Next", _DELTA_MOE, norm_topk_prob=False, mlp_only_layers=[2])
_LFM2_MOE = {
    **{name: value for name, value in _LFM2.items() if name != "block_auto_adjust_ff_dim"},
    **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "num_dense_layers": 1},
}
_case("lfm2-moe", "Lfm2Moe", _LFM2_MOE, routed_scaling_factor=2.5)
_case("lfm2-moe-softer", "Lfm2Moe", _LFM2_MOE, use_expert_bias=False, norm_topk_prob=False)
_MAMBA: dict[str, object] = {
    **{"num_hidden_layers": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2},
    **{"mamba_d_state": 12, "mamba_expand": 2},
}
_GRANITE_HYBRID: dict[str, object] = {
    **{**_DECODER, **_MAMBA, **_FACTORS, "logits_scaling": 2.5, "shared_intermediate_size": 40},
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_case("granite-hybrid", "GraniteMoeHybrid", _GRANITE_HYBRID, num_local_experts=0, mamba_proj_bias=True)
_GRANITE_HYBRID_MOE = {"num_local_experts": 6, "intermediate_size": 24, "position_embedding_type": "rope"}
_case("granite-hybrid-moe", "GraniteMoeHybrid", _GRANITE_HYBRID | _GRANITE_HYBRID_MOE, mamba_conv_bias=False)
_LEGACY = {
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "attention_bias": True,
    "mamba_n_groups": 1,
}
_case(
    *("granite-hybrid-limits", "GraniteMoeHybrid", _GRANITE_HYBRID | _LEGACY),
    num_local_experts=0,
    time_step_limit=[0.3, 0.9],
)
_case("bamba", "Bamba", {**_DECODER, **_MAMBA}, attn_layer_indices=[1], mlp_bias=True, head_dim=16)
_FALCON_H1: dict[str, object] = {
    **{**_DECODER, **_MAMBA, "mamba_d_ssm": 64, "key_multiplier": 0.7, "lm_head_multiplier": 0.5},
    **{"embedding_multiplier": 3.0, "attention_in_multiplier": 0.8, "attention_out_multiplier": 1.2},
    **{"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6, "mlp_multipliers": [0.9, 1.4]},
    **{"ssm_multipliers": [0.7, 1.1, 0.6, 1.4, 0.8], "rms_norm_eps": 1e-3},
}
_case("falcon-h1", "FalconH1", _FALCON_H1, num_hidden_layers=2, attention_bias=True, projectors_bias=True)
_NORMED = {"mamba_rms_norm": True, "mamba_proj_bias": True, "mlp_bias": True}
_case("falcon-h1-normed", "FalconH1", _FALCON_H1 | _NORMED, num_hidden_layers=2)
_case("falcon-h1-behind", "FalconH1", _FALCON_H1 | _NORMED, num_hidden_layers=2, mamba_norm_before_gate=False)
_NEMOTRON: dict[str, object] = {
    **{name: value for name, value in _DECODER.items() if name != "num_hidden_layers"},
    **{
        "head_dim": 16,
        "time_step_min": 1e-9,  # which transformers passes over where it decodes
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 12,
    },
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"],
}
_case("nemotron-h", "NemotronH", _NEMOTRON, mlp_bias=True, use_bias=True)
_ALONE = {"layers_block_type": ["mlp", "mamba", "mamba", "attention"], "mamba_num_heads": 3, "n_groups": 3}
_case("nemotron-h-alone", "NemotronH", _NEMOTRON | _ALONE, use_conv_bias=False, mlp_hidden_act="gelu")
_NEMOTRON_MOE = {
    **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    **{"moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 2.5},
    "layers_block_type": ["moe", "linear_attention", "mlp", "full_attention", "moe"],
}
_case("nemotron-h-moe", "NemotronH", _NEMOTRON | _NEMOTRON_MOE)


# Older versions of transformers norm all groups together, and have no per-layer embeddings of tokens that are
# behind their table. Published models have one group, and tokens of text in the table.
_FOR_OLDER: dict[str, dict[str, object]] = {
    "GraniteMoeHybridConfig": {"mamba_n_groups": 1},
    "BambaConfig": {"mamba_n_groups": 1, "rms_norm_eps": 1e-3},  # which such a norm shows less
    "Gemma3nTextConfig": {"vocab_size_per_layer_input": 96},
}


def config_of(name: str, **more: object) -> Any:
    """transformers' config of that case; `more` are further fields."""
    import transformers  # seconds, which only those who make such a model should wait

    config_class, values = CASES[name]
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
        values = values | _FOR_OLDER.get(config_class, {})
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
        for name, buffer in model.named_buffers():
            if name.endswith(("expert_bias", "correction_bias")):  # of routers
                buffer.add_(torch.randn_like(buffer))
            if name.endswith("layer_scalar"):
                buffer.mul_(0.7 + 0.1 * len(name) % 0.5)
    model.tie_weights()
    model.save_pretrained(folder)
    return model
