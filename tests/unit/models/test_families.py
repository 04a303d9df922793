"""The families that are read are those that the docs list, and each refuses what no decoder computes."""

from __future__ import annotations

import re
from pathlib import Path

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
