"""The families that are read are those that the docs list, and each refuses what no decoder computes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specinfer.errors import ModelError
from specinfer.kernels.recurrence_config import LayerKind, Recurrence
from specinfer.models.config import Norm, NormPlace, QkNorm
from specinfer.models.families import hybrids
from specinfer.models.families.registry import GGUF_FAMILIES, HF_FAMILIES, config_from_hf, read_config
from specinfer.models.fields import Fields
from specinfer.models.layers import RotaryEmbedding, rope_frequencies, rotations
from specinfer.models.positions import Rope, YarnScaling
from tests.heads import tiny_body
from tests.parity.families import config_of

SIZES = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DOCS = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_docs_list_every_family() -> None:
    rows = re.findall(r"^\| [A-Z].* \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    columns = [row.strip(" |").split(" | ") for row in rows]
    listed = [[name for row in columns for name in re.findall(r"`(.+?)`", (*row, "")[i])] for i in (1, 2)]
    assert sorted(listed[0]) == sorted(HF_FAMILIES)
    assert sorted({*listed[1]}) == sorted(GGUF_FAMILIES)


def test_falcons_of_before_they_were_called_so() -> None:
    """Their config.json has other words, and of the 40B it does not say which layout it has."""
    old = {"vocab_size": 100, "hidden_size": 64, "n_layer": 2, "n_head": 4}
    small = config_from_hf({**old, "model_type": "RefinedWebModel", "multi_query": True})
    assert (small.num_layers, small.num_heads, small.num_kv_heads, small.shared_norm) == (2, 4, 1, True)
    large = config_from_hf({**old, "model_type": "RefinedWeb", "n_head_kv": 2})
    assert (large.num_kv_heads, large.shared_norm, large.intermediate_size) == (2, False, 256)


def test_a_window_of_the_whole_context_is_none() -> None:
    phi = {**SIZES, "model_type": "phi3", "intermediate_size": 96, "max_position_embeddings": 512}
    windows = [config_from_hf({**phi, "sliding_window": window}).window for window in (511, 512, None)]
    assert windows == [511, None, None]


SCOUT: dict[str, object] = {
    **{"model_type": "llama4_text", "attention_bias": False, "attention_chunk_size": 8192, "head_dim": 128},
    **{"bos_token_id": 200000, "eos_token_id": [200001, 200007, 200008], "for_llm_compressor": False},
    **{"hidden_act": "silu", "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192},
    **{"intermediate_size_mlp": 16384, "max_position_embeddings": 10485760, "no_rope_layers": []},
    **{"num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "vocab_size": 202048},
    **{"num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    **{"router_aux_loss_coef": 0.001, "use_qk_norm": True, "attn_temperature_tuning": 4},
    "rope_scaling": {
        **{"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
        "original_max_position_embeddings": 8192,
    },
}


def test_llama_4_as_it_is_published(caplog: pytest.LogCaptureFixture) -> None:
    """Scout has mixtures alone; Maverick has them in every second layer, and no norm of q and k."""
    scout = read_config(SCOUT)
    own = {"use_qk_norm": False, "interleave_moe_layer_step": 2, "num_local_experts": 128}
    maverick = read_config({**SCOUT, **own, "no_rope_layers": [1, 1, 1, 0] * 12})
    assert caplog.messages == []
    assert (scout.experts.dense_layers, scout.qk_norm) == (frozenset(), QkNorm.PLAIN)
    assert (maverick.experts.dense_layers, maverick.qk_norm) == ({*range(0, 48, 2)}, QkNorm.NONE)
    assert (scout.intermediate_size, maverick.intermediate_size) == (8192, 16384)
    assert scout.layers_without_rope == maverick.layers_without_rope == {*range(3, 48, 4)}
    assert scout.max_context == 8191, "later queries are scaled"
    assert read_config({**SCOUT, "attn_temperature_tuning": False}).max_context == 8192, "a chunk"
    for more, words in (
        ({"moe_layers": 3}, "moe_layers is 3; expected a list of layers"),
        ({"layer_types": ["sliding"] * 48}, r"layer_types holds \['sliding'\]"),
    ):
        with pytest.raises(ModelError, match=words):
            config_from_hf({**SCOUT, **more})


def test_a_gguf_file_of_a_hybrid_without_a_size_is_told_its_own_key() -> None:
    config: Any = SimpleNamespace(num_layers=2)
    head: Any = SimpleNamespace(fields={"attention.head_count_kv": [1, 0]}, shapes={})
    for read, key in (
        (hybrids._lfm2_from_gguf, "shortconv.l_cache"),
        (hybrids._qwen_from_gguf, "ssm.group_count"),
    ):
        with pytest.raises(ModelError, match=re.escape(key)):
            read(config, head)


# Hybrids as published: every key is read as transformers' own, or known to change nothing.


# Fields of published files beside those of transformers' configs, and in their place (...: without).
ALWAYS: Fields = {"torch_dtype": "bfloat16", "transformers_version": "4.55.0", "use_cache": True}
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
    given = {**config_of(name).to_dict(), **ALWAYS, **MORE[name], **changes}
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


# Impossible models are refused before their weights are read.


BODY = tiny_body()  # of 4 heads, and one layer


def test_rms_norms_with_a_bias_are_refused() -> None:
    with pytest.raises(ModelError, match="RMSNorms have a bias"):
        replace(BODY, norm_bias=True)


def test_layers_of_another_form_than_llamas_are_known() -> None:
    assert BODY.plain_layers
    assert replace(BODY, qk_norm=QkNorm.HEAD, qkv_bias=True, layer_windows=(4,)).plain_layers
    others: list[dict[str, Any]] = [
        *({"norm": Norm.LAYER}, {"norm_place": NormPlace.BOTH}, {"gated_mlp": False}, {"rope": None}),
        *({"parallel_block": True}, {"layers_without_rope": frozenset({0})}, {"attention_sinks": True}),
        *({"attention_softcap": 50.0}, {"qkv_clip": 8.0}, {"qk_norm": QkNorm.WHOLE}, {"residual_scale": 0.2}),
    ]
    for changes in others:
        assert not replace(BODY, **changes).plain_layers, changes


def test_recurrences_of_other_sizes_are_refused() -> None:
    good: dict[str, Any] = {"kind": LayerKind.MAMBA2, "taps": 4, "channels": 96, "heads": 4, "groups": 2}
    good |= {"key_size": 8, "value_size": 16}
    Recurrence(**good)
    for wrong, fault in (
        ({"taps": 1}, "a convolution has 1 taps; supported: 2 to 16"),
        ({"taps": 17}, "a convolution has 17 taps"),
        (
            {"groups": 3},
            "4 heads of 16 values and 3 heads of keys; supported: a multiple of the heads of keys",
        ),
        ({"heads": 0}, "heads of the recurrence is 0"),
        ({"value_size": 24}, "4 heads of 24 values .* a multiple of 16 values each"),
    ):
        with pytest.raises(ModelError, match=fault):
            Recurrence(**{**good, **wrong})


# Tables of rotations; tests/parity compares the rotations with transformers'.


def test_a_text_has_no_rotations_behind_its_longest() -> None:
    one, other = (RotaryEmbedding(Rope(theta), 4) for theta in (1.0, 16.0))
    for longest, positions, made in ((4096, 3, 512), (4096, 513, 1024), (700, 513, 700), (100, 3, 100)):
        [rope] = rotations([one], longest, positions)
        assert len(rope.cos) == len(rope.sin) == made
    ropes = rotations([one, other], 700, 701)
    assert [len(rope.cos) for rope in ropes] == [701, 701], "what is asked for, there is"
    frequencies = rope_frequencies(Rope(16.0), 4)
    assert torch.equal(ropes[1].cos[:300], torch.cos(torch.arange(300.0)[:, None] * frequencies))


def test_what_is_not_rotated_stays_to_the_bit() -> None:
    """Four of eight elements are: pairs (0, 4) and (1, 5)."""
    scaling = YarnScaling(4.0, 16, attention_factor=1.25)
    rope = RotaryEmbedding(Rope(100.0, rotated=4, yarn=scaling), 8).at(torch.tensor([5, 100_000]))
    assert torch.equal(rope.cos[:, 2:], torch.ones(2, 2))
    assert torch.equal(rope.sin[:, 2:], torch.zeros(2, 2))
    assert (rope.cos**2 + rope.sin**2)[:, :2].flatten().tolist() == pytest.approx([1.5625] * 4)
