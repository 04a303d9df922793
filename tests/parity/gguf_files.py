"""Writes a transformers model as the GGUF file llama.cpp's converter would make of it."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import load_file

_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "glm": "chatglm",
    "glm4": "glm4",
}
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_OF_ARCHITECTURE = {
    "gemma3": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write_gguf(
    model: torch.nn.Module,
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    rope_factors: list[float] | None = None,
    leave_out: str | None = None,
    add: dict[str, np.ndarray] | None = None,
    more: dict[str, object] | None = None,
    architecture: str | None = None,
    rotated: int | None = None,
    tensors: Path | None = None,
) -> dict[str, np.ndarray]:
    """Write the file, matrices quantized as `kind`; returns the bytes of each tensor as written.

    `rope_factors` becomes rope_freqs.weight; `leave_out` names a tensor not to write, `add` further ones;
    `more` are keys of rope.scaling. Of each head the first `rotated` elements are rotated, by default all.
    `architecture` and the folder of `tensors` are those of another model that computes the same.
    """
    config = model.config
    arch = architecture or _ARCHITECTURES[config.model_type]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    share = config.rope_parameters.get("partial_rotary_factor", 1.0)
    if rotated is None and share != 1:
        rotated = int(head_dim * share)
    if arch == "gemma3":
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if arch == "llama":
        writer.add_rope_dimension_count(rotated or head_dim)
    elif rotated is not None:
        writer.add_rope_dimension_count(rotated)
    for key, value in (more or {}).items():
        add_value = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add_value(f"{arch}.rope.scaling.{key}", value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    written = {}
    state = model.state_dict() if tensors is None else load_file(tensors / "model.safetensors")
    for name, tensor in state.items():
        there = gguf_name(name, arch)
        if there == leave_out or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        values = tensor.numpy().astype(np.float32)
        if arch.startswith("gemma") and "norm" in name:
            values = values + 1
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            # llama.cpp rotates neighbours, transformers the two halves of what is rotated of a head.
            heads, part = values.reshape(-1, head_dim, *values.shape[1:]), rotated or head_dim
            halves = heads[:, :part].reshape(len(heads), 2, part // 2, *values.shape[1:]).swapaxes(1, 2)
            turned = halves.reshape(len(heads), part, *values.shape[1:])
            values = np.concatenate((turned, heads[:, part:]), axis=1).reshape(values.shape)
        as_kind = kind if values.ndim == 2 else GGMLQuantizationType.F32
        written[there] = _encode(values, as_kind)
        writer.add_tensor(there, written[there], raw_dtype=as_kind)
    for name, values in (add or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def gguf_name(name: str, arch: str) -> str:
    if name in _TOP:
        return _TOP[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    stem, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{(_LAYER | _OF_ARCHITECTURE.get(arch, {}))[stem]}.{kind}"


def _encode(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return gguf.quants.quantize(values, kind)
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        # gguf cannot write this kind, and any bytes are a valid block of it.
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows, columns = values.shape
        random = np.random.default_rng(rows * columns)
        return random.integers(0, 60, (rows, columns // block * block_bytes), dtype=np.uint8)
