"""config.json of hybrids as published: every key is read as transformers' own, or known to change nothing."""

from __future__ import annotations

import pytest

from specinfer.errors import ModelError
from specinfer.models.families.registry import config_from_hf, read_config
from specinfer.models.fields import Fields
from tests.parity.families import config_of

# Fields of published files beside those of transformers' configs, and in their place (...: without).
ALL: Fields = {"torch_dtype": "bfloat16", "transformers_version": "4.55.0", "use_cache": True}
ROPE: Fields = {"rope_parameters": ..., "rope_theta": 10000.0}
TIMES: Fields = {"time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 1e-3}
MORE: dict[str, Fields] = {
    "lfm2-adjusted": {
        **{"layer_types": ..., "intermediate_size": ..., "block_ff_dim": 56, "block_dim": 32},
        **{"block_mlp_init_scale": 1.0, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0},
        **{"block_use_swiglu": True, "block_use_xavier_init": True, "conv_dim": 32, "conv_dim_out": 32},
        **{"conv_use_xavier_init": True, "num_heads": 4, "use_pos_enc": True},
    },
    "qwen3.5": {
        **{"attn_output_gate": True, "full_attention_interval": 2, "mlp_only_layers": []},
        **{"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "mamba_ssm_dtype": "float32"},
        "rope_parameters": {
            **{"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default"},
            **{"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    },
    "granite-hybrid": {
        **{"layer_types": ["mamba", "attention", "mamba", "mamba"], "rope_parameters": ...},
        **{"rope_theta": 10000, "init_method": "mup", "normalization_function": "rmsnorm"},
    },
    "nemotron-h-moe": {
        **{"layers_block_type": ..., "hybrid_override_pattern": "EM-*E", "num_hidden_layers": 5},
        **{"norm_eps": 1e-5, "partial_rotary_factor": 1.0, "rope_theta": 10000, **TIMES},
    },
    "bamba": {**ROPE, "attn_rotary_emb": 8},
    "falcon-h1": {
        **{**ROPE, **TIMES, "attn_layer_indices": None, "mamba_use_mlp": True, "mlp_expansion_factor": 8},
        "rope_scaling": None,
    },
}


def published(name: str, **changes: object) -> Fields:
    """The config of a case of tests/parity in the words of published files."""
    given = {**config_of(name).to_dict(), **ALL, **MORE[name], **changes}
    return {key: value for key, value in given.items() if value is not ...}


@pytest.mark.parametrize("name", MORE)
def test_published_configs(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read_config(published(name)) == config_from_hf(config_of(name).to_dict())
    assert caplog.messages == []


def test_a_granite_with_attention_alone_is_no_hybrid(caplog: pytest.LogCaptureFixture) -> None:
    alone = {"layer_types": ["attention"] * 4, "position_embedding_type": "rope", "mamba_proj_bias": False}
    config = read_config(published("granite-hybrid", **alone))
    assert (config.recurrence, config.layer_kinds, caplog.messages) == (None, (), [])


def test_what_is_not_computed_is_refused() -> None:
    for name, change, message in (
        ("lfm2-adjusted", {"layer_types": ["conv", "delta"] * 2}, "is .*'delta'.*expected 4 of 'full_att"),
        ("qwen3.5", {"layer_types": ["linear_attention"]}, "expected 4 of"),
        ("qwen3.5", {"attn_output_gate": False}, "sets attn_output_gate = False"),
        ("qwen3.5", {"linear_num_value_heads": 3}, "3 heads of 16 values and 2 heads of keys; supported"),
        ("qwen3.5", {"linear_value_head_dim": 100}, "a multiple of 16 values each"),
        ("qwen3.5", {"linear_conv_kernel_dim": 1}, "a convolution has 1 taps; supported: 2 "),
        ("qwen3.5", {"hidden_act": "gelu"}, "is 'gelu'; supported for a gated delta rule: 'silu'"),
        ("granite-hybrid", {"time_step_limit": 3}, "time_step_limit is 3; expected two numbers"),
        ("granite-hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'; supp"),
        ("granite-hybrid", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported for Mamba-2: 'silu'"),
        ("bamba", {"attn_layer_indices": 9}, "attn_layer_indices is 9; expected a list"),
        ("falcon-h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers is .*; expected 5 numbers"),
        ("falcon-h1", {"key_multiplier": 0}, r"key_multiplier is 0\.0; expected more than 0"),
        ("nemotron-h-moe", {"moe_latent_size": 8}, "sets moe_latent_size = 8"),
        ("nemotron-h-moe", {"n_group": 8}, "sets n_group = 8"),
        ("nemotron-h-moe", {"hybrid_override_pattern": "MX"}, "'X'"),
    ):
        with pytest.raises(ModelError, match=message):
            pytest.fail(f"{name}, {change}: {read_config(published(name, **change))}")
