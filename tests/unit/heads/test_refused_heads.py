"""Folders of heads that are not what they say are refused, each with the fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer.errors import ModelError, ModelFileError
from specinfer.heads.checkpoint import HeadFolder, head_shapes, open_head
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.speculators import write_head
from specinfer.models.config import ModelConfig
from specinfer.models.fingerprint import fingerprint
from specinfer.models.open_model import open_model
from tests.heads import (
    IDS,
    NAMED,
    SIZE,
    VOCAB,
    block_config,
    change_head,
    eagle_config,
    tiny_head,
    write_tiny_head,
)
from tests.tiny_models import write_tiny_llama


@pytest.mark.parametrize("config", [eagle_config(), block_config()])
def test_a_head_that_says_whose_it_is_is_refused_by_others(
    config: EagleConfig | BlockConfig, target: Path, tmp_path: Path
) -> None:
    opened = open_model(target)
    others = open_model(write_tiny_llama(tmp_path / "other", num_layers=3, tie_embeddings=False, seed=1))
    named = {"verifier": "tiny", "architectures": []}
    write_head(tiny_head(config), tmp_path / "head", **named, fingerprint=fingerprint(opened))  # type: ignore[arg-type]
    assert open_head(tmp_path / "head", opened).config == config
    with pytest.raises(ModelError, match="for tiny, which has other weights than other"):
        open_head(tmp_path / "head", others)
    assert HeadFolder(tmp_path / "head", others.config).config == config  # to be trained on, for one
    write_tiny_head(tiny_head(config), tmp_path / "anybody")
    assert open_head(tmp_path / "anybody", others).fingerprint is None


def _layers(**changes: object) -> Callable[[dict[str, Any]], object]:
    return lambda c: c["transformer_layer_config"].update(changes)


def _with(name: str, value: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda t: t.update({name: value})


OFFSETS = torch.tensor([token - place for place, token in enumerate(IDS)])
HOSTILE_CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "an unknown kind": (lambda c: c.update(speculators_model_type="telepathy"), "telepathy"),
    "a version to come": (lambda c: c.update(speculators_version="2.0"), "2.0"),
    "no layers": (lambda c: c.pop("transformer_layer_config"), "transformer_layer_config"),
    "layers without end": (_layers(num_hidden_layers=10**12), "1000000000000 layers"),
    "experts": (_layers(model_type="qwen3_moe"), "qwen3_moe"),
    "a sliding window": (
        _layers(
            model_type="qwen3", use_sliding_window=True, sliding_window=16, layer_types=["sliding_attention"]
        ),
        "sliding window of 16",
    ),
    "both norms": (lambda c: c.update(fc_norm=True, norm_before_fc=True), "norm_before_fc and fc_norm"),
    "a flag that is none": (lambda c: c.update(norm_output="yes"), "norm_output is 'yes'"),
    "another hidden size": (lambda c: c.update(target_hidden_size=2 * SIZE), "hidden states of 64"),
    "another vocabulary": (_layers(vocab_size=2 * VOCAB), "a vocabulary of 128"),
    "more tokens than there are": (lambda c: c.update(draft_vocab_size=VOCAB + 1), "draft_vocab_size is 65"),
    "fewer than its output layer": (lambda c: c.update(draft_vocab_size=NAMED - 1), r"\[23\]"),
    "a layer the target lacks": (
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 4]),
        "reads layer 4",
    ),
    "a layer below the first": (
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[-1, 1, 2]),
        "different layers",
    ),
    "a layer twice": (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 1, 2]), "different layers"),
    "layers that are none": (lambda c: c.update(eagle_aux_hidden_state_layer_ids="all"), "list of layers"),
    "more taps than fc reads": (
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 2, 3]),
        r"'fc\.weight'.*\[32, 128\]",
    ),
    "unspeakable depth": (
        lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=10**9),
        "guesses 1000000000",
    ),
}
HOSTILE_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "fc of another target": (_with("fc.weight", torch.zeros(SIZE, 3 * SIZE + 1)), r"'fc\.weight'"),
    "a missing tensor": (lambda t: t.pop("norm.weight"), "lacks tensor 'norm.weight'"),
    "a tensor too many": (_with("lora.weight", torch.zeros(3)), "'lora.weight'"),
    "integers for numbers": (_with("norm.weight", torch.zeros(SIZE, dtype=torch.int64)), "int64"),
    "fewer ids": (_with("d2t", OFFSETS[:-1]), r"'d2t' has shape \[23\]"),
    "ids out of range": (_with("d2t", OFFSETS + VOCAB), "'d2t' is damaged"),
    "ids that do not ascend": (_with("d2t", OFFSETS.flip(0)), "'d2t' is damaged"),
    "ids that overflow": (_with("d2t", OFFSETS + (2**63 - 1 - VOCAB)), "'d2t' is damaged"),
    "ids that are no numbers": (_with("d2t", OFFSETS.float()), "float32"),
    "no ids": (lambda t: t.pop("d2t"), "lacks 'd2t'"),
    "ids given twice": (_with("t2d", torch.ones(VOCAB, dtype=torch.bool)), "name different tokens"),
}


@pytest.mark.parametrize(("change", "said"), HOSTILE_CONFIGS.values(), ids=HOSTILE_CONFIGS)
def test_a_config_that_cannot_be_is_refused(
    change: Callable[[dict[str, Any]], object], said: str, tmp_path: Path, target_config: ModelConfig
) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    change_head(tmp_path, config=change)
    with pytest.raises(ModelError, match=said) as caught:
        HeadFolder(tmp_path, target_config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("change", "said"), HOSTILE_TENSORS.values(), ids=HOSTILE_TENSORS)
def test_tensors_that_cannot_be_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object],
    said: str,
    tmp_path: Path,
    target_config: ModelConfig,
) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    change_head(tmp_path, tensors=change)
    with pytest.raises(ModelError, match=said) as caught:
        HeadFolder(tmp_path, target_config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value: float, target: Path, tmp_path: Path) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    change_head(tmp_path, tensors=lambda t: t["layers.0.mlp.down_proj.weight"].__setitem__((3, 5), value))
    opened = open_model(target)
    with pytest.raises(ModelError, match=r"down_proj\.weight.*not finite"):
        HeadFolder(tmp_path, opened.config).module(opened)


@pytest.mark.parametrize("field", ["block_size", "mask_token_id", "markov_rank"])
@pytest.mark.parametrize("value", [-1, 10**9, "7", True])
def test_blocks_that_cannot_be_are_refused(
    field: str, value: object, tmp_path: Path, target_config: ModelConfig
) -> None:
    write_tiny_head(tiny_head(block_config()), tmp_path)
    change_head(tmp_path, config=lambda c: c.update({field: value}))
    with pytest.raises(ModelError, match=field):
        HeadFolder(tmp_path, target_config)


def test_a_pickle_is_refused_with_what_to_do(tmp_path: Path, target_config: ModelConfig) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"convert pytorch_model\.bin to safetensors"):
        HeadFolder(tmp_path, target_config)


def test_a_head_that_borrows_tables_of_another_size_is_refused(
    tmp_path: Path, target_config: ModelConfig
) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    wider = replace(target_config, hidden_size=48, embedding_size=48)
    change_head(
        tmp_path,
        config=lambda c: c.update(target_hidden_size=48),
        tensors=_with("fc.weight", torch.zeros(SIZE, 3 * 48)),
    )
    with pytest.raises(ModelError, match="cannot use the target's embeddings"):
        HeadFolder(tmp_path, wider)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("fc.weight_scale"), "int8"),
        (lambda tensors: tensors.update({"fc.weight_scale": torch.ones(3)}), "int8"),
        (lambda tensors: tensors["fc.weight_scale"].fill_(float("nan")), "not finite"),
        (lambda tensors: tensors.update({"norm.weight_scale": torch.ones(32)}), "unexpected tensor"),
    ],
    ids=["no factors", "too few", "no numbers", "factors of floats"],
)
def test_factors_that_cannot_be_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object], said: str, target: Path, tmp_path: Path
) -> None:
    opened = open_model(target)
    write_head(
        tiny_head(block_config()), tmp_path / "head", verifier="t", architectures=["x"], dtype=torch.int8
    )
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelFileError, match=said):
        HeadFolder(tmp_path / "head", opened.config).module(opened)


@pytest.mark.parametrize("size", [1 << 62, 10**30])
def test_sizes_that_no_tensor_has_are_refused(size: int) -> None:
    with pytest.raises(ModelError, match="tensors that are too large"):
        head_shapes(block_config(target_hidden_size=size))
