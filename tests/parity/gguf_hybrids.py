"""Tensors and keys that llama.cpp's converter gives models with recurrent layers."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch

Values = np.ndarray[Any, np.dtype[np.float32]]
ARCHITECTURES = {
    **{"lfm2_moe": "lfm2moe", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35"},
    "qwen3_5_moe_text": "qwen35moe",
}


def add_keys(writer: gguf.GGUFWriter, arch: str, config: Any) -> dict[str, object]:
    """Add the keys of recurrent layers; returns values of other keys that differ."""
    if arch in ("lfm2", "lfm2moe"):
        writer.add_shortconv_l_cache(config.conv_L_cache)
        kinds = config.layer_types
        heads = [config.num_key_value_heads if kind != "conv" else 0 for kind in kinds]
        if arch == "lfm2moe":
            writer.add_leading_dense_block_count(config.num_dense_layers)
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
            writer.add_expert_weights_scale(config.routed_scaling_factor)
            writer.add_expert_weights_norm(config.norm_topk_prob)
            return {"attention.head_count_kv": heads}
        size = config.intermediate_size
        if config.block_auto_adjust_ff_dim:
            size = int(config.block_ffn_dim_multiplier * int(2 * size / 3))
            size = -(-size // config.block_multiple_of) * config.block_multiple_of
        return {"attention.head_count_kv": heads, "feed_forward_length": size}
    if arch in ("qwen35", "qwen35moe", "qwen3next"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(1 + config.layer_types.index("full_attention"))
    return {}


def converted(state: dict[str, torch.Tensor], arch: str, config: Any) -> dict[str, torch.Tensor]:
    """The tensors as the converter writes them, under names that it maps."""
    if arch not in ARCHITECTURES.values() and arch != "lfm2":
        return state
    found = {}
    for name, tensor in state.items():
        if "conv.conv." in name or "conv1d." in name:
            tensor = tensor.squeeze(1) if tensor.dim() == 3 else tensor
        elif name.endswith(".A_log"):
            tensor = -tensor.exp()
        elif name.endswith("expert_bias"):
            name += ".bias"
        elif "norm.weight" in name and "linear_attn" not in name and arch.startswith("qwen"):
            tensor = tensor + 1
        if "in_proj_qkvz" in name:
            parts = _of_groups(tensor, config)
            begin = name.removesuffix("in_proj_qkvz.weight")
            found[f"{begin}in_proj_qkv.weight"] = torch.cat(parts[:3])
            found[f"{begin}in_proj_z.weight"] = parts[3]
            continue
        if "linear_attn." in name and arch != "qwen3next":
            tensor = _tiled(name, tensor, config)
        found[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
    return found


def _of_groups(tensor: torch.Tensor, config: Any) -> list[torch.Tensor]:
    """q, k, v and z of a stack that has one key head's after another's."""
    groups, each = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    keys, values = config.linear_key_head_dim, each * config.linear_value_head_dim
    by_group = tensor.view(groups, 2 * keys + 2 * values, -1)
    return [part.flatten(0, 1) for part in by_group.split([keys, keys, values, values], dim=1)]


def _tiled(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """The same with value heads in llama.cpp's order: the first of each key head, then the second."""
    groups, heads, size = (
        config.linear_num_key_heads,
        config.linear_num_value_heads,
        config.linear_value_head_dim,
    )

    def turned(rows: torch.Tensor) -> torch.Tensor:
        shape = rows.shape
        return rows.view(groups, heads // groups, -1, *shape[1:]).transpose(0, 1).reshape(shape)

    if "norm" in name:
        return tensor
    if "out_proj" in name:
        return turned(tensor.T.contiguous()).T.contiguous()
    if "in_proj_qkv" in name or "conv1d" in name:
        keys = 2 * groups * config.linear_key_head_dim
        return torch.cat([tensor[:keys], turned(tensor[keys:].contiguous())])
    assert tensor.shape[0] in (heads, heads * size)
    return turned(tensor)
