"""Write a head in the layout of the `speculators` library, which vLLM reads, too; layouts.py reads it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelError
from specinfer.files import write_text
from specinfer.heads.block import BlockHead
from specinfer.heads.config import BlockConfig, EagleConfig, HeadConfig
from specinfer.heads.eagle import EagleHead
from specinfer.heads.layouts import READS_LAST, SLIDING
from specinfer.heads.vocabulary import own_tensors
from specinfer.models.config import Activation, Family, ModelConfig
from specinfer.models.hf_config import layers_to_hf
from specinfer.models.positions import rope_to_hf
from specinfer.models.safetensors import write_safetensors

SCALE: Final = "_scale"  # suffix of the tensor with the row factors of an int8 matrix
FINGERPRINT: Final = "target_fingerprint"  # key of the target's fingerprint (models/fingerprint.py)
_CLASSES: Final = {"eagle3": "Eagle3", "dspark": "DSpark", "dflash": "DFlash"}
_VERSION: Final = "0.7.0"  # library version to write; the format is unchanged since 0.1
_LAYERS: Final = (Family.LLAMA, Family.QWEN2, Family.QWEN3)  # families that can be written as a head's layers


def _described(
    config: HeadConfig, *, verifier: str, architectures: Sequence[str], dtype: str
) -> dict[str, object]:
    """Return config.json of a head for the target `verifier` with these architectures."""
    kind, own = _eagle_fields(config) if isinstance(config, EagleConfig) else _block_fields(config)
    causal = isinstance(config, BlockConfig) and config.causal
    return {
        "architectures": [_CLASSES[kind] + "Speculator"],
        "speculators_model_type": kind,
        "speculators_version": _VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.depth,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": list(architectures)},
        },
        "transformer_layer_config": body_to_hf(config.body, causal_block=causal),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "dtype": dtype,
        **own,
    }


def _eagle_fields(config: EagleConfig) -> tuple[str, dict[str, object]]:
    return "eagle3", {
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": config.own_embedding,
    }


def _block_fields(config: BlockConfig) -> tuple[str, dict[str, object]]:
    fields: dict[str, object] = {
        "aux_hidden_state_layer_ids": list(config.taps),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": False,
        "sample_from_anchor": config.sample_from_anchor,
    }
    if not (config.markov_rank or config.sample_from_anchor or config.reads_last):
        return "dflash", fields
    return "dspark", fields | {
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        **({READS_LAST: True} if config.reads_last else {}),
    }


def body_to_hf(body: ModelConfig, *, causal_block: bool = False) -> dict[str, object]:
    """Return the fields that `body_from_hf` reads.

    `causal_block` marks a block head as causal, in fields that vLLM and the `speculators` library read.
    Raises ModelError for layers that the format cannot describe.
    """
    rope = body.rope
    if body.family not in _LAYERS or rope is None or body.window is not None:
        raise ModelError(
            f"layers of {body.family} with window {body.window} cannot be written as a head's; use llama's "
            "or qwen3's without windows"
        )
    if body.activation is not Activation.SILU:
        raise ModelError(f"layers with {body.activation} cannot be written as a head's; use silu")
    written: dict[str, object] = {
        **layers_to_hf(body, rope.theta),
        "rope_scaling": rope_to_hf(rope),
        # With dynamic scaling this field holds the context length before the extension.
        "max_position_embeddings": rope.dynamic.original_context if rope.dynamic else body.max_context,
        "attention_bias": body.qkv_bias,
        "tie_word_embeddings": False,
    }
    if causal_block:
        written |= {
            "is_causal": True,
            "layer_types": [SLIDING] * body.num_layers,
            "use_sliding_window": True,
            "sliding_window": body.max_context,
        }
    return written


def write_head(
    head: EagleHead | BlockHead,
    folder: Path,
    *,
    verifier: str,
    architectures: Sequence[str],
    dtype: torch.dtype = torch.float32,
    fingerprint: str | None = None,
) -> None:
    """Write config.json and model.safetensors of a head for the target `verifier`, each atomically.

    dtype int8 writes matrices with a factor for each row and other tensors as float32; only this project
    reads such files. With the target's `fingerprint`, an engine that runs another target refuses the head;
    other readers ignore the field. Tables of the target are left out. vLLM requires an output layer in every
    head with a reduced vocabulary, so give such a head its own (`own_head`). Creates the folder. Raises
    OSError, and ModelError if a weight is not finite.
    """
    config = head.config
    state = head.state_dict()
    floats = torch.float32 if dtype == torch.int8 else dtype
    own = own_tensors(head)
    tensors = finite_tensors(own, floats)
    if dtype == torch.int8:
        for name in [name for name, tensor in tensors.items() if tensor.dim() == 2]:
            tensors[name], tensors[name + SCALE] = _rows_as_int8(tensors[name])
    tensors |= {name: state[name].cpu() for name in ("d2t", "t2d") if name in state}
    named = str(floats).removeprefix("torch.")
    described = _described(config, verifier=verifier, architectures=architectures, dtype=named)
    if fingerprint is not None:
        described[FINGERPRINT] = fingerprint
    write_folder(folder, described, tensors)


def finite_tensors(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a head's tensors on the CPU in `dtype`; raises ModelError if a value is not finite."""
    found = {name: tensor.detach().cpu().to(dtype).contiguous() for name, tensor in tensors.items()}
    for name, tensor in found.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"the head's tensor {name!r} holds values that are not finite in {dtype}")
    return found


def write_folder(folder: Path, described: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors of a head; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    write_text(folder / "config.json", json.dumps(described, indent=2))


def _rows_as_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix as int8 and the factor of each row."""
    scale = (matrix.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (matrix / scale[:, None]).round().to(torch.int8), scale
