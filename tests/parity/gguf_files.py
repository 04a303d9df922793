"""Writes a transformers model as the GGUF file that llama.cpp's converter would write."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from tests.tiny_gguf import finish

from . import gguf_hybrids, gguf_mamba

# Architectures that are not named as transformers' model_type without its underscores.
_ARCHITECTURES = {
    **{"mistral": "llama", "mixtral": "llama", "olmo3": "olmo2", "cohere": "command-r", "glm": "chatglm"},
    **{"gpt_bigcode": "starcoder", "seed_oss": "seed_oss", "ernie4_5": "ernie4_5", "gpt_oss": "gpt-oss"},
    **{"gemma3_text": "gemma3", "gemma3n_text": "gemma3n", "gemma4_text": "gemma4", "llama4_text": "llama4"},
    **gguf_hybrids.ARCHITECTURES,
    **{"granitemoehybrid": "granitehybrid", "falcon_h1": "falcon-h1", "nemotron_h": "nemotron_h"},
}
_HALVES_BECOME_NEIGHBOURS = {"llama", "olmo", "granite", "granitemoe", "granitehybrid", "smollm3", "mistral3"}
_FLOATS = ("ffn_gate_inp", "_exps.bias", "altup", ".ssm_a", ".ssm_d", ".ssm_norm.")
_KEY_HEADS_BECOME_STACKS = {"falcon", "gptneox"}
_FACTORS = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
# Keys that only some architectures have, by the name of the config's field.
_SCALES = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    **{"final_logit_softcapping": "final_logit_softcapping", "embedding_multiplier": "embedding_scale"},
    **{"attention_multiplier": "attention.scale", "residual_multiplier": "residual_scale"},
    **{"logits_scaling": "logit_scale", "logit_scale": "logit_scale", "clip_qkv": "attention.clamp_kqv"},
}


def write_gguf(
    model: torch.nn.Module,
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    add: dict[str, np.ndarray] | None = None,
    more: dict[str, object] | None = None,
    packed: dict[str, torch.Tensor] | None = None,
    sizes: dict[str, int] | None = None,
) -> dict[str, np.ndarray]:
    """Write the file, matrices quantized as `kind`; returns the bytes of each tensor as written.

    `add` has further tensors; `more` has keys of rope.scaling. `packed` has stacks as bytes of MXFP4 blocks,
    rows first. `sizes` are further keys.
    """
    config = model.config
    config.allow_global_per_layer_attribute_access = True
    arch = _ARCHITECTURES.get(config.model_type, config.model_type.replace("_", ""))
    if arch == "nemotron_h" and "moe" in config.layers_block_type:
        arch = "nemotron_h_moe"
    hidden, heads = config.hidden_size, config.num_attention_heads
    kv_heads = key_heads(config)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    inner = _field(config, "intermediate_size", "ffn_hidden_size", "n_inner") or 4 * hidden
    context = _field(config, "max_position_embeddings", "max_seq_len")
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        **{"context_length": context, "embedding_length": hidden, "block_count": config.num_hidden_layers},
        **{"attention.head_count": heads, "attention.head_count_kv": kv_heads},
        "feed_forward_length": getattr(config, "intermediate_size_mlp", inner),
        **{"attention.key_length": head_dim, "attention.value_length": head_dim},
    }
    numbers |= gguf_hybrids.add_keys(writer, arch, config)
    if arch in gguf_mamba.ARCHITECTURES:
        numbers |= gguf_mamba.keys(config)
    if arch in ("gemma3n", "gemma4"):
        numbers |= _of_unequal_layers(config, writer, arch)
    adds = {
        **{int: writer.add_uint32, list: writer.add_array, bool: writer.add_bool},
        **{float: writer.add_float32, str: writer.add_string},
    }
    for key, value in (numbers | (sizes or {})).items():
        adds[type(value)](f"{arch}.{key}", value)
    if arch.startswith("nemotron_h"):
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    elif (eps := _field(config, "rms_norm_eps", "norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    else:
        writer.add_layer_norm_eps(
            _field(config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon") or 1e-5
        )
    if hasattr(config, "num_experts_per_tok") and arch != "nemotron_h":
        writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if arch != "nemotron_h_moe" and (
            hasattr(config, "moe_intermediate_size") or arch in ("gpt-oss", "llama4")
        ):
            writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", inner))
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    attention = getattr(config, "attn_config", None)
    for source in filter(None, (config, attention)):
        for field, key in _SCALES.items():
            if getattr(source, field, None) is not None and arch != "falcon-h1":  # it has them in its tensors
                writer.add_float32(f"{arch}.{key}", getattr(source, field))
    if attention is not None:
        writer.add_max_alibi_bias(float(attention.alibi_bias_max))
    if hasattr(config, "use_parallel_residual"):
        writer.add_parallel_residual(config.use_parallel_residual)
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    if rope and arch not in ("gemma3n", "gemma4"):
        writer.add_rope_freq_base(rope["rope_theta"])
        share = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(head_dim * share))
    if arch in ("olmo2", "gpt-oss") and rope["rope_type"] == "yarn":
        own = {"factor": rope["factor"], "original_context_length": rope["original_max_position_embeddings"]}
        more = {"type": "yarn", **own, **(more or {})}
    for key, value in (more or {}).items():
        adds[type(value)](f"{arch}.rope.scaling.{key}", value)
    written = {}
    state = gguf_hybrids.converted(model.state_dict() | (packed or {}), arch, config)
    if arch in gguf_mamba.ARCHITECTURES:
        state = dict(gguf_mamba.tensors(model))
    if arch == "llama4":
        state = {name: one.mT if ".experts." in name else one for name, one in state.items()}
    for name, tensor in (_of_gpt_oss if arch == "gpt-oss" else _stacks)(state).items():
        there = gguf_name(name, arch)
        if there == "output.weight" and config.tie_word_embeddings and model._tied_weights_keys:
            continue
        if tensor.dtype is torch.uint8:
            written[there] = tensor.contiguous().numpy()
            writer.add_tensor(there, written[there], raw_dtype=GGMLQuantizationType.MXFP4)
            continue
        values = tensor.numpy().astype(np.float32)
        if arch.startswith("gemma") and arch not in ("gemma3n", "gemma4") and "norm" in name:
            values = values + 1
        if arch == "gpt2" and values.ndim == 2 and ".h." in name:
            values = values.T
        if arch in _KEY_HEADS_BECOME_STACKS and "query_key_value" in name:
            groups = values.reshape(kv_heads, heads // kv_heads + 2, head_dim, *values.shape[1:])
            parts = (groups[:, :-2], groups[:, [-2]], groups[:, [-1]])
            values = np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
        if arch in _HALVES_BECOME_NEIGHBOURS and (".q_proj." in name or ".k_proj." in name):
            # llama.cpp rotates pairs of neighbours, transformers pairs across the two halves of a head.
            halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:]).swapaxes(1, 2)
            values = halves.reshape(values.shape)
        if there.endswith("ffn_gate_inp_shexp.weight"):
            values = values[0]  # the converter drops dimensions of size 1
        vector = values.ndim == 1 or "conv" in there.split(".")[-2]
        floats = vector or any(part in there for part in _FLOATS)
        as_kind = GGMLQuantizationType.F32 if floats else kind
        written[there] = gguf.quants.quantize(values, as_kind)
        writer.add_tensor(there, written[there], raw_dtype=as_kind)
    for name, values in (add or {}).items():
        writer.add_tensor(name, values, raw_dtype=kind if values.dtype == np.uint8 else None)
    finish(writer)
    return written


def _of_unequal_layers(config: object, writer: gguf.GGUFWriter, arch: str) -> dict[str, object]:
    """Write what layers of Gemma 3n and 4 differ in; returns their sizes."""
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    ropes = config.rope_parameters
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    if arch == "gemma3n":
        writer.add_altup_active_idx(config.altup_active_idx)
        writer.add_altup_num_inputs(config.altup_num_inputs)
        shares = torch.tensor(config.activation_sparsity_pattern)
        writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())
        return {"feed_forward_length": config.intermediate_size}
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    local, of_all = config.head_dim, config.per_layer_config["full_attention"]
    head = of_all.head_dim
    heads = [one.num_key_value_heads for one in config.per_layer_config]
    rotated = int(head * ropes["full_attention"]["partial_rotary_factor"] / 2)
    factors = [1.0] * rotated + [1e30] * (head // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    writer.add_rope_dimension_count(head)
    writer.add_rope_dimension_count_swa(local)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    sizes = {"attention.key_length": head, "attention.value_length": head, "attention.head_count_kv": heads}
    if config.use_double_wide_mlp:
        own, shared = config.num_hidden_layers - config.num_kv_shared_layers, config.num_kv_shared_layers
        inner = config.intermediate_size
        sizes["feed_forward_length"] = [inner] * own + [2 * inner] * shared
    return sizes


def _stacks(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same, gates and ups of experts apart."""
    found = {}
    for name, tensor in state.items():
        begin, dot, end = name.rpartition("experts.")
        if end == "gate_up_proj" and not begin[-2:-1].isdigit():  # Gemma 4's stay together
            found[f"{begin}{dot}gate_proj"], found[f"{begin}{dot}up_proj"] = tensor.chunk(2, dim=1)
        else:
            found[f"{name}.weight" if name.endswith(("layer_scalar", "output_scale")) else name] = tensor
    for name in ("altup_projections", "altup_unembed_projections"):
        each = [found.pop(one) for one in [*found] if f".{name}." in one]
        found |= {f"model.{name}.weight": torch.stack(each)} if each else {}
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
    """The name that llama.cpp's converter gives a tensor."""
    if (end := next((end for end in _FACTORS if name.endswith(end)), None)) is not None:
        return f"blk.{name.split('.')[2]}.{_FACTORS[end]}"
    name = name.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe", "mlp")
    stem, bias, _ = name.partition("_bias") if ".experts." in name else (name, "", "")
    for names in (_names(arch), _names("llama")):
        if (found := names.get_name(stem, try_suffixes=(".weight", ".bias"))) is not None:
            return f"{found}.{'bias' if bias else 'weight'}" if ".experts." in name else found
    raise KeyError(name)


@cache
def _names(arch: str) -> gguf.TensorNameMap:
    [number] = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == arch]
    return gguf.get_tensor_name_map(number, 9)


def key_heads(config: object) -> int:
    """The key-value heads of a config of transformers."""
    heads = config.num_attention_heads
    if config.model_type == "falcon":
        many = config.new_decoder_architecture or not config.multi_query
        return config.num_kv_heads if many else 1
    return getattr(config, "num_key_value_heads", heads)


def _field(config: object, *names: str) -> object:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)
