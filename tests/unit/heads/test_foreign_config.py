"""Heads in the layouts of their authors: the same heads as in ours, tap for tap and tensor for tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer.errors import ModelError
from specinfer.heads.block import BlockHead
from specinfer.heads.checkpoint import HeadFolder, is_head
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.eagle import EagleHead
from specinfer.models.weights import open_model
from tests.heads import SIZE, VOCAB, block_config, eagle_config, tiny_head, write_tiny_head
from tests.tiny_models import write_tiny_llama

Json = dict[str, Any]
LAYERS = 8  # of the target
EAGLE_LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"), num_layers=LAYERS)


def flat(written: Json, *names: str) -> Json:
    """The layers' config with what heads of a layout have beside it."""
    layers = dict(written["transformer_layer_config"])
    for key in ("is_causal", "layer_types", "use_sliding_window", "sliding_window"):
        layers.pop(key, None)
    return layers | {name: written[name] for name in names}


def eagle(written: Json) -> Json:
    """As SafeAILab's EAGLE and SpecForge write it: layers 2, L // 2 and L - 3 are meant."""
    names = ("draft_vocab_size", "fc_norm", "norm_output")
    return flat(written, *names) | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}


def eagle_with_taps(written: Json) -> Json:
    """As vLLM reads it: a layer is named by what it is given."""
    return eagle(written) | {EAGLE_LAYERS: written[EAGLE_LAYERS]}


def eagle_with_layers(written: Json) -> Json:
    """As SpecForge writes it, whose layer i is the one that puts out what we call i + 1."""
    ids = [tap - 1 for tap in written[EAGLE_LAYERS]]
    return eagle(written) | {"eagle_config": {"use_aux_hidden_state": True, EAGLE_LAYERS: ids}}


def dflash(written: Json) -> Json:
    """As z-lab writes it: layer i is the one that puts out what we call i + 1."""
    own = {
        "mask_token_id": written["mask_token_id"],
        "target_layer_ids": [tap - 1 for tap in written["aux_hidden_state_layer_ids"]],
    }
    return flat(written, "block_size") | {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": own,
        "num_target_layers": LAYERS,
        "layer_types": ["full_attention"] * 2,
    }


def newer_dflash(written: Json) -> Json:
    """The same with the size of blocks inside."""
    config = dflash(written)
    config["dflash_config"]["block_size"] = config.pop("block_size")
    return config


def causal_dflash(written: Json) -> Json:
    config = dflash(written)
    config["dflash_config"]["causal"] = True
    return config


