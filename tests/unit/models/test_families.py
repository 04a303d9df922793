"""The families that are read are those that the docs list, and each refuses what no decoder computes."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specinfer.errors import ModelError
from specinfer.models.config import QkNorm
from specinfer.models.families import hybrids
from specinfer.models.families.registry import GGUF_FAMILIES, HF_FAMILIES, config_from_hf, read_config

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
    assert scout.experts is not None
    assert maverick.experts is not None
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
