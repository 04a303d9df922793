"""Tiny random llama-style model folders, deterministic and written without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers


def write_tiny_llama(
    folder: Path,
    *,
    vocab_size: int = 64,
    hidden_size: int = 32,
    intermediate_size: int = 48,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    max_context: int = 256,
    tie_embeddings: bool = True,
    eos_token_id: int | None = None,
    spread: float = 0.3,
    seed: int = 0,
    tokenizer: bool = False,
) -> Path:
    """Write config.json and model.safetensors (float32) of a random Llama, and return the folder.

    `spread` is the standard deviation of the weights: 0.3 gives peaked, varied laws; smaller values flatter
    ones. Two calls that differ only in `seed` give a target and a draft that rarely agree;
    `write_similar_llama` gives a pair that often agrees. `tokenizer=True` adds a tokenizer.json whose tokens
    are bytes (vocab_size <= 256: 0 .. vocab_size - 1, spelled as in byte-level BPE).
    """
    folder.mkdir(parents=True, exist_ok=True)
    head_dim = hidden_size // num_heads if head_dim is None else head_dim
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size},
        **{"hidden_size": hidden_size, "intermediate_size": intermediate_size},
        **{"num_hidden_layers": num_layers, "num_attention_heads": num_heads},
        **{"num_key_value_heads": num_kv_heads, "head_dim": head_dim, "hidden_act": "silu"},
        **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": max_context},
        **{"tie_word_embeddings": tie_embeddings, "bos_token_id": None, "eos_token_id": eos_token_id},
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread

    q, kv = num_heads * head_dim, num_kv_heads * head_dim
    tensors = {"model.embed_tokens.weight": random(vocab_size, hidden_size)}
    for i in range(num_layers):
        prefix = f"model.layers.{i}"
        tensors[f"{prefix}.input_layernorm.weight"] = 1 + random(hidden_size)
        tensors[f"{prefix}.self_attn.q_proj.weight"] = random(q, hidden_size)
        tensors[f"{prefix}.self_attn.k_proj.weight"] = random(kv, hidden_size)
        tensors[f"{prefix}.self_attn.v_proj.weight"] = random(kv, hidden_size)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = random(hidden_size, q)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = 1 + random(hidden_size)
        tensors[f"{prefix}.mlp.gate_proj.weight"] = random(intermediate_size, hidden_size)
        tensors[f"{prefix}.mlp.up_proj.weight"] = random(intermediate_size, hidden_size)
        tensors[f"{prefix}.mlp.down_proj.weight"] = random(hidden_size, intermediate_size)
    tensors["model.norm.weight"] = 1 + random(hidden_size)
    if not tie_embeddings:
        tensors["lm_head.weight"] = random(vocab_size, hidden_size)
    save_file(tensors, folder / "model.safetensors")
    if tokenizer:
        write_byte_tokenizer(folder, vocab_size)
    return folder


def write_tiny_mixture(
    folder: Path,
    *,
    experts: int = 8,
    per_token: int = 3,
    expert_size: int = 16,
    normalized: bool = True,
    shared_size: int = 0,
    seed: int = 0,
    spread: float = 0.3,
    **shape: Any,
) -> Path:
    """Write a model with experts in place of each MLP: Qwen3-MoE, or Qwen2-MoE with a shared expert."""
    write_tiny_llama(folder, spread=spread, seed=seed, **shape)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    config |= {
        "model_type": "qwen2_moe" if shared_size else "qwen3_moe",
        "architectures": ["Qwen2MoeForCausalLM" if shared_size else "Qwen3MoeForCausalLM"],
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": expert_size,
        "norm_topk_prob": normalized,
        "qkv_bias": False,
    }
    if shared_size:
        config["shared_expert_intermediate_size"] = shared_size
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    generator, hidden = torch.Generator().manual_seed(seed + 1000), config["hidden_size"]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * spread

    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        sizes = {f"experts.{number}": expert_size for number in range(experts)}
        sizes |= {"shared_expert": shared_size} if shared_size else {}
        for name in ("gate", "up", "down"):
            del tensors[f"{prefix}.mlp.{name}_proj.weight"]
        for name, size in sizes.items():
            tensors[f"{prefix}.mlp.{name}.gate_proj.weight"] = random(size, hidden)
            tensors[f"{prefix}.mlp.{name}.up_proj.weight"] = random(size, hidden)
            tensors[f"{prefix}.mlp.{name}.down_proj.weight"] = random(hidden, size)
        tensors[f"{prefix}.mlp.gate.weight"] = random(experts, hidden)
        if shared_size:
            tensors[f"{prefix}.mlp.shared_expert_gate.weight"] = random(1, hidden)
        else:
            for head in "qk":
                tensors[f"{prefix}.self_attn.{head}_norm.weight"] = 1 + random(config["head_dim"])
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_similar_llama(source: Path, folder: Path, *, noise: float = 0.05, seed: int = 1) -> Path:
    """Write a copy of the model in `source` with noise on every weight: a draft that often agrees."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            (folder / name).write_bytes((source / name).read_bytes())
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: weight * (1 + noise * torch.randn(weight.shape, generator=generator))
        for name, weight in sorted(load_file(source / "model.safetensors").items())
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_pair(folder: Path) -> Path:
    """Write a tiny "target" with a tokenizer and a "draft" that often agrees with it; return the folder."""
    write_tiny_llama(folder / "target", tokenizer=True)
    write_similar_llama(folder / "target", folder / "draft", noise=0.1)
    return folder


def write_byte_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer.json that has one token per byte, for the first `vocab_size` bytes, and no merges."""
    assert vocab_size <= 256, "a byte tokenizer has at most 256 tokens"
    vocab = {_byte_character(byte): byte for byte in range(vocab_size)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def _byte_character(byte: int) -> str:
    """Return the character that byte-level BPE (GPT-2) writes for a byte: itself if printable, else one
    from 256 on.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [b for b in range(256) if b not in printable].index(byte))
