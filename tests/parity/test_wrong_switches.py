"""Every switch of a family shows: with one of them off, or rows in another order, parity fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.errors import ModelError
from specinfer.models.config import ModelConfig
from specinfer.models.families.registry import HARMLESS, HF_FAMILIES, config_from_hf, hf_family, other_value
from specinfer.models.open_model import open_model
from specinfer.models.positions import Rope
from specinfer.models.weights import load_model
from specinfer.runtime.batch import Rows
from tests.states import StateRunner

from .families import CASES, config_of, save_random

PROMPT = [5, 17, 40, 3, 88, 61, 12, 12, 70, 29, 9, 54]
# No matter of logits, or of the file; or sizes that tensors have, too.
NOT_SEEN = {"eos_ids", "part", "weight_factors", "layer_inner"}
SEEN = 1e-3


def wrong(config: ModelConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every change that turns one switch of the config off."""
    for field in fields(config):
        value = getattr(config, field.name)
        if field.default is not MISSING and field.name not in NOT_SEEN and value != field.default:
            yield field.name, {field.name: field.default}
    if config.window is not None:
        yield "layer_windows", {"layer_windows": (None,) * config.num_layers}
    if (experts := config.experts) is not None:
        other: dict[str, Any] = {"per_token": experts.per_token - 1}
        if not experts.beside:  # a norm of their sum takes its size away
            other["normalized"] = not experts.normalized
        off = {name: type(value)() for name in ("shared_size", "bias") if (value := getattr(experts, name))}
        for name, value in {**other, **off}.items():
            yield f"experts.{name}", {"experts": replace(experts, **{name: value})}
    if (recurrence := config.recurrence) is not None:
        for field in fields(recurrence):
            if field.default is not MISSING and getattr(recurrence, field.name) != field.default:
                with suppress(ModelError):  # sizes have no default that makes sense
                    other = replace(recurrence, **{field.name: field.default})
                    yield f"recurrence.{field.name}", {"recurrence": other}
    yield "attention_scale", {"attention_scale": 1.5 * config.attention_scale}
    if config.rope is not None:
        yield "rope.theta", {"rope": replace(config.rope, theta=2 * config.rope.theta)}
        for field in fields(Rope):
            if field.default is not MISSING and getattr(config.rope, field.name) != field.default:
                rope = replace(config.rope, **{field.name: field.default})
                yield f"rope.{field.name}", {"rope": rope}


@cache
def folder_of(name: str, base: Path) -> tuple[Path, torch.Tensor]:
    """A model of the case, untied, and transformers' logits."""
    theirs = save_random(name, base / name, tied=False)
    with torch.no_grad():
        return base / name, theirs(torch.tensor([PROMPT])).logits[0]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wrong")


def difference(folder: Path, want: torch.Tensor, change: dict[str, Any]) -> float:
    """The largest difference of logits where the config is changed; a change that is refused is one, too."""
    file = open_model(folder)
    try:
        file.config = replace(file.config, **change)
        model = load_model(file, dtype=torch.float32, device=torch.device("cpu"))
    except (ModelError, AssertionError, KeyError):
        return float("inf")
    try:
        got = StateRunner(model, num_blocks=4, block_size=4).forward([Rows(PROMPT, 0, [0, 1, 2, 3], 0)])
    except RuntimeError:  # matrices do not fit
        return float("inf")
    return float((got - want).abs().max())


@pytest.mark.few(8)
@pytest.mark.parametrize("name", CASES)
def test_each_switch_of_a_config_shows(name: str, base: Path) -> None:
    folder, want = folder_of(name, base)
    assert difference(folder, want, {}) < 1e-4
    found = {switch: difference(folder, want, change) for switch, change in wrong(open_model(folder).config)}
    assert {switch: size for switch, size in found.items() if not size > SEEN} == {}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", CASES)
def test_each_order_of_rows_shows(name: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, want = folder_of(name, base)
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    family = HF_FAMILIES[kind]
    for order in ("neighbours", "by_key_head"):
        alike = order == "by_key_head" and open_model(folder).config.num_kv_heads == 1
        if getattr(family.names, order) and not alike:
            other = replace(family, names=replace(family.names, **{order: False}))
            monkeypatch.setitem(HF_FAMILIES, kind, other)
            assert difference(folder, want, {}) > SEEN


# No key of a config.json is skipped in silence: another value is another config, or is refused.


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
