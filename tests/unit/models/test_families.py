"""The families that are read are those that the docs list, and each refuses what no decoder computes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specinfer.errors import ModelError
from specinfer.models.config import QkNorm
from specinfer.models.families.registry import GGUF_FAMILIES, HF_FAMILIES, config_from_hf

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


MPT = {"model_type": "mpt", "vocab_size": 100, "d_model": 64, "n_layers": 2, "n_heads": 4}
FALCON = {**SIZES, "model_type": "falcon"}


INVERSE = {"model_type": "gpt2", "vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 1}


def llama_like(kind: str, **more: object) -> dict[str, object]:
    return {**SIZES, "model_type": kind, "intermediate_size": 96, **more}


def test_switches_that_nobody_computes_are_named() -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({**MPT, "attn_config": {"alibi": False}}, "alibi = False; supported for MPT: True"),
        ({**MPT, "attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max = 16; supported for MPT: 8"),
        ({**MPT, "attn_config": {"qk_ln": True}}, "qk_ln = True; supported for MPT: False"),
        ({**MPT, "no_bias": False}, "no_bias = False; supported for MPT: True"),
        ({**FALCON, "new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn = False and"),
        ({**FALCON, "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2; supported: the"),
        (llama_like("cohere", use_qk_norm=True), "sets use_qk_norm = True, which specinfer does not compute"),
        (llama_like("stablelm", qk_layernorm=True), "sets qk_layernorm = True"),
        ({**INVERSE, "scale_attn_by_inverse_layer_idx": True}, "sets scale_attn_by_inverse_layer_idx = True"),
        (llama_like("smollm3", no_rope_layers=[1]), r"is \[1\]; expected 0 or 1 for each of 2 layers"),
    ]
    for config, words in cases:
        with pytest.raises(ModelError, match=words):
            config_from_hf(config)
    moe = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "use_qk_norm": True}
    assert config_from_hf(llama_like("qwen3_moe", **moe)).qk_norm is QkNorm.HEAD, "it computes this norm"
