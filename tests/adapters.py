"""Tiny random adapters in PEFT's format, and models with merged adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PREFIX = "base_model.model."


def adapter_tensors(
    weights: Mapping[str, Sequence[int]], targets: Sequence[str], rank: int, seed: int, spread: float
) -> dict[str, Tensor]:
    """Return A and B for each matrix whose module has one of these names."""
    chance = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name in sorted(weights):
        module, shape = name.removesuffix(".weight"), weights[name]
        if name.endswith(".weight") and module.rsplit(".", 1)[-1] in targets:
            rows, inner = shape
            found[f"{_PREFIX}{module}.lora_A.weight"] = torch.randn(rank, inner, generator=chance) * spread
            found[f"{_PREFIX}{module}.lora_B.weight"] = torch.randn(rows, rank, generator=chance) * spread
    return found


def write_peft(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    """Write a PEFT folder of these tensors; `config` has fields beside the usual ones."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    usual = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "some/model"},
        **{"inference_mode": True, "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True},
        **{"modules_to_save": None, "lora_dropout": 0.05, "use_dora": False, "use_rslora": False},
        **{"rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None, "loftq_config": {}},
    }
    (folder / "adapter_config.json").write_text(json.dumps({**usual, **config}))
    return folder


def write_adapter(
    folder: Path,
    model: Path,
    *,
    targets: Sequence[str] = ALL,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    spread: float = 0.2,
    **config: Any,
) -> Path:
    """Write a random adapter of the model in a folder of safetensors."""
    shapes = {name: tensor.shape for name, tensor in load_file(model / "model.safetensors").items()}
    tensors = adapter_tensors(shapes, targets, rank, seed, spread)
    return write_peft(
        folder, tensors, **{"r": rank, "lora_alpha": alpha, "target_modules": list(targets), **config}
    )


def merge(model: Path, adapter: Path, folder: Path, *, scale: float) -> Path:
    """Write a copy of a model with an adapter merged into its matrices."""
    shutil.copytree(model, folder)
    weights, added = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, down in added.items():
        module, _, half = name.removeprefix(_PREFIX).partition(".lora_")
        if half == "A.weight":
            up = added[name.replace("lora_A", "lora_B")]
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + scale * up @ down
    save_file(weights, folder / "model.safetensors")
    return folder
