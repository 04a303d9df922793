"""Medusa's heads: both layouts are read as the same heads, and what cannot be is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specinfer.errors import ModelError
from specinfer.heads.checkpoint import HeadFolder, is_head, target_head
from specinfer.heads.config import MedusaConfig
from specinfer.heads.medusa import MedusaHead
from specinfer.models.config import ModelConfig
from specinfer.models.open_model import open_model
from tests.heads import IDS, NAMED, SIZE, VOCAB, medusa_config, tiny_medusa, write_medusa
from tests.unit.heads.plain import weights_of

Json = dict[str, Any]
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    "config", [medusa_config(), medusa_config(num_layers=2, bias=False), medusa_config(shared_head=True)]
)
def test_heads_are_what_a_loop_over_levels_makes(config: MedusaConfig) -> None:
    heads = tiny_medusa(config)
    w, h = weights_of(heads), torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = heads(h)
    assert logits.shape == (3, config.depth, VOCAB)
    for row in range(3):
        for level in range(config.depth):
            x = h[row].double().numpy()
            for layer in range(config.num_layers):
                made = w[f"blocks.{level}.layers.{layer}.weight"] @ x
                made = made + w.get(f"blocks.{level}.layers.{layer}.bias", 0.0)
                x = x + made / (1 + np.exp(-made))
            plain = w[f"lm_heads.{0 if config.shared_head else level}.weight"] @ x
            np.testing.assert_allclose(logits[row, level], plain, atol=1e-4)


LAYOUTS: dict[str, tuple[MedusaConfig, bool]] = {
    "Medusa": (medusa_config(), False),
    "Medusa, two layers": (medusa_config(num_layers=2), False),
    "Medusa, no layer": (medusa_config(num_layers=0, bias=False), False),
    "vLLM": (medusa_config(bias=False), True),
    "vLLM, two layers, biases": (medusa_config(num_layers=2), True),
    "vLLM, one output layer": (medusa_config(shared_head=True), True),
    "vLLM, some tokens": (medusa_config(draft_vocab_size=NAMED), True),
}


@pytest.mark.parametrize(("config", "vllm"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_is_read_as_the_heads_it_holds(
    config: MedusaConfig, vllm: bool, target: Path, tmp_path: Path
) -> None:
    heads = tiny_medusa(config)
    write_medusa(heads, tmp_path, vllm=vllm)
    assert is_head(tmp_path)
    _is_the_same(HeadFolder(tmp_path, open_model(target).config), heads, target)


def _is_the_same(folder: HeadFolder, heads: MedusaHead, target: Path) -> None:
    assert folder.config == heads.config
    assert list(folder.ids) == heads.ids.tolist()
    again = folder.module(open_model(target)).state_dict()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize("whole", [True, False])
def test_tokens_may_be_mapped_in_any_order(whole: bool, target: Path, tmp_path: Path) -> None:
    heads = tiny_medusa(medusa_config(draft_vocab_size=NAMED))
    write_medusa(heads, tmp_path, vllm=True)
    order = torch.randperm(NAMED, generator=torch.Generator().manual_seed(5))

    def mixed(tensors: Tensors) -> None:
        tensors["token_map"] = torch.tensor(IDS)[order]
        for level in range(4):
            rows = tensors[f"lm_heads.{level}.weight"]
            tensors[f"lm_heads.{level}.weight"] = rows[order]
            if whole:  # rows of all tokens; the map selects some
                tensors[f"lm_heads.{level}.weight"] = torch.randn(VOCAB, SIZE).index_copy(
                    0, torch.tensor(IDS), rows
                )

    _change(tmp_path, tensors=mixed)
    _is_the_same(HeadFolder(tmp_path, open_model(target).config), heads, target)


def test_an_output_layer_that_is_not_there_is_the_targets(target: Path, tmp_path: Path) -> None:
    write_medusa(tiny_medusa(medusa_config(shared_head=True)), tmp_path, vllm=True)
    _change(tmp_path, tensors=lambda t: t.pop("lm_heads.0.weight"))
    opened = open_model(target)
    folder = HeadFolder(tmp_path, opened.config)
    assert folder.config == medusa_config(shared_head=True, own_head=False)
    module = folder.module(opened)
    assert isinstance(module, MedusaHead)
    assert torch.equal(module.state_dict()["lm_heads.0.weight"], target_head(opened, range(VOCAB)))


def _change(
    folder: Path,
    *,
    config: Callable[[Json], object] = lambda c: None,
    tensors: Callable[[Tensors], object] = lambda t: None,
) -> None:
    """Change heads' files in place."""
    described = json.loads((folder / "config.json").read_text())
    config(described)
    (folder / "config.json").write_text(json.dumps(described))
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    tensors(weights)
    save_file(weights, file)


