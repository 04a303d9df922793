"""No key of a config.json is skipped in silence: another value is another config, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specinfer.errors import ModelError
from specinfer.models.families.registry import HARMLESS, config_from_hf, hf_family, other_value

from .families import CASES, config_of

# Those that are read where another key is not there.
WINDOWS = ("sliding_window", "_sliding_window_pattern", "sliding_window_pattern", "use_sliding_window")
INSTEAD = dict.fromkeys((*WINDOWS, "max_window_layers"), "layer_types")
INSTEAD |= {
    "full_attn_idxs": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
    "rope_theta": "rope_parameters",
    "partial_rotary_factor": "rope_parameters",
}
INSTEAD["full_attention_interval"] = "layer_types"
# Those that transformers itself passes over in models of such a kind.
PASSED_OVER = {
    "phi3": {"original_max_position_embeddings"},  # rope is not scaled
    "phi3-partial-rope": {"original_max_position_embeddings"},
    "starcoder": {"num_key_value_heads"},  # multi_query says it
    "starcoder-heads": {"num_key_value_heads"},
    "falcon-7b": {"num_kv_heads"},
    "falcon-40b": {"multi_query"},
    "falcon-11b": {"multi_query"},
    "falcon-rw": {"num_kv_heads", "rope_parameters"},  # ALiBi
    "qwen2-moe": {"intermediate_size"},  # no layer is dense
    "qwen3-moe": {"sliding_window", "use_sliding_window"},  # the one needs the other
    "lfm2": {"block_multiple_of", "block_ffn_dim_multiplier"},  # block_auto_adjust_ff_dim is false
    "lfm2-biases": {"block_multiple_of", "block_ffn_dim_multiplier"},
    "qwen3.5-moe": {"intermediate_size"},  # likewise
    "granite-hybrid": {"intermediate_size", "rope_parameters"},  # no experts, no rope
    "granite-hybrid-limits": {"intermediate_size", "rope_parameters"},
    "gemma4": {"num_experts", "top_k_experts", "moe_intermediate_size"},  # enable_moe_block is off
    "gemma4-experts": {"use_double_wide_mlp", "vocab_size_per_layer_input"},
    "gemma4-large": {"num_experts", "top_k_experts", "moe_intermediate_size", "use_double_wide_mlp"}
    | {"vocab_size_per_layer_input"},  # no layer shares keys, and there are no per-layer embeddings
    "mpt": {"learned_pos_emb"},  # ALiBi
    "mpt-heads": {"learned_pos_emb"},
}


@pytest.mark.parametrize("name", CASES)
def test_each_key_is_read_or_refused(name: str, tmp_path: Path) -> None:
    config_of(name).save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    want = config_from_hf(said)
    skipped = set()
    for key, value in said.items():
        if (
            key in HARMLESS | PASSED_OVER.get(name, set()) | hf_family(said).passed_over
            or INSTEAD.get(key) in said
        ):
            continue
        try:
            if config_from_hf({**said, key: other_value(value)}) == want:
                skipped.add(key)
        except ModelError:
            continue
    assert skipped == set()
