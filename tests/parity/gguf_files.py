"""Writes a transformers model as the GGUF file that llama.cpp's converter would write."""

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
    "gemma2": "gemma2",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "granite": "granite",
    "smollm3": "smollm3",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "gpt2": "gpt2",
    "gpt_bigcode": "starcoder",
    "starcoder2": "starcoder2",
    "falcon": "falcon",
    "mpt": "mpt",
    "gpt_neox": "gptneox",
    "stablelm": "stablelm",
    "seed_oss": "seed_oss",
    "ernie4_5": "ernie4_5",
    "exaone4": "exaone4",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "glm": "chatglm",
    "glm4": "glm4",
}
_HALVES_BECOME_NEIGHBOURS = {"llama", "olmo", "granite", "granitemoe", "smollm3"}
_KEY_HEADS_BECOME_STACKS = {"falcon", "gptneox"}
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
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    # GPTBigCode
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    # Falcon and GPT-NeoX
    "ln_mlp": "attn_norm",
    "ln_attn": "attn_norm_2",
    "self_attention.query_key_value": "attn_qkv",
    "self_attention.dense": "attn_output",
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    # MPT
    "norm_1": "attn_norm",
    "norm_2": "ffn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "ffn.up_proj": "ffn_up",
    "ffn.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_STACKS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
_POST_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_OF_ARCHITECTURE = {
    "gemma2": _POST_NORMS,
    "gemma3": _POST_NORMS,
    "olmo2": _POST_NORMS,
    "exaone4": _POST_NORMS,
    "seed_oss": {"post_attention_layernorm": "post_attention_norm"},
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm": "output_norm",
    "lm_head.weight": "output.weight",
    "transformer.wte.weight": "token_embd.weight",
    "transformer.wpe.weight": "position_embd.weight",
    "transformer.word_embeddings.weight": "token_embd.weight",
    "transformer.ln_f": "output_norm",
    "transformer.norm_f": "output_norm",
    "gpt_neox.embed_in.weight": "token_embd.weight",
    "gpt_neox.final_layer_norm": "output_norm",
    "embed_out.weight": "output.weight",
}
# Keys that only some architectures have, by the name of the config's field.
_SCALES = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "clip_qkv": "attention.clamp_kqv",
}


