"""Heads in their authors' file layouts, for a target of `LAYERS` layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specinfer.heads.block import BlockHead
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.eagle import EagleHead
from specinfer.models.config import Family
from tests import published_configs as published
from tests.heads import VOCAB, block_config, eagle_config, tiny_body, tiny_head, write_tiny_head
from tests.published_configs import Json


@dataclass(frozen=True)
class Layout:
    """A head and its author's layout."""

    config: EagleConfig | BlockConfig
    described: Callable[[Json], Json]  # from the config.json of the `speculators` library
    names: dict[str, str] = field(default_factory=dict)  # prefixes of tensor names: ours, theirs


PLAIN = {"sample_from_anchor": False, "markov_rank": 0, "own_head": False, "draft_vocab_size": VOCAB}
OF_SPECFORGE = block_config(taps=(1, 4), causal=False, draft_vocab_size=VOCAB, own_head=False)
MIDLAYER = {"layers.0.": "midlayer."}
IN_MODEL = {
    name: f"model.{name}" for name in ("layers.", "fc.", "norm.", "embed_tokens.", "fc_norm.", "input_norm.")
}
USUAL = eagle_config(taps=(2, 4, 5), depth=5)
QWEN2_BODY = replace(tiny_body(bias=True), family=Family.QWEN2, o_bias=False)
LAYOUTS: dict[str, Layout] = {
    "EAGLE-3": Layout(eagle_config(taps=(2, 4, 5), depth=5), published.eagle, MIDLAYER),
    "EAGLE-3 of its authors": Layout(USUAL, published.eagle_of_authors, MIDLAYER),
    "EAGLE-3 of Vicuna": Layout(replace(USUAL, own_embedding=True), published.eagle_of_vicuna, MIDLAYER),
    "AngelSlim": Layout(USUAL, published.angelslim, MIDLAYER),
    "NVIDIA": Layout(USUAL, published.nvidia, MIDLAYER),
    "NVIDIA with layers": Layout(eagle_config(taps=(1, 2, 5), depth=5), published.nvidia_with_layers),
    "Automodel": Layout(replace(USUAL, own_embedding=True), published.automodel, IN_MODEL),
    "EAGLE-3 with Qwen2's layers": Layout(replace(USUAL, body=QWEN2_BODY), published.eagle_of_qwen, MIDLAYER),
    "EAGLE-3 with layers of Qwen3": Layout(
        replace(USUAL, body=tiny_body(qk_norm=True)), published.eagle_of_qwen, MIDLAYER
    ),
    "EAGLE-3 beside Phi": Layout(USUAL, published.eagle_of_phi, MIDLAYER),
    "EAGLE-3 with taps": Layout(eagle_config(taps=(1, 2, 5), depth=5), published.eagle_with_taps, MIDLAYER),
    "SpecForge 3.1": Layout(
        eagle_config(taps=(1, 2, 5), depth=5, fc_norm=True, norm_output=True),
        published.eagle_with_layers,
        MIDLAYER,
    ),
    "DFlash": Layout(block_config(taps=(2, 5), causal=False, **PLAIN), published.dflash),
    "newer DFlash": Layout(block_config(taps=(2, 5), causal=False, **PLAIN), published.newer_dflash),
    "DFlash with all fields": Layout(block_config(taps=(2, 5), causal=False, **PLAIN), published.full_dflash),
    "causal DFlash": Layout(block_config(taps=(1, 6), causal=True, **PLAIN), published.causal_dflash),
    "JetSpec": Layout(block_config(taps=(1, 6), causal=True, **PLAIN), published.jetspec),
    "DSpark": Layout(
        block_config(taps=(0, 4), causal=False, draft_vocab_size=VOCAB, own_embedding=True), published.dspark
    ),
    "SpecForge's DSpark": Layout(OF_SPECFORGE, published.nested_dspark),
    "SpecForge's DSpark for SGLang": Layout(OF_SPECFORGE, published.nested_dspark_for_sglang),
}


def write_layout(
    layout: Layout, folder: Path, change: Callable[[Json], object] = lambda described: None
) -> EagleHead | BlockHead:
    """Write a random head in its author's layout, with a change to its config.json; return the head."""
    head = tiny_head(layout.config)
    write_tiny_head(head, folder)
    written = json.loads((folder / "config.json").read_text())
    described = layout.described(written)
    change(described)
    (folder / "config.json").write_text(json.dumps(described))
    tensors = load_file(folder / "model.safetensors")
    if isinstance(layout.config, BlockConfig) and layout.config.markov_rank:
        known = layout.config.hidden_size + layout.config.markov_rank
        tensors["confidence_head.proj.weight"] = torch.ones(1, known)
        tensors["confidence_head.proj.bias"] = torch.ones(1)
    for ours, theirs in layout.names.items():
        tensors = {
            theirs + name.removeprefix(ours) if name.startswith(ours) else name: tensor
            for name, tensor in tensors.items()
        }
    save_file(tensors, folder / "model.safetensors")
    return head