HOSTILE: dict[str, tuple[Callable[[Json], object], Callable[[Tensors], object], str]] = {
    "heads without end": (lambda c: c.update(num_heads=10**9), lambda t: None, "guesses 1000000000"),
    "no heads": (lambda c: c.update(num_heads=0), lambda t: None, "guesses 0"),
    "heads that are no number": (lambda c: c.update(num_heads="4"), lambda t: None, "num_heads is '4'"),
    "layers without end": (
        lambda c: c.update(num_hidden_layers=10**9),
        lambda t: None,
        "has 1000000000 layers",
    ),
    "scaled logits": (lambda c: c.update(logit_scale=2.0), lambda t: None, "logit_scale is 2.0"),
    "another hidden size": (lambda c: c.update(hidden_size=2 * SIZE), lambda t: None, "hidden states of 64"),
    "another vocabulary": (lambda c: c.update(vocab_size=2 * VOCAB), lambda t: None, "a vocabulary of 128"),
    "one head more than there are": (lambda c: c.update(num_heads=5), lambda t: None, r"'blocks\.4\."),
    "one head less than there are": (
        lambda c: c.update(num_heads=3),
        lambda t: None,
        r"unexpected tensor '(blocks|lm_heads)\.3\.",
    ),
    "some tokens, and no map": (
        lambda c: c.update(truncated_vocab_size=NAMED),
        lambda t: None,
        "lacks 'token_map'",
    ),
    "a token twice": (
        lambda c: c.update(truncated_vocab_size=2),
        lambda t: t.update(token_map=torch.tensor([3, 3])),
        "'token_map' is damaged",
    ),
    "a token that is none": (
        lambda c: c.update(truncated_vocab_size=2),
        lambda t: t.update(token_map=torch.tensor([3, VOCAB])),
        "'token_map' is damaged",
    ),
    "tokens that are no numbers": (
        lambda c: c.update(truncated_vocab_size=2),
        lambda t: t.update(token_map=torch.tensor([3.0, 4.0])),
        "float32",
    ),
    "fewer rows than tokens": (
        lambda c: None,
        lambda t: t.update({"lm_heads.1.weight": torch.zeros(VOCAB - 1, SIZE)}),
        r"'lm_heads\.1\.weight'",
    ),
    "a bias too many": (
        lambda c: None,
        lambda t: t.update({"lm_heads.1.bias": torch.zeros(VOCAB)}),
        "unexpected tensor 'lm_heads.1.bias'",
    ),
    "a name twice": (
        lambda c: None,
        lambda t: t.update({"medusa_heads.lm_heads.1.weight": torch.zeros(VOCAB, SIZE)}),
        "twice",
    ),
}


@pytest.mark.parametrize(("config", "tensors", "said"), HOSTILE.values(), ids=HOSTILE)
def test_what_cannot_be_is_refused(
    config: Callable[[Json], object],
    tensors: Callable[[Tensors], object],
    said: str,
    target_config: ModelConfig,
    tmp_path: Path,
) -> None:
    write_medusa(tiny_medusa(medusa_config()), tmp_path, vllm=True)
    _change(tmp_path, config=config, tensors=tensors)
    with pytest.raises(ModelError, match=said) as caught:
        HeadFolder(tmp_path, target_config)
    assert "\n" not in str(caught.value)