def write_gguf(
    model: torch.nn.Module,
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    rope_factors: list[float] | None = None,
    add: dict[str, np.ndarray] | None = None,
    more: dict[str, object] | None = None,
    architecture: str | None = None,
    rotated: int | None = None,
    tensors: Path | None = None,
    packed: dict[str, torch.Tensor] | None = None,
) -> dict[str, np.ndarray]:
    """Write the file, matrices quantized as `kind`; returns the bytes of each tensor as written.

    `rope_factors` becomes rope_freqs.weight; `add` has further tensors; `more` has
    keys of rope.scaling. The first `rotated` elements of each head are rotated, by default all.
    `architecture` and the folder of `tensors` may belong to an equivalent model. `packed` has stacks as bytes
    of MXFP4 blocks, rows first.
    """
    config = model.config
    arch = architecture or _ARCHITECTURES[config.model_type]
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = key_heads(config)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    inner = _field(config, "intermediate_size", "ffn_hidden_size", "n_inner") or 4 * hidden
    context = _field(config, "max_position_embeddings", "max_seq_len")
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    if (eps := _field(config, "rms_norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    else:
        writer.add_layer_norm_eps(
            _field(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon") or 1e-5
        )
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if hasattr(config, "moe_intermediate_size") or arch == "gpt-oss":
            writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", inner))
    if arch == "granitemoe":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    attention = getattr(config, "attn_config", None)
    for source in filter(None, (config, attention)):
        for field, key in _SCALES.items():
            if getattr(source, field, None) is not None:
                writer.add_float32(f"{arch}.{key}", getattr(source, field))
    if attention is not None:
        writer.add_max_alibi_bias(float(attention.alibi_bias_max))
    if hasattr(config, "use_parallel_residual"):
        writer.add_parallel_residual(config.use_parallel_residual)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope:
        writer.add_rope_freq_base(rope["rope_theta"])
        share = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(rotated or int(head_dim * share))
    if arch in ("olmo2", "gpt-oss") and rope["rope_type"] == "yarn":
        own = {"factor": rope["factor"], "original_context_length": rope["original_max_position_embeddings"]}
        more = {"type": "yarn", **own, **(more or {})}
    for key, value in (more or {}).items():
        add_value = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add_value(f"{arch}.rope.scaling.{key}", value)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, dtype=np.float32))
    written = {}
    state = model.state_dict() if tensors is None else load_file(tensors / "model.safetensors")
    state |= packed or {}
    for name, tensor in (_of_gpt_oss if arch == "gpt-oss" else _stacks)(state).items():
        there = gguf_name(name, arch)
        if there == "output.weight" and config.tie_word_embeddings:
            continue
        if tensor.dtype is torch.uint8:
            written[there] = tensor.contiguous().numpy()
            writer.add_tensor(there, written[there], raw_dtype=GGMLQuantizationType.MXFP4)
            continue
        values = tensor.numpy().astype(np.float32)
        if arch.startswith("gemma") and "norm" in name:
            values = values + 1
        if arch == "gpt2" and values.ndim == 2 and ".h." in name:
            values = values.T
        if arch in _KEY_HEADS_BECOME_STACKS and "query_key_value" in name:
            groups = values.reshape(kv_heads, heads // kv_heads + 2, head_dim, *values.shape[1:])
            parts = (groups[:, :-2], groups[:, [-2]], groups[:, [-1]])
            values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
        if arch in _HALVES_BECOME_NEIGHBOURS and (".q_proj." in name or ".k_proj." in name):
            # llama.cpp rotates pairs of neighbours, transformers pairs across the two halves of a head.
            each, part = values.reshape(-1, head_dim, *values.shape[1:]), rotated or head_dim
            halves = each[:, :part].reshape(len(each), 2, part // 2, *values.shape[1:]).swapaxes(1, 2)
            turned = halves.reshape(len(each), part, *values.shape[1:])
            values = np.concatenate((turned, each[:, part:]), axis=1).reshape(values.shape)
        if there.endswith("ffn_gate_inp_shexp.weight"):
            values = values[0]  # the converter drops dimensions of size 1
        floats = values.ndim == 1 or "ffn_gate_inp" in there or there.endswith("_exps.bias")
        as_kind = GGMLQuantizationType.F32 if floats else kind
        written[there] = _encode(values, as_kind)
        writer.add_tensor(there, written[there], raw_dtype=as_kind)
    for name, values in (add or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def _stacks(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same, gates and ups of experts apart."""
    found = {}
    for name, tensor in state.items():
        begin, dot, end = name.rpartition("experts.")
        if end == "gate_up_proj":
            found[f"{begin}{dot}gate_proj"], found[f"{begin}{dot}up_proj"] = tensor.chunk(2, dim=1)
        else:
            found[name] = tensor
    return found


def _of_gpt_oss(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same, rows of gates and ups apart, which take turns, and outputs in front of inputs."""
    found = {}
    for name, tensor in state.items():
        floats = tensor.dim() == 3 and tensor.dtype is not torch.uint8
        turned = tensor.transpose(1, 2) if floats else tensor
        if "gate_up_proj" in name:
            found[name.replace("gate_up", "gate")] = turned[:, 0::2]
            found[name.replace("gate_up", "up")] = turned[:, 1::2]
        else:
            found[f"{name}.weight" if name.endswith("sinks") else name] = turned
    return found


def gguf_name(name: str, arch: str) -> str:
    stem, _, kind = name.rpartition(".")
    if name in _TOP:
        return _TOP[name]
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    roots = ("model.layers.", "transformer.h.", "transformer.blocks.", "gpt_neox.layers.")
    root = next(root for root in roots if name.startswith(root))
    layer, own = stem.removeprefix(root).split(".", 1)
    if own.endswith(".experts"):
        part, _, bias = kind.partition("_bias") if kind.endswith("_bias") else (kind, "", None)
        return f"blk.{layer}.{_STACKS[part]}.{'weight' if bias is None else 'bias'}"
    if own == "self_attn.sinks":
        return f"blk.{layer}.attn_sinks.weight"
    return f"blk.{layer}.{(_LAYER | _OF_ARCHITECTURE.get(arch, {}))[own]}.{kind}"


def key_heads(config: object) -> int:
    """The key-value heads of a config of transformers."""
    heads = config.num_attention_heads
    if config.model_type == "falcon":
        many = config.new_decoder_architecture or not config.multi_query
        return config.num_kv_heads if many else 1
    return getattr(config, "num_key_value_heads", heads)


def _field(config: object, *names: str) -> object:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _encode(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return gguf.quants.quantize(values, kind)
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        # gguf cannot write this kind, but any bytes are a valid block.
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        rows, columns = values.shape
        random = np.random.default_rng(rows * columns)
        return random.integers(0, 60, (rows, columns // block * block_bytes), dtype=np.uint8)
