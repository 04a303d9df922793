"""Folders of heads that are not what they say are refused, each with the fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specinfer.errors import ModelError, ModelFileError
from specinfer.heads.checkpoint import HeadFolder, head_shapes, open_head
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.speculators import write_head
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


Change = Callable[[dict[str, Any]], object]


def _layers(**changes: object) -> Change:
    return lambda c: c["transformer_layer_config"].update(changes)


def _with(**changes: object) -> Change:
    return lambda c: c.update(changes)


def _taps(ids: object) -> Change:
    return _with(eagle_aux_hidden_state_layer_ids=ids)


def _tensor(name: str, value: torch.Tensor) -> Change:
    return _with(**{name: value})


OFFSETS = torch.tensor([token - place for place, token in enumerate(IDS)])
HOSTILE_CONFIGS: list[tuple[Change, str]] = [
    (_with(speculators_model_type="telepathy"), "telepathy"),
    (_with(speculators_version="2.0"), "2.0"),
    (lambda c: c.pop("transformer_layer_config"), "transformer_layer_config"),
    (_layers(num_hidden_layers=10**12), "1000000000000 layers"),
    (_layers(model_type="qwen3_moe"), "qwen3_moe"),
    (_with(fc_norm=True, norm_before_fc=True), "norm_before_fc and fc_norm"),
    (_with(norm_output="yes"), "norm_output is 'yes'"),
    (_with(target_hidden_size=2 * SIZE), "hidden states of 64"),
    (_layers(vocab_size=2 * VOCAB), "a vocabulary of 128"),
    (_with(draft_vocab_size=VOCAB + 1), "draft_vocab_size is 65"),
    (_with(draft_vocab_size=NAMED - 1), r"\[23\]"),  # fewer than its output layer
    (_taps([0, 1, 4]), "reads layer 4"),
    (_taps([-1, 1, 2]), "different layers"),
    (_taps([1, 1, 2]), "different layers"),
    (_taps("all"), "list of layers"),
    (_taps([0, 1, 2, 3]), r"'fc\.weight'.*\[32, 128\]"),
    (
        lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=10**9),
        "guesses 1000000000",
    ),
]
HOSTILE_TENSORS: list[tuple[Change, str]] = [
    (_tensor("fc.weight", torch.zeros(SIZE, 3 * SIZE + 1)), r"'fc\.weight'"),
    (lambda t: t.pop("norm.weight"), "lacks tensor 'norm.weight'"),
    (_tensor("lora.weight", torch.zeros(3)), "'lora.weight'"),
    (_tensor("norm.weight", torch.zeros(SIZE, dtype=torch.int64)), "int64"),
    (_with(d2t=OFFSETS[:-1]), r"'d2t' has shape \[23\]"),
    (_with(d2t=OFFSETS + VOCAB), "'d2t' is damaged"),
    (_with(d2t=OFFSETS.flip(0)), "'d2t' is damaged"),
    (_with(d2t=OFFSETS + (2**63 - 1 - VOCAB)), "'d2t' is damaged"),
    (_with(d2t=OFFSETS.float()), "float32"),
    (lambda t: t.pop("d2t"), "lacks 'd2t'"),
    (_with(t2d=torch.ones(VOCAB, dtype=torch.bool)), "name different tokens"),
]
HOSTILE_BLOCKS: list[tuple[Change, str]] = [
    (_with(**{field: value}), field)
    for field in ("block_size", "mask_token_id", "markov_rank")
    for value in (-1, 10**9, "7", True)
]


def test_what_cannot_be_is_refused(tmp_path: Path, target: Path) -> None:
    for kind, cases, head in (
        ("config", HOSTILE_CONFIGS, eagle_config()),
        ("tensors", HOSTILE_TENSORS, eagle_config()),
        ("config", HOSTILE_BLOCKS, block_config()),
    ):
        for change, said in cases:
            write_tiny_head(tiny_head(head), tmp_path)
            change_head(tmp_path, **{kind: change})
            with pytest.raises(ModelError, match=said) as caught:
                HeadFolder(tmp_path, open_model(target).config)
            assert "\n" not in str(caught.value), said


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(value: float, target: Path, tmp_path: Path) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    change_head(tmp_path, tensors=lambda t: t["layers.0.mlp.down_proj.weight"].__setitem__((3, 5), value))
    opened = open_model(target)
    with pytest.raises(ModelError, match=r"down_proj\.weight.*not finite"):
        HeadFolder(tmp_path, opened.config).module(opened)


def test_a_pickle_is_refused_with_what_to_do(tmp_path: Path, target: Path) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"convert pytorch_model\.bin to safetensors"):
        HeadFolder(tmp_path, open_model(target).config)


def test_a_head_that_borrows_tables_of_another_size_is_refused(tmp_path: Path, target: Path) -> None:
    write_tiny_head(tiny_head(eagle_config()), tmp_path)
    wider = replace(open_model(target).config, hidden_size=48)
    change_head(
        tmp_path,
        config=lambda c: c.update(target_hidden_size=48),
        tensors=_tensor("fc.weight", torch.zeros(SIZE, 3 * 48)),
    )
    with pytest.raises(ModelError, match="cannot use the target's embeddings"):
        HeadFolder(tmp_path, wider)


def test_factors_that_cannot_be_are_refused(target: Path, tmp_path: Path) -> None:
    opened, folder = open_model(target), tmp_path / "head"
    cases: list[tuple[Change, str]] = [
        (lambda tensors: tensors.pop("fc.weight_scale"), "int8"),
        (_tensor("fc.weight_scale", torch.ones(3)), "int8"),
        (lambda tensors: tensors["fc.weight_scale"].fill_(float("nan")), "not finite"),
        (_tensor("norm.weight_scale", torch.ones(32)), "unexpected tensor"),
    ]
    for change, said in cases:
        write_head(tiny_head(block_config()), folder, verifier="t", architectures=["x"], dtype=torch.int8)
        change_head(folder, tensors=change)
        with pytest.raises(ModelFileError, match=said):
            HeadFolder(folder, opened.config).module(opened)


@pytest.mark.parametrize("size", [1 << 62, 10**30])
def test_sizes_that_no_tensor_has_are_refused(size: int) -> None:
    with pytest.raises(ModelError, match="tensors that are too large"):
        head_shapes(block_config(target_hidden_size=size))
