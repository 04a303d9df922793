"""A language model as a folder that transformers loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelError
from specinfer.files import NewFile
from specinfer.hub.model_files import ModelFiles
from specinfer.models.config import Family, ModelConfig, Rope
from specinfer.models.safetensors_writer import write_safetensors
from specinfer.tokenizer.export import write_tokenizer

_ARCHITECTURES: Final = {
    Family.LLAMA: "LlamaForCausalLM",
    Family.MISTRAL: "MistralForCausalLM",
    Family.QWEN2: "Qwen2ForCausalLM",
    Family.QWEN3: "Qwen3ForCausalLM",
}


def write_model(
    config: ModelConfig, tensors: Mapping[str, Tensor], folder: Path, *, tokenizer: ModelFiles
) -> None:
    """Write config, weights (bfloat16) and the tokenizer of a decoder, each whole or not at all.

    `tensors` have the decoder's names; `tokenizer` is the model whose tokenizer it has. Makes the folder.
    Raises OSError, and ModelError for weights that are no finite numbers.
    """
    narrow = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    for name, tensor in narrow.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"the model's tensor {name!r} holds values that are no finite bfloat16 numbers")
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(tokenizer, folder)
    write_safetensors(folder / "model.safetensors", narrow)
    with NewFile(folder / "config.json", mode=0o644) as new:
        new.write(json.dumps(config_to_hf(config), indent=2).encode())
        new.keep()


def config_to_hf(config: ModelConfig) -> dict[str, object]:
    """config.json of a model whose layers see everything before them; raises ModelError for other models.

    Rotary embeddings have no scaling.
    """
    plain = config.rope is not None and config.rope == Rope(config.rope.theta)
    if (
        config.family not in _ARCHITECTURES
        or not plain
        or config.window is not None
        or config.sandwich_norms
        or (config.family in (Family.LLAMA, Family.QWEN3) and config.qkv_bias != config.o_bias)
    ):
        raise ModelError(f"a model of {config.family} with these layers cannot be written as a folder")
    assert config.rope is not None
    return {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": str(config.family),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": None,
        "use_sliding_window": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": list(config.eos_ids) or None,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",  # transformers 4
    }
