"""Tiny random heads, deterministic, for the tiny llamas of tests/tiny_models.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specinfer.heads.block import BlockHead
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.eagle import EagleHead
from specinfer.heads.layers import initialise
from specinfer.heads.speculators import write_head
from specinfer.models.config import Family, ModelConfig, QkNorm
from specinfer.models.positions import Rope

VOCAB, SIZE, NAMED = 64, 32, 24  # vocabulary and hidden size of the target; tokens that a head can propose
IDS = [*range(0, 2 * NAMED, 2)]


def tiny_body(*, qk_norm: bool = False, num_layers: int = 1, bias: bool = False) -> ModelConfig:
    """Return a head's layers beside `write_tiny_llama`'s model: the same sizes, different heads."""
    return ModelConfig(
        family=Family.QWEN3 if qk_norm else Family.LLAMA,
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=40,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        norm_eps=1e-5,
        rope=Rope(10000.0),
        layer_windows=(None,) * num_layers,
        tie_embeddings=False,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=QkNorm.HEAD if qk_norm else QkNorm.NONE,
        attention_scale=8**-0.5,
        max_context=256,
    )


def eagle_config(**changes: object) -> EagleConfig:
    num_layers = changes.pop("num_layers", 1)
    config = EagleConfig(
        body=tiny_body(num_layers=num_layers),
        taps=(0, 1, 2),
        target_hidden_size=SIZE,
        draft_vocab_size=NAMED,
        depth=4,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def block_config(**changes: object) -> BlockConfig:
    config = BlockConfig(
        body=tiny_body(qk_norm=True, num_layers=2),
        taps=(0, 2),
        target_hidden_size=SIZE,
        draft_vocab_size=NAMED,
        block_size=5,
        mask_token_id=1,
        markov_rank=6,
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def tiny_head(
    config: EagleConfig | BlockConfig, *, seed: int = 0, spread: float = 0.3
) -> EagleHead | BlockHead:
    """Return a head whose tensors are all random, tables included."""
    ids = IDS if config.draft_vocab_size == NAMED else None
    head = EagleHead(config, ids) if isinstance(config, EagleConfig) else BlockHead(config, ids)
    generator = torch.Generator().manual_seed(seed)
    initialise(head, generator, spread)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" in name:
                parameter.add_(spread * torch.randn(parameter.shape, generator=generator))
            elif not parameter.requires_grad or name.endswith("bias"):
                parameter.normal_(0.0, spread, generator=generator)
    return head.eval()


def write_tiny_head(head: EagleHead | BlockHead, folder: Path) -> Path:
    write_head(head, folder, verifier="tiny", architectures=["LlamaForCausalLM"])
    return folder


def change_head(
    folder: Path,
    *,
    config: Callable[[dict[str, Any]], object] = lambda c: None,
    tensors: Callable[[dict[str, torch.Tensor]], object] = lambda t: None,
) -> None:
    """Change a head's files in place."""
    described = json.loads((folder / "config.json").read_text())
    config(described)
    (folder / "config.json").write_text(json.dumps(described))
    weights = load_file(folder / "model.safetensors")
    tensors(weights)
    save_file(weights, folder / "model.safetensors")