def dspark(written: Json) -> Json:
    """As DeepSpec writes it."""
    names = ("block_size", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head")
    return flat(written, *names, "confidence_head_with_markov") | {
        "architectures": ["Qwen3DSparkModel"],
        "target_layer_ids": [tap - 1 for tap in written["aux_hidden_state_layer_ids"]],
        "layer_types": ["full_attention"] * 2,
        "num_anchors": 512,
    }


PLAIN = {
    "sample_from_anchor": False,
    "markov_rank": 0,
    "confidence": False,
    "confidence_reads_token": False,
    "own_head": False,
    "draft_vocab_size": VOCAB,
}
LAYOUTS: dict[str, tuple[EagleConfig | BlockConfig, Callable[[Json], Json], dict[str, str]]] = {
    "EAGLE-3": (eagle_config(taps=(2, 4, 5), depth=5), eagle, {"layers.0.": "midlayer."}),
    "EAGLE-3 with taps": (eagle_config(taps=(1, 2, 5), depth=5), eagle_with_taps, {"layers.0.": "midlayer."}),
    "SpecForge 3.1": (
        eagle_config(taps=(1, 2, 5), depth=5, fc_norm=True, norm_output=True),
        eagle_with_layers,
        {"layers.0.": "midlayer."},
    ),
    "DFlash": (block_config(taps=(2, 5), causal=False, **PLAIN), dflash, {}),
    "newer DFlash": (block_config(taps=(2, 5), causal=False, **PLAIN), newer_dflash, {}),
    "JetSpec": (block_config(taps=(1, 6), causal=True, **PLAIN), causal_dflash, {}),
    "DSpark": (
        block_config(taps=(0, 4), causal=False, draft_vocab_size=VOCAB, own_embedding=True),
        dspark,
        {},
    ),
}


def write(
    config: EagleConfig | BlockConfig, layout: Callable[[Json], Json], names: dict[str, str], folder: Path
) -> EagleHead | BlockHead:
    """Write a random head in an author's layout."""
    head = tiny_head(config)
    write_tiny_head(head, folder)
    described = layout(json.loads((folder / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(described))
    tensors = load_file(folder / "model.safetensors")
    for ours, theirs in names.items():
        tensors = {
            theirs + name.removeprefix(ours) if name.startswith(ours) else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, folder / "model.safetensors")
    return head


@pytest.mark.parametrize(("config", "layout", "names"), LAYOUTS.values(), ids=LAYOUTS)
def test_an_authors_layout_is_read_as_the_head_it_is(
    config: EagleConfig | BlockConfig,
    layout: Callable[[Json], Json],
    names: dict[str, str],
    target: Path,
    tmp_path: Path,
) -> None:
    head = write(config, layout, names, tmp_path / "head")
    assert is_head(tmp_path / "head")
    opened = open_model(target)
    folder = HeadFolder(tmp_path / "head", opened.config)
    assert folder.config == config, "taps above all: one layer off nothing else would tell"
    again = folder.module(opened).state_dict()
    for name, tensor in head.state_dict().items():
        borrowed = (name == "embed_tokens.weight" and not config.own_embedding) or (
            name == "lm_head.weight" and not config.own_head
        )
        assert borrowed or torch.equal(again[name], tensor), name


def test_taps_that_are_one_layer_off_guess_something_else(target: Path, tmp_path: Path) -> None:
    config, layout, names = LAYOUTS["DFlash"]

    def misread(written: Json) -> Json:
        described = layout(written)
        described["dflash_config"]["target_layer_ids"] = [2, 5]  # our taps, as if they were z-lab's ids
        return described

    write(config, misread, names, tmp_path / "head")
    assert HeadFolder(tmp_path / "head", open_model(target).config).config != config


def test_layers_that_are_named_twice_must_be_the_same(target: Path, tmp_path: Path) -> None:
    config, layout, names = LAYOUTS["SpecForge 3.1"]
    for beside, refused in (([1, 2, 5], False), ([0, 1, 4], True)):

        def both(written: Json, beside: list[int] = beside) -> Json:
            return layout(written) | {EAGLE_LAYERS: beside}

        write(config, both, names, tmp_path / "head")
        if refused:
            with pytest.raises(ModelError, match=r"\[0, 1, 4\] in eagle_config.* different layers"):
                HeadFolder(tmp_path / "head", open_model(target).config)
        else:
            assert HeadFolder(tmp_path / "head", open_model(target).config).config == config


def test_embeddings_are_what_layer_minus_one_puts_out(target: Path, tmp_path: Path) -> None:
    config, layout, names = LAYOUTS["DSpark"]
    write(config, layout, names, tmp_path / "head")
    assert json.loads((tmp_path / "head/config.json").read_text())["target_layer_ids"] == [-1, 3]
    assert HeadFolder(tmp_path / "head", open_model(target).config).config.taps == (0, 4)


REFUSED: dict[str, tuple[str, Callable[[Json], object], str]] = {
    "another projector": (
        "DFlash",
        lambda c: c["dflash_config"].update(projector_type="conv"),
        "dflash_config has projector_type",
    ),
    "no ids": ("DFlash", lambda c: c["dflash_config"].pop("target_layer_ids"), "target_layer_ids is None"),
    "a layer the target lacks": (
        "DFlash",
        lambda c: c["dflash_config"].update(target_layer_ids=[1, LAYERS]),
        "puts out",
    ),
    "no mask": ("DFlash", lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id is None"),
    "a gated term": ("DSpark", lambda c: c.update(markov_head_type="gated"), "'gated'"),
    "layers without norms": ("DSpark", lambda c: c.update(model_type="llama"), "supported: qwen3"),
    "last features alone": (
        "SpecForge 3.1",
        lambda c: c["eagle_config"].update(use_aux_hidden_state=False),
        "use_aux_hidden_state is false",
    ),
    "a mask outside the vocabulary": (
        "DSpark",
        lambda c: c.update(mask_token_id=VOCAB),
        f"mask_token_id is {VOCAB}",
    ),
}


@pytest.mark.parametrize(("name", "change", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_computed_is_refused(
    name: str, change: Callable[[Json], object], said: str, target: Path, tmp_path: Path
) -> None:
    config, layout, names = LAYOUTS[name]

    def changed(written: Json) -> Json:
        described = layout(written)
        change(described)
        return described

    write(config, changed, names, tmp_path / "head")
    with pytest.raises(ModelError, match=said):
        HeadFolder(tmp_path / "head", open_model(target).config)


def test_a_layer_that_is_there_twice_is_refused(target: Path, tmp_path: Path) -> None:
    config, layout, names = LAYOUTS["EAGLE-3"]
    write(config, layout, names, tmp_path / "head")
    tensors = load_file(tmp_path / "head/model.safetensors")
    tensors["layers.0.hidden_norm.weight"] = torch.ones(SIZE)
    save_file(tensors, tmp_path / "head/model.safetensors")
    with pytest.raises(ModelError, match=r"hidden_norm\.weight.* twice"):
        HeadFolder(tmp_path / "head", open_model(target).config)
