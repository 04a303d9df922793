"""Tiny random targets with an MTP layer in their own files, in the layouts of their authors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.oracles.mtp import MIMO, QWEN, MtpLayout, MtpOracle
from tests.parity.families import save_random
from tests.tiny_models import write_byte_tokenizer, write_tiny_llama

VOCAB = 64
LAYOUTS = {"qwen3.5": QWEN, "qwen3.5-moe": QWEN, "qwen3-next": QWEN, "mimo": MIMO}


def write_target(name: str, folder: Path) -> Path:
    """Write a target of that family with an MTP layer and a tokenizer; return its folder."""
    if name == "mimo":
        write_tiny_llama(folder, vocab_size=VOCAB, tie_embeddings=False)
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "mimo", "num_nextn_predict_layers": 1, "attention_bias": True}
        (folder / "config.json").write_text(json.dumps(config))
        tensors = load_file(folder / "model.safetensors")
        for layer in range(config["num_hidden_layers"]):
            tensors |= _biases(f"model.layers.{layer}.", config, seed=layer)
    else:
        save_random(name, folder, tied=False, vocab_size=VOCAB, mtp_num_hidden_layers=1)
        config, tensors = _read(folder)
    tensors |= _further(LAYOUTS[name], config, tensors)
    save_file(tensors, folder / "model.safetensors")
    write_byte_tokenizer(folder, VOCAB)
    return folder


def oracle(name: str, folder: Path) -> MtpOracle:
    return MtpOracle(LAYOUTS[name], *_read(folder))


def change(folder: Path, **changes: Any) -> None:
    """Change config.json in place; the keyword `tensors` is a function that changes tensors."""
    config, tensors = _read(folder)
    if (edit := changes.pop("tensors", None)) is not None:
        edit(tensors)
        save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))


def alone(source: Path, folder: Path) -> Path:
    """Write the MTP layer of a target as a folder without the target."""
    folder.mkdir()
    config, tensors = _read(source)
    own = {name: one for name, one in tensors.items() if "mtp" in name}
    save_file(own, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors")


def _biases(prefix: str, config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    sizes = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    return {
        f"{prefix}self_attn.{x}_proj.bias": torch.randn(
            sizes.get(x, sizes["k"]) * config["head_dim"], generator=generator
        )
        for x in "qkv"
    }


def _further(layout: MtpLayout, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """Tensors of an MTP layer: those of an attention layer with other numbers, and its own."""
    generator, size = torch.Generator().manual_seed(7), config["hidden_size"]

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    layers = range(config["num_hidden_layers"])
    experts = "num_experts" in config
    like = next(
        f"model.layers.{i}."
        for i in layers
        if f"model.layers.{i}.self_attn.q_proj.weight" in tensors
        if (f"model.layers.{i}.mlp.gate.weight" in tensors) == experts
    )
    own = [name.removeprefix(like) for name in tensors if name.startswith(like)]
    found = {f"{layout.layer}.{name}": drawn(*tensors[like + name].shape) for name in own}
    stacks = {
        name: found.pop(name)
        for name in [*found]
        if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    }
    for name, stack in stacks.items():  # published files have each expert's matrices apart
        begin, _, kind = name.rpartition(".")
        for number, matrix in enumerate(stack):
            parts = {"down_proj": matrix}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            found |= {f"{begin}.{number}.{part}.weight": one.clone() for part, one in parts.items()}
    found[f"{layout.product}.weight"] = drawn(size, 2 * size)
    for name in (layout.token_norm, layout.hidden_norm, layout.last_norm):
        found[f"{name}.weight"] = drawn(size)
    for name in found:
        if name.endswith("norm.weight") and not layout.offset:
            found[name] = found[name] + 1
    return found
