"""Read and write heads in the format of the `speculators` library.

Layer ids are taps: id i is the input of layer i. A setting that heads do not compute is refused with a
ModelError. `transformer_layer_config` describes the layers of a head as transformers describes a model: it
holds the fields that differ from the defaults of the model class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from specinfer.errors import ModelError
from specinfer.files import write_text
from specinfer.heads.block import BlockHead
from specinfer.heads.config import BlockConfig, EagleConfig
from specinfer.heads.eagle import EagleHead
from specinfer.heads.vocabulary import own_tensors
from specinfer.models.config import Activation, Family, ModelConfig, QkNorm
from specinfer.models.families.registry import config_from_hf
from specinfer.models.fields import count, integer, mapping
from specinfer.models.hf_config import layers_to_hf
from specinfer.models.rope_config import rope_to_hf
from specinfer.models.safetensors import write_safetensors

SCALE: Final = "_scale"  # suffix of the tensor with the row factors of an int8 matrix
FINGERPRINT: Final = "target_fingerprint"  # key of the target's fingerprint (models/fingerprint.py)
TYPES: Final = ("dflash", "dspark", "eagle3", "peagle")
_CLASSES: Final = {"eagle3": "Eagle3", "peagle": "PEagle", "dspark": "DSpark", "dflash": "DFlash"}
_VERSION: Final = "0.7.0"  # library version to write; the format is unchanged since 0.1
# A field of this project: the library has no such heads.
_READS_LAST: Final = "reads_last_hidden_state"
_KNOWN_VERSIONS: Final = re.compile(r"0\.\d")
# Defaults of transformers' config classes; a config file may leave these fields out.
_QWEN: dict[str, object] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
_DEFAULTS: dict[str, dict[str, object]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN,
}
_LAYERS: Final = (Family.LLAMA, Family.QWEN2, Family.QWEN3)  # families that can be written as a head's layers
_MAX_LAYERS = 64
_SLIDING = "sliding_attention"


def config_from_speculators(c: Mapping[str, object], target_layers: int) -> EagleConfig | BlockConfig:
    """Return the config of a head with this config.json, for a target of `target_layers` layers.

    The result does not say whether the head has embeddings and an output layer; its tensors do. Raises
    ModelError on anything unsupported.
    """
    kind, version = c.get("speculators_model_type"), c.get("speculators_version", _VERSION)
    if kind not in TYPES:
        raise ModelError(f"speculators_model_type is {kind!r}; supported: {', '.join(TYPES)}")
    if not isinstance(version, str) or not _KNOWN_VERSIONS.match(version):
        raise ModelError(f"speculators_version is {version!r}; supported: versions that begin with 0.")
    layers = mapping(c, "transformer_layer_config")
    if kind in ("eagle3", "peagle"):
        return _eagle(c, layers, target_layers, one_pass=kind == "peagle")
    return _block(c, layers, target_layers, markov=kind == "dspark")


def _eagle(
    c: Mapping[str, object], layers: Mapping[str, object], target_layers: int, *, one_pass: bool
) -> EagleConfig:
    body = body_from_hf(layers)
    return EagleConfig(
        body=body,
        taps=taps_of(c, "eagle_aux_hidden_state_layer_ids", target_layers),
        target_hidden_size=count(c, "target_hidden_size", body.hidden_size),
        draft_vocab_size=count(c, "draft_vocab_size"),
        depth=_depth(c, 8 if one_pass else 5),
        mask_token_id=integer(c, "mask_token_id") if one_pass else None,
        norm_before_residual=flag(c, "norm_before_residual"),
        norm_before_fc=flag(c, "norm_before_fc", False),
        fc_norm=flag(c, "fc_norm", False),
        norm_output=flag(c, "norm_output", False),
    )


def _block(
    c: Mapping[str, object], layers: Mapping[str, object], target_layers: int, *, markov: bool
) -> BlockConfig:
    # A block head has Qwen3 layers, with norms of queries and keys, whatever model_type says.
    body = body_from_hf({**layers, "model_type": layers.get("model_type", "qwen3")})
    if body.qk_norm is QkNorm.NONE:
        raise ModelError(f"a block head has layers of {body.family}; supported: qwen3")
    rank = integer(c, "markov_rank", 256) if markov else 0
    kind = c.get("markov_head_type", "vanilla")
    if rank and kind != "vanilla":
        raise ModelError(f"markov_head_type is {kind!r}; supported: vanilla")
    return BlockConfig(
        body=body,
        taps=taps_of(c, "aux_hidden_state_layer_ids", target_layers),
        target_hidden_size=count(c, "target_hidden_size", body.hidden_size),
        draft_vocab_size=count(c, "draft_vocab_size"),
        block_size=count(c, "block_size"),
        mask_token_id=integer(c, "mask_token_id"),
        causal=is_causal(layers, windows_are_causal=not flag(c, "sliding_window_non_causal", False)),
        sample_from_anchor=flag(c, "sample_from_anchor", markov),
        markov_rank=rank,
        reads_last=markov and flag(c, _READS_LAST, False),
    )


def config_to_speculators(
    config: EagleConfig | BlockConfig, *, verifier: str, architectures: Sequence[str], dtype: str
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
    if config.fc_reads_token:
        raise ModelError(
            "an EAGLE-1 or EAGLE-2 head cannot be written in the format of the speculators library"
        )
    one_pass = config.mask_token_id is not None
    return "peagle" if one_pass else "eagle3", {
        **({"mask_token_id": config.mask_token_id} if one_pass else {}),
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
        **({_READS_LAST: True} if config.reads_last else {}),
    }


def taps_of(c: Mapping[str, object], key: str, target_layers: int) -> tuple[int, ...]:
    """Return the taps under `key`, or EAGLE-3's default taps for a target of `target_layers` layers."""
    ids = c.get(key)
    if ids is None:
        return (2, target_layers // 2, target_layers - 3)
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ModelError(f"{key} is {ids!r}; expected a list of layers: the config is damaged")
    return tuple(ids)


def _depth(c: Mapping[str, object], default: int) -> int:
    """Return the number of tokens the head guesses, or `default` if the file does not say."""
    methods = c.get("speculators_config")
    match methods:
        case {"proposal_methods": [{"speculative_tokens": int(tokens)}, *_]} if not isinstance(tokens, bool):
            return tokens
        case _:
            return default


def flag(c: Mapping[str, object], key: str, default: bool | None = None) -> bool:
    """Return a boolean field, or `default` if it is missing; without a default it is required."""
    value = c.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(f"{key} is {value!r}; expected true or false: the config is damaged or incomplete")
    return value


def body_from_hf(config: Mapping[str, object]) -> ModelConfig:
    """Return the config of a head's layers, all with full attention.

    Raises ModelError for layers that heads do not support: experts, or windows shorter than the context.
    """
    kind = config.get("model_type", "qwen3")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise ModelError(
            f"a head's layers are of model_type {kind!r}; supported: {', '.join(sorted(_DEFAULTS))}"
        )
    layers = count(config, "num_hidden_layers", 1)
    if layers > _MAX_LAYERS:
        raise ModelError(f"a head has {layers} layers; allowed: 1 to {_MAX_LAYERS}")
    given = {key: value for key, value in config.items() if value is not None}
    body = config_from_hf({**_DEFAULTS[kind], **given, "model_type": kind, "eos_token_id": None})
    window = body.window
    if window is not None and window < body.max_context:
        raise ModelError(
            f"a head's layers have a sliding window of {window} in a context of {body.max_context}; "
            "only full attention is supported"
        )
    return replace(body, layer_windows=(None,) * body.num_layers, eos_ids=())


def is_causal(config: Mapping[str, object], *, windows_are_causal: bool = True) -> bool:
    """Return whether a block's rows attend to earlier rows only.

    `is_causal` decides; without it, layers with a sliding window are causal. vLLM and the `speculators`
    library read configs in the same way. Raises ModelError if layers differ.
    """
    given = config.get("is_causal")
    if isinstance(given, bool):
        return given
    if given is not None:
        raise ModelError(f"is_causal is {given!r}; expected true or false")
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or not kinds:
        return False
    causal = {windows_are_causal and kind == _SLIDING for kind in kinds}
    if len(causal) > 1:
        raise ModelError(
            f"layers of a block head have different layer_types: {kinds}; supported: the same for all"
        )
    return causal.pop()


def body_to_hf(body: ModelConfig, *, causal_block: bool = False) -> dict[str, object]:
    """Return the fields that `body_from_hf` reads.

    `causal_block` marks a block head as causal, in fields that vLLM and the `speculators` library read.
    Raises ModelError for layers that the format cannot describe.
    """
    rope = body.rope
    if body.family not in _LAYERS or rope is None:
        raise ModelError(f"layers of {body.family} cannot be written as a head's; use llama's or qwen3's")
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
            "layer_types": [_SLIDING] * body.num_layers,
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
    tensors = {name: tensor.detach().cpu().to(floats).contiguous() for name, tensor in own.items()}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"the head's tensor {name!r} holds values that are not finite in {floats}")
    if dtype == torch.int8:
        for name in [name for name, tensor in tensors.items() if tensor.dim() == 2]:
            tensors[name], tensors[name + SCALE] = _rows_as_int8(tensors[name])
    tensors |= {name: state[name].cpu() for name in ("d2t", "t2d") if name in state}
    named = str(floats).removeprefix("torch.")
    described = config_to_speculators(config, verifier=verifier, architectures=architectures, dtype=named)
    if fingerprint is not None:
        described[FINGERPRINT] = fingerprint
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    write_text(folder / "config.json", json.dumps(described, indent=2))


def _rows_as_int8(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix as int8 and the factor of each row."""
    scale = (matrix.abs().amax(dim=1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (matrix / scale[:, None]).round().to(torch.int8), scale
