"""Heads in the layouts of their authors: the same heads as in ours, tap for tap and tensor for tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.heads import VOCAB
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


DSPARK = "SpecForge's DSpark"
REFUSED: dict[str, tuple[str, Callable[[Json], object], str]] = {
    "another projector": (
        "DFlash",
        inside(projector_type="conv"),
        "projector_type is 'conv'; supported: dflash",
    ),
    "Domino's projector": (
        "DFlash",
        inside(projector_type="domino", emb_dim=4, gru_hidden_dim=4, shift_label=True),
        "projector_type is 'domino'; supported: dflash",
    ),
    "Domino": (
        "DFlash",
        beside(architectures=["DominoDraftModel"]),
        "DominoDraftModel; supported: EAGLE",
    ),
    "DFlash 2": (
        "DFlash",
        beside(architectures=["DFlash2DraftModel"]),
        "DFlash2DraftModel; supported: EAGLE",
    ),
    "DFlash 2's fields": (
        "DFlash",
        inside(conv_kernel_size=2),
        "dflash_config has conv_kernel_size = 2; supp",
    ),
    "a projector beside": ("DFlash", beside(projector_type="domino"), "projector_type is 'domino'"),
    "a Markov term of DFlash": ("DFlash", inside(markov_rank=6), "markov_rank is 6; supported: 0"),
    "logits that are scaled": (
        "DFlash",
        inside(output_multiplier=0.5),
        "output_multiplier is 0.5; supported: 1",
    ),
    "logits that are scaled by a field beside": (
        "DFlash",
        beside(output_multiplier=0.5),
        "output_multiplier is 0.5; supported: 1",
    ),
    "last features of DFlash": (
        "DFlash",
        inside(use_aux_hidden_state=False),
        "use_aux_hidden_state is False",
    ),
    "no ids": ("DFlash", lambda c: c["dflash_config"].pop("target_layer_ids"), "target_layer_ids is None"),
    "ids that are no list": (
        DSPARK,
        inside(target_layer_ids="1"),
        "target_layer_ids is '1'; expected a list",
    ),
    "a layer the target lacks": ("DFlash", inside(target_layer_ids=[1, LAYERS]), "reads the output of layer"),
    "no mask": ("DFlash", lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id is None"),
    "rows both causal and not": ("JetSpec", inside(causal=False), "causal and causal_head differ"),
    "no dflash_config that can be read": ("DFlash", beside(dflash_config=[1]), "expected a JSON object"),
    "a gated term": ("DSpark", beside(markov_head_type="gated"), "'gated'; supported: vanilla"),
    "a recurrent term inside": (DSPARK, inside(markov_head_type="rnn"), "'rnn'; supported: vanilla"),
    "DSpark of DFlash's projector": (DSPARK, inside(projector_type="dflash"), "'dflash'; supported: dspark"),
    "latent attention": (
        DSPARK,
        inside(attention_mode="mla"),
        "attention_mode is 'mla'; supported: gqa, mha",
    ),
    "two ranks": (DSPARK, beside(markov_rank=5), "markov_rank is 6 in dflash_config and 5 at the top level"),
    "a rank that is none": (DSPARK, inside(markov_rank=-1), "markov_rank is -1"),
    "a size that is no number": (DSPARK, beside(block_size="7"), "block_size is '7'"),
    "layers of DeepSeek V4": (
        DSPARK,
        beside(model_type="deepseek_v4"),
        "'deepseek_v4'; supported: llama, qwen2, qwen3",
    ),
    "layers without norms": ("DSpark", beside(model_type="llama"), "supported: qwen3"),
    "last features alone": (
        "SpecForge 3.1",
        lambda c: c["eagle_config"].update(use_aux_hidden_state=False),
        "use_aux_hidden_state is false",
    ),
    "a mask outside the vocabulary": ("DSpark", beside(mask_token_id=VOCAB), f"mask_token_id is {VOCAB}"),
}


@pytest.mark.parametrize(("name", "change", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_computed_is_refused(
    name: str, change: Callable[[Json], object], said: str, target: Path, tmp_path: Path
) -> None:
    write_layout(LAYOUTS[name], tmp_path / "head", change)
    assert is_head(tmp_path / "head")
    with pytest.raises(ModelError, match=said):
        HeadFolder(tmp_path / "head", open_model(target).config)


TOLD_BY_TENSORS = [
    *("EAGLE-3 of its authors", "EAGLE-3 of Vicuna", "AngelSlim", "Automodel"),
]


@pytest.mark.parametrize("name", TOLD_BY_TENSORS)
def test_a_head_that_calls_itself_a_language_model_makes_no_text(name: str, tmp_path: Path) -> None:
    write_layout(LAYOUTS[name], tmp_path / "head")
    with pytest.raises(
        ModelError, match=r"is a draft head \(EAGLE-3\), which makes no text: name it in drafts"
    ):
        open_model(tmp_path / "head")
    with pytest.raises(ModelError, match="is a draft head, not a model: name it in drafts"):
        find(str(tmp_path / "head"), NoProgress())


@pytest.mark.parametrize("field", ["draft_vocab_size", "head_dim", "num_hidden_layers"])
def test_what_a_config_leaves_out_is_read_off_the_tensors(field: str, target: Path, tmp_path: Path) -> None:
    head = write_layout(LAYOUTS["EAGLE-3 of its authors"], tmp_path / "head", lambda c: c.pop(field, None))
    assert HeadFolder(tmp_path / "head", open_model(target).config).config == head.config


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    ],
)
def test_scaled_rotations_of_a_head_are_written_as_they_were_read(scaling: dict[str, Any]) -> None:
    read = body_from_hf(
        {
            **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 128},
            **{"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"max_position_embeddings": 2048, "rope_theta": 10000.0, "rope_scaling": scaling},
        }
    )
    again = body_from_hf(body_to_hf(read))
    assert (again.rope, again.max_context) == (read.rope, read.max_context)
