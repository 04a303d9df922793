"""config.json of hybrids as published: every key is read, or known to change nothing."""

from __future__ import annotations

import logging
import math

import pytest

from specinfer.errors import ModelError
from specinfer.kernels.recurrence_config import LayerKind
from specinfer.models.families.registry import read_config
from specinfer.models.fields import Fields

_ALL: Fields = {
    **{"eos_token_id": 7, "bos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.02, "use_cache": True},
    **{"torch_dtype": "bfloat16", "transformers_version": "4.55.0"},
}
LFM2: Fields = {
    **_ALL,
    **{"model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288},
    **{"block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256},
    **{"block_norm_eps": 1e-5, "block_out_init_scale": 1.0, "block_use_swiglu": True, "conv_L_cache": 3},
    **{"block_use_xavier_init": True, "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048},
    **{"conv_use_xavier_init": True, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048},
    **{"max_position_embeddings": 128000, "norm_eps": 1e-5, "num_attention_heads": 32, "num_heads": 32},
    **{"num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1e6, "use_pos_enc": True},
    "vocab_size": 65536,
}
QWEN: Fields = {
    **_ALL,
    **{"model_type": "qwen3_5_text", "attention_bias": False, "attn_output_gate": True, "head_dim": 256},
    **{"full_attention_interval": 4, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3584},
    **{"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16},
    **{"linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": []},
    **{"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "num_attention_heads": 8},
    **{"num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vocab_size": 248320},
    **{"tie_word_embeddings": True, "mamba_ssm_dtype": "float32"},
    "rope_parameters": {
        **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"},
        **{"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
}
GRANITE: Fields = {
    **_ALL,
    **{"model_type": "granitemoehybrid", "attention_bias": False, "attention_multiplier": 0.015625},
    **{"embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 4096},
    **{"layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "logits_scaling": 6},
    **{"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64},
    **{"mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48},
    **{"mamba_proj_bias": False, "max_position_embeddings": 131072, "normalization_function": "rmsnorm"},
    **{"num_attention_heads": 12, "num_experts_per_tok": 0, "num_hidden_layers": 40, "init_method": "mup"},
    **{"num_key_value_heads": 4, "num_local_experts": 0, "position_embedding_type": "nope"},
    **{"residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_theta": 10000, "vocab_size": 100352},
    **{"shared_intermediate_size": 4096, "tie_word_embeddings": True, "router_aux_loss_coef": 0.01},
}
NEMOTRON: Fields = {
    **_ALL,
    **{"model_type": "nemotron_h", "chunk_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 128},
    **{"hidden_dropout": 0.0, "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*E-"},
    **{"intermediate_size": 1856, "layer_norm_epsilon": 1e-5, "mamba_head_dim": 64, "n_groups": 8},
    **{"mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": False, "n_group": 1},
    **{"mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144, "mlp_bias": False},
    **{"mlp_hidden_act": "relu2", "moe_intermediate_size": 1856, "n_routed_experts": 128, "topk_group": 1},
    **{"moe_shared_expert_intermediate_size": 3712, "n_shared_experts": 1, "norm_eps": 1e-5},
    **{"norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6, "vocab_size": 131072},
    **{"num_hidden_layers": 15, "num_key_value_heads": 2, "num_logits_to_keep": 1, "rope_theta": 10000},
    **{"partial_rotary_factor": 1.0, "rescale_prenorm_residual": True, "residual_in_fp32": False},
    **{"routed_scaling_factor": 2.5, "ssm_state_size": 128, "tie_word_embeddings": False},
    **{"time_step_floor": 1e-4, "time_step_limit": [0.0, math.inf], "time_step_max": 0.1},
    **{"time_step_min": 0.001, "use_bias": False, "use_conv_bias": True, "use_mamba_kernels": True},
}
BAMBA: Fields = {
    **_ALL,
    **{"model_type": "bamba", "attention_bias": False, "attn_layer_indices": [9, 18, 27], "mlp_bias": False},
    **{"attn_rotary_emb": 64, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336},
    **{"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64},
    **{"mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128},
    **{"mamba_proj_bias": False, "max_position_embeddings": 4096, "num_attention_heads": 32},
    **{"num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1, "rms_norm_eps": 1e-5},
    **{"rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 128256},
}
FALCON_H1: Fields = {
    **_ALL,
    **{"model_type": "falcon_h1", "attention_bias": False, "attention_in_multiplier": 1.0, "head_dim": 64},
    **{"attention_out_multiplier": 0.9375, "attn_layer_indices": None, "embedding_multiplier": 5.65},
    **{"hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 2048, "key_multiplier": 0.390625},
    **{"lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4},
    **{"mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mlp_bias": False},
    **{"mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_proj_bias": False},
    **{"mamba_rms_norm": False, "mamba_use_mlp": True, "max_position_embeddings": 16384, "vocab_size": 32784},
    **{"mlp_expansion_factor": 8, "mlp_multipliers": [0.88, 0.59], "num_attention_heads": 8},
    **{"num_hidden_layers": 36, "num_key_value_heads": 2, "num_logits_to_keep": 1, "projectors_bias": False},
    **{"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1e11, "ssm_in_multiplier": 1.25},
    **{"ssm_multipliers": [0.35, 0.25, 0.1767, 0.5, 0.3536], "ssm_out_multiplier": 0.236},
    **{"tie_word_embeddings": False, "time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 1e-3},
}


@pytest.mark.parametrize(
    ("given", "states", "sizes"),
    [
        (LFM2, 10, (2 * 2048, 8192)),
        (QWEN, 18, (16 * 128 * 128 + 3 * 6144, 3584)),
        (GRANITE, 36, (48 * 64 * 128 + 3 * 3328, 4096)),
        (NEMOTRON, 6, (64 * 64 * 128 + 3 * 6144, 1856)),
        (BAMBA, 29, (128 * 64 * 128 + 3 * 8448, 14336)),
        (FALCON_H1, 36, (24 * 64 * 128 + 3 * 1792, 2048)),
    ],
    ids=["lfm2", "qwen3.5", "granite", "nemotron", "bamba", "falcon-h1"],
)
def test_published_configs(
    given: Fields, states: int, sizes: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        config = read_config(given)
    assert caplog.messages == []
    assert config.recurrence is not None
    assert len(config.recurrent_layers) == states
    assert (config.recurrence.state_floats, config.intermediate_size) == sizes


def test_a_granite_with_attention_alone_is_no_hybrid(caplog: pytest.LogCaptureFixture) -> None:
    config = read_config({**GRANITE, "layer_types": ["attention"] * 40, "position_embedding_type": "rope"})
    assert (config.recurrence, config.layer_kinds, caplog.messages) == (None, (), [])


def test_nemotrons_pattern() -> None:
    kinds = {"M": LayerKind.MAMBA2, "*": LayerKind.ATTENTION, "E": LayerKind.NONE, "-": LayerKind.NONE}
    config, pattern = read_config(NEMOTRON), str(NEMOTRON["hybrid_override_pattern"])
    assert config.layer_kinds == tuple(kinds[letter] for letter in pattern)
    assert config.experts is not None
    assert [config.experts_of(layer) is None for layer in range(15)] == [letter != "E" for letter in pattern]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {**LFM2, "layer_types": ["conv", "delta"] * 8},
            "layer_types is .*'delta'.*expected 16 of 'full_att",
        ),
        ({**QWEN, "layer_types": ["linear_attention"]}, "expected 24 of"),
        ({**QWEN, "attn_output_gate": False}, "sets attn_output_gate = False"),
        ({**QWEN, "linear_num_value_heads": 24}, "24 heads of 128 values and 16 heads of keys; supported"),
        ({**QWEN, "linear_value_head_dim": 100}, "a multiple of 16 values each"),
        ({**QWEN, "linear_conv_kernel_dim": 1}, "a convolution has 1 taps; supported: 2 "),
        ({**QWEN, "hidden_act": "gelu"}, "hidden_act is 'gelu'; supported for a gated delta rule: 'silu'"),
        ({**GRANITE, "time_step_limit": 3}, "time_step_limit is 3; expected two numbers"),
        ({**GRANITE, "position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'; supported"),
        ({**GRANITE, "hidden_act": "gelu"}, "hidden_act is 'gelu'; supported for Mamba-2: 'silu'"),
        ({**BAMBA, "attn_layer_indices": 9}, "attn_layer_indices is 9; expected a list"),
        ({**FALCON_H1, "ssm_multipliers": [1.0] * 4}, "ssm_multipliers is .*; expected 5 numbers"),
        ({**FALCON_H1, "key_multiplier": 0}, r"key_multiplier is 0\.0; expected more than 0"),
        ({**NEMOTRON, "moe_latent_size": 8}, "sets moe_latent_size = 8"),
        ({**NEMOTRON, "n_group": 8}, "sets n_group = 8"),
        ({**NEMOTRON, "hybrid_override_pattern": "MX"}, "'X'"),
    ],
)
def test_what_is_not_computed_is_refused(given: Fields, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(given)
