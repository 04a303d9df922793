"""Heads in the layouts of their authors: the same heads as in ours, tap for tap and tensor for tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specinfer.engine.drafts import find
from specinfer.errors import ModelError
from specinfer.heads.checkpoint import HeadFolder, is_head
from specinfer.heads.layouts import body_from_hf
from specinfer.heads.speculators import body_to_hf
from specinfer.models.open_model import open_model
from specinfer.progress import NoProgress
from tests.head_layouts import LAYOUTS, write_layout
from tests.heads import VOCAB, tiny_body
from tests.published_configs import LAYERS, Json
from tests.tiny_models import write_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"), num_layers=LAYERS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_authors_layout_is_read_as_the_head_it_is(name: str, target: Path, tmp_path: Path) -> None:
    head = write_layout(LAYOUTS[name], tmp_path / "head")
    assert is_head(tmp_path / "head")
    opened = open_model(target)
    folder = HeadFolder(tmp_path / "head", opened.config)
    assert folder.config == head.config, "taps above all: one layer off nothing else would tell"
    again = folder.module(opened).state_dict()
    for tensor_name, tensor in head.state_dict().items():
        borrowed = (tensor_name == "embed_tokens.weight" and not head.config.own_embedding) or (
            tensor_name == "lm_head.weight" and not head.config.own_head
        )
        assert borrowed or torch.equal(again[tensor_name], tensor), tensor_name


def test_embeddings_are_what_layer_minus_one_puts_out(target: Path, tmp_path: Path) -> None:
    write_layout(LAYOUTS["DSpark"], tmp_path / "head")
    assert json.loads((tmp_path / "head/config.json").read_text())["target_layer_ids"] == [-1, 3]
    assert HeadFolder(tmp_path / "head", open_model(target).config).config.taps == (0, 4)


def inside(**fields: object) -> Callable[[Json], object]:
    def change(described: Json) -> None:
        described["dflash_config"].update(fields)

    return change


def beside(**fields: object) -> Callable[[Json], object]:
    def change(described: Json) -> None:
        described.update(fields)

    return change


def without(field: str) -> Callable[[Json], object]:
    return lambda described: described.pop(field, None)


SPARK = "SpecForge's DSpark"
REFUSED: list[tuple[str, Callable[[Json], object], str]] = [
    ("DFlash", inside(projector_type="conv"), "projector_type is 'conv'; supported: dflash"),
    (
        "DFlash",
        inside(projector_type="domino", gru_hidden_dim=4),
        "projector_type is 'domino'; supported: df",
    ),
    ("DFlash", beside(architectures=["DominoDraftModel"]), "DominoDraftModel; supported: EAGLE"),
    ("DFlash", beside(architectures=["DFlash2DraftModel"]), "lacks tensor 'layers.0.attention_conv"),
    ("DFlash", inside(conv_kernel_size=2), "lacks tensor 'layers.0.attention_conv"),
    ("DFlash", beside(projector_type="domino"), "projector_type is 'domino'"),
    ("DFlash", inside(markov_rank=6), "markov_rank is 6; supported: 0"),
    ("DFlash", inside(output_multiplier=0.5), "output_multiplier is 0.5; supported: 1"),
    ("DFlash", beside(output_multiplier=0.5), "output_multiplier is 0.5; supported: 1"),
    ("DFlash", inside(use_aux_hidden_state=False), "use_aux_hidden_state is False"),
    ("DFlash", lambda c: c["dflash_config"].pop("target_layer_ids"), "target_layer_ids is None"),
    (SPARK, inside(target_layer_ids="1"), "target_layer_ids is '1'; expected a list"),
    ("DFlash", inside(target_layer_ids=[1, LAYERS]), f"reads layer {LAYERS + 1} of its"),
    ("DFlash", lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id is None"),
    ("JetSpec", inside(causal=False), "causal and causal_head differ"),
    ("DFlash", beside(dflash_config=[1]), "expected a JSON object"),
    ("DSpark", beside(markov_head_type="gated"), "'gated'; supported: vanilla"),
    (SPARK, inside(markov_head_type="rnn"), "'rnn'; supported: vanilla"),
    (SPARK, inside(projector_type="dflash"), "'dflash'; supported: dspark"),
    (SPARK, inside(attention_mode="mla"), "attention_mode is 'mla'; supported: gqa, mha"),
    (SPARK, beside(markov_rank=5), "markov_rank is 6 in dflash_config and 5 at the top level"),
    (SPARK, inside(markov_rank=-1), "markov_rank is -1"),
    (SPARK, beside(block_size="7"), "block_size is '7'"),
    (SPARK, beside(model_type="deepseek_v4"), "'deepseek_v4'; supported: llama, qwen2, qwen3"),
    ("DSpark", beside(model_type="llama"), "supported: qwen3"),  # its layers have no norms
    (
        "SpecForge 3.1",
        lambda c: c["eagle_config"].update(use_aux_hidden_state=False),
        "hidden_state is false",
    ),
    ("DSpark", beside(mask_token_id=VOCAB), f"mask_token_id is {VOCAB}"),
]


def test_what_is_not_computed_is_refused(target: Path, tmp_path: Path) -> None:
    config = open_model(target).config
    for number, (name, change, said) in enumerate(REFUSED):
        write_layout(LAYOUTS[name], tmp_path / str(number), change)
        assert is_head(tmp_path / str(number)), said
        with pytest.raises(ModelError, match=said):
            HeadFolder(tmp_path / str(number), config)


def test_a_head_that_calls_itself_a_language_model_makes_no_text(tmp_path: Path) -> None:
    for name in ("EAGLE-3 of its authors", "EAGLE-3 of Vicuna", "AngelSlim", "Automodel"):
        write_layout(LAYOUTS[name], folder := tmp_path / name)
        with pytest.raises(ModelError, match=r"is a draft head \(EAGLE-3\), which makes no text: name it in"):
            open_model(folder)
        with pytest.raises(ModelError, match="is a draft head, not a model: name it in drafts"):
            find(str(folder), NoProgress())


def test_what_a_config_leaves_out_is_read_off_the_tensors(target: Path, tmp_path: Path) -> None:
    for field in ("draft_vocab_size", "head_dim", "num_hidden_layers"):
        head = write_layout(LAYOUTS["EAGLE-3 of its authors"], tmp_path / field, without(field))
        assert HeadFolder(tmp_path / field, open_model(target).config).config == head.config, field


def test_scaled_rotations_of_a_head_are_written_as_they_were_read() -> None:
    for scaling in (
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ):
        read = body_from_hf({**body_to_hf(tiny_body()), "rope_scaling": scaling})
        again = body_from_hf(body_to_hf(read))
        assert (again.rope, again.max_context) == (read.rope, read.max_context) != (tiny_body().rope, 256)
