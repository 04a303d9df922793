"""Keys, names and values of tensors in the files that llama.cpp writes of models with Mamba-2."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

ARCHITECTURES = ("granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe")


def keys(config: object) -> dict[str, object]:
    """The metadata that these architectures have beside the usual."""
    nemotron = config.model_type == "nemotron_h"
    names = ("mamba_num_heads", "ssm_state_size", "n_groups", "conv_kernel")
    if not nemotron:
        names = ("mamba_n_heads", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    heads, state, groups, taps = (getattr(config, name) for name in names)
    found = {
        "ssm.conv_kernel": taps,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.inner_size": heads * (config.mamba_head_dim if nemotron else config.mamba_d_head),
        "ssm.time_step_rank": heads,
    }
    blocks = config.layers_block_type
    if config.model_type != "falcon_h1":
        attends = [config.num_key_value_heads * (block == "full_attention") for block in blocks]
        found["attention.head_count_kv"] = attends
        found["rope.scaling.finetuned"] = getattr(config, "position_embedding_type", None) == "rope"
    if "shared_intermediate_size" in vars(config):
        found["expert_shared_feed_forward_length"] = config.shared_intermediate_size
    if nemotron:
        mixture = "moe" in blocks
        size = config.moe_intermediate_size if mixture else config.intermediate_size
        found["feed_forward_length"] = [size * (block == ("moe" if mixture else "mlp")) for block in blocks]
        if mixture:
            found |= {
                "expert_feed_forward_length": config.moe_intermediate_size,
                "expert_weights_norm": config.norm_topk_prob,
                "expert_weights_scale": config.routed_scaling_factor,
            }
    return found


def tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors under the names of transformers that the converter looks up, with its values."""
    config = model.config
    groups = getattr(config, "n_groups", None) or config.mamba_n_groups
    for name, tensor in model.state_dict().items():
        stem, _, last = name.rpartition(".")
        if config.model_type == "nemotron_h":
            if "mixer.experts" in name:
                name = name.replace("mixer", "mlp")
            else:
                name = name.replace("model.", "backbone.", 1)
            name = name.replace("correction_bias", "correction.bias")
        elif config.model_type == "falcon_h1":
            tensor = tensor * factor(config, name, tensor)
        if last == "A_log":
            yield name, -torch.exp(tensor)[:, None]
        elif last == "D":
            yield name, tensor[:, None]
        elif last == "dt_bias":
            yield name.replace("dt_bias", "dt_proj.bias"), tensor
        elif stem.endswith("conv1d") and last == "weight":
            yield name, tensor[:, 0]
        elif stem.endswith(("mamba.norm", "mixer.norm")):
            yield name, tensor.view(groups, -1)
        elif "shared_mlp.input_linear" in name:
            for kind, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                shared = "shared_expert." if config.num_local_experts else ""
                yield name.replace("shared_mlp.input_linear", f"mlp.{shared}{kind}_proj"), half
        elif "shared_mlp.output_linear" in name and not config.num_local_experts:
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), tensor
        else:
            yield name, tensor


def factor(config: object, name: str, tensor: Tensor) -> Tensor:
    """The factor of a Falcon-H1's tensor."""
    into = config.attention_in_multiplier
    found = {
        **{"q_proj": into, "k_proj": into * config.key_multiplier, "v_proj": into},
        **{"o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier},
        **{"gate_proj": config.mlp_multipliers[0], "down_proj": config.mlp_multipliers[1]},
        **{"lm_head": config.lm_head_multiplier, "embed_tokens": config.embedding_multiplier},
    }
    if "in_proj" not in name:
        own = name.split(".")[-2] if "." in name else ""
        return torch.tensor(found.get(own, 1.0))
    inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    sizes = torch.tensor([inner, inner, state, state, config.mamba_n_heads])
    rows = torch.tensor(config.ssm_multipliers).repeat_interleave(sizes) * config.ssm_in_multiplier
    return rows.view(-1, *[1] * (tensor.dim() - 1))
