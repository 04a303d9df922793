"""GGUF models: metadata -> ModelConfig, tensors by row ranges, names and layouts that differ from ours.

Metadata that asks for what the decoder does not compute is refused with a ModelError. Nothing of the files
stays in memory: tensors are read (not mapped) some rows at a time. hub/gguf_header.py reads their heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specinfer.errors import ModelError, ModelFileError
from specinfer.files import read_exactly
from specinfer.hub.gguf_header import TENSOR_KINDS, GgufHeader, TensorKind, tensor_kind
from specinfer.models.config import Activation, Family, ModelConfig, Rope, YarnScaling
from specinfer.models.fields import MOST_LAYERS, all_ids, count, integer, number, optional_positive, positive
from specinfer.models.hf_config import longest_text, yarn_attention_factor
from specinfer.models.rope import is_rotated, read_in_order, rotated_order

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def config_from_gguf(
    metadata: Mapping[str, object],
    shapes: Mapping[str, Sequence[int]],
    rope_divisors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """The config of a GGUF file; raises ModelError on anything unsupported.

    `shapes` are the file's tensors by name, rows first ([out, in]); some facts stand only there.
    `rope_divisors` is its rope_freqs.weight, where it has one.
    """
    arch = metadata.get("general.architecture")
    families = {"llama": Family.LLAMA, "qwen2": Family.QWEN2, "qwen3": Family.QWEN3}
    families["gemma3"] = Family.GEMMA3
    if not isinstance(arch, str) or arch not in families:
        raise ModelError(
            f"the GGUF architecture is {arch!r}; supported: {', '.join(sorted(families))} "
            "(Mistral files say llama). docs/add_a_model.md says how to add one."
        )
    if integer(metadata, f"{arch}.expert_count", 0):
        raise ModelError("the GGUF file is a mixture of experts; supported: dense models")
    return _decoder_from_gguf(families[arch], arch, metadata, shapes, rope_divisors)


def _decoder_from_gguf(
    family: Family,
    arch: str,
    metadata: Mapping[str, object],
    shapes: Mapping[str, Sequence[int]],
    rope_divisors: tuple[float, ...] | None,
) -> ModelConfig:
    gemma = family is Family.GEMMA3
    c = {key[len(arch) + 1 :]: value for key, value in metadata.items() if key.startswith(f"{arch}.")}
    hidden = count(c, "embedding_length")
    heads = count(c, "attention.head_count")
    layers = integer(c, "block_count", most=MOST_LAYERS)
    head_dim = count(c, "attention.key_length", hidden // heads)
    if integer(c, "attention.value_length", head_dim) != head_dim:
        raise ModelError("the GGUF file has key and value heads of different sizes, which is not supported")
    rotated = count(c, "rope.dimension_count", head_dim)
    context = integer(c, "context_length")
    rope = _rope(c, context, 1e6 if gemma else 1e4, rope_divisors, None if rotated == head_dim else rotated)
    if gemma and count(c, "rope.dimension_count_swa", rotated) != rotated:
        raise ModelError("layers of the GGUF file rotate different parts of a head; supported: all the same")
    if {"rope_factors_long.weight", "rope_factors_short.weight"} & shapes.keys():
        raise ModelError(
            "the GGUF file scales rope by longrope; supported: none, linear, yarn, or a rope_freqs tensor"
        )
    if gemma and rope.yarn is not None:
        raise ModelError("the GGUF file is a Gemma 3 with YaRN, which is not supported")
    if c.get("attn_logit_softcapping"):
        raise ModelError("the GGUF file caps attention scores, which is not supported")
    if "token_embd.weight" not in shapes:
        raise ModelError("the GGUF file has no token_embd.weight; it is not a complete language model")
    window = integer(c, "attention.sliding_window", 0) or None
    windows: tuple[int | None, ...] = (window,) * layers
    scalar = float(head_dim)
    if gemma:
        pattern = count(c, "attention.sliding_window_pattern", 6)
        windows = tuple(window if (i + 1) % pattern else None for i in range(layers))
        # No key holds query_pre_attn_scalar; of the Gemma 3 models only the 27B's differs from head_dim.
        scalar = hidden / heads if layers == 62 else scalar
    return ModelConfig(
        family=family,
        vocab_size=shapes["token_embd.weight"][0],
        hidden_size=hidden,
        embedding_size=hidden,
        intermediate_size=integer(c, "feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=integer(c, "attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=number(c, "attention.layer_norm_rms_epsilon"),
        rope=rope,
        local_rope=Rope(positive(c, "rope.freq_base_swa", 1e4), rotated=rope.rotated) if gemma else None,
        layer_windows=windows,
        tie_embeddings="output.weight" not in shapes,
        qkv_bias="blk.0.attn_q.bias" in shapes,
        o_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_down.bias" in shapes,
        qk_norm="blk.0.attn_q_norm.weight" in shapes,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        norm_weight_offset=0.0,  # the converter has added Gemma's 1 already
        sandwich_norms=gemma,
        activation=Activation.GELU_TANH if gemma else Activation.SILU,
        attention_scale=scalar**-0.5,
        logit_softcap=optional_positive(c, "final_logit_softcapping"),
        max_context=longest_text(rope, context),
        eos_ids=tuple(
            dict.fromkeys(
                token
                for kind in ("eos", "eot", "eom")
                for token in all_ids((metadata,), f"tokenizer.ggml.{kind}_token_id")
            )
        ),
    )


def _rope(
    c: Mapping[str, object],
    context: int,
    theta: float,
    divisors: tuple[float, ...] | None,
    rotated: int | None,
) -> Rope:
    """The embedding as llama.cpp computes it; `context` is the longest text's, `divisors` are rope_freqs."""
    theta = positive(c, "rope.freq_base", theta)
    kind = c.get("rope.scaling.type", "linear" if "rope.scale_linear" in c else "none")
    scale = positive(c, "rope.scaling.attn_factor", 1.0)
    if divisors is not None:
        if kind not in ("none", "llama3"):
            raise ModelError(f"the GGUF file has rope_freqs and {kind!r} scaling; supported: one of them")
        return Rope(theta, divisors=divisors, rotated=rotated)
    if kind == "yarn":
        factor = positive(c, "rope.scaling.factor")
        if number(c, "rope.scaling.yarn_ext_factor", 1.0) != 1:
            raise ModelError("rope.scaling.yarn_ext_factor is not 1, which is not supported")
        log = number(c, "rope.scaling.yarn_log_multiplier", 0.0)
        scale *= positive(c, "rope.scaling.yarn_attn_factor", 1.0)
        scale *= yarn_attention_factor(factor) / (yarn_attention_factor(factor, log) if log else 1.0)
        return Rope(
            theta,
            yarn=YarnScaling(
                factor,
                count(c, "rope.scaling.original_context_length", context),
                attention_factor=scale,
                beta_fast=positive(c, "rope.scaling.yarn_beta_fast", 32.0),
                beta_slow=positive(c, "rope.scaling.yarn_beta_slow", 1.0),
            ),
            rotated=rotated,
        )
    if scale != 1:
        raise ModelError(f"rope.scaling.attn_factor is {scale} without YaRN, which is not supported")
    if kind == "none":
        return Rope(theta, rotated=rotated)
    if kind == "linear":
        factor = positive(c, "rope.scaling.factor", positive(c, "rope.scale_linear", 1.0))
        return Rope(theta, linear_factor=factor, rotated=rotated)
    raise ModelError(
        f"the GGUF rope scaling is {kind!r}; supported: none, linear, yarn, or a rope_freqs tensor"
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where a tensor lies, and how it is written."""

    path: Path
    kind: TensorKind
    shape: tuple[int, ...]  # rows first
    offset: int  # bytes from the start of the file
    row_bytes: int  # of one row; of one element where the tensor is a vector


class GGUFFile:
    """An open GGUF model: its config, and its tensors under the decoder's names, rows in the decoder's order.

    Raises ModelFileError where the file is truncated or damaged, ModelError where it needs the unsupported.
    """

    def __init__(self, header: GgufHeader) -> None:
        self.path = header.path
        self._tensors = _read_table(header)
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self.config = config_from_gguf(header.metadata, shapes, self._rope_divisors())
        self._order = _head_order(header.metadata["general.architecture"], self.config)
        self._names: dict[str, str] = {}  # the decoder's name -> the file's
        self._scales: dict[str, float] = {}  # by the file's name of a matrix: what it is to be multiplied by
        for name in self._tensors:
            if name == "rope_freqs.weight":  # part of the config
                continue
            stem, _, end = name.rpartition(".")
            if end in ("scale", "input_scale") and self._is_scale(name, f"{stem}.weight"):
                if end == "scale":  # the other one is of activations, which are not quantized here
                    self._scales[f"{stem}.weight"] = float(self._read(self._tensors[name], 0, 1))
                continue
            self._names[_decoder_name(name, self.config)] = name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by the decoder's name."""
        return {name: self._tensors[there].shape for name, there in self._names.items()}

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor in the file; None where it is quantized."""
        return _PLAIN.get(self._tensors[self._names[name]].kind.name)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, on the CPU, in the file's dtype or float32."""
        there = self._names[name]
        read = partial(self._read, self._tensors[there])
        if there in self._scales:
            return self._in_order(name, read, start, stop).float() * self._scales[there]
        return self._in_order(name, read, start, stop)

    def _in_order(self, name: str, read: Callable[[int, int], Tensor], start: int, stop: int) -> Tensor:
        if self._order is None or not is_rotated(name):
            return read(start, stop)
        return read_in_order(read, start, stop, self._order)

    def _read(self, tensor: _Placed, start: int, stop: int) -> Tensor:
        data = np.empty((stop - start) * tensor.row_bytes, dtype=np.uint8)
        read_exactly(tensor.path, tensor.offset + start * tensor.row_bytes, data.data)
        shape = (stop - start, *tensor.shape[1:])
        dtype = _PLAIN.get(tensor.kind.name)
        if dtype is not None:
            return torch.from_numpy(data).view(dtype).view(shape)
        # Imported late: a start that has its quantized matrices on disk needs none of it.
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        return torch.from_numpy(dequantize(data, GGMLQuantizationType[tensor.kind.name])).view(shape)

    def _is_scale(self, name: str, matrix: str) -> bool:
        """Whether a tensor is one number beside a matrix, as NVFP4 has it."""
        scale, beside = self._tensors[name], self._tensors.get(matrix)
        return (
            (scale.kind.name, scale.shape) == ("F32", (1,)) and beside is not None and len(beside.shape) == 2
        )

    def _rope_divisors(self) -> tuple[float, ...] | None:
        tensor = self._tensors.get("rope_freqs.weight")
        if tensor is None:
            return None
        return tuple(self._read(tensor, 0, tensor.shape[0]).to(torch.float32).tolist())


def _head_order(architecture: object, config: ModelConfig) -> list[int] | None:
    """The order in which elements of query and key heads are read; None: as they stand in the file."""
    size = config.head_dim
    if architecture == "llama":  # pair i is elements 2 i and 2 i + 1, whether all of them are rotated or not
        return [*range(0, size, 2), *range(1, size, 2)]
    part = None if config.rope is None else config.rope.rotated
    return None if part is None else rotated_order(part, size)


def _read_table(header: GgufHeader) -> dict[str, _Placed]:
    """The tensors by name; every one is known to lie inside its file, or ModelFileError."""
    placed: dict[str, _Placed] = {}
    for part in (header, *header.parts):
        path, size = part.path, part.path.stat().st_size
        for tensor in part.tensors:
            shape = tensor.shape[::-1]
            if not 1 <= len(shape) <= 4 or min(shape) < 1 or tensor.name in placed:
                raise ModelFileError(
                    f"{path}: the entry of tensor {tensor.name!r} is damaged; get the file again"
                )
            kind = tensor_kind(path, tensor)
            if kind.name not in _PLAIN and not _dequantized(kind):
                raise ModelFileError(
                    f"{path}: tensor {tensor.name!r} is of type {kind.name}; supported: "
                    f"{' '.join(_readable())}. Use another quantization of the model."
                )
            offset = part.data_offset + tensor.offset
            placed[tensor.name] = _place(path, tensor.name, kind, shape, offset, size)
    return placed


def _dequantized(kind: TensorKind) -> bool:
    """Whether the gguf package makes floats of such blocks."""
    return kind in TENSOR_KINDS.values() or kind.name in _readable()


@cache
def _readable() -> list[str]:
    """The names of kinds that are read: floats, and what the installed gguf package dequantizes."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    found = [*_PLAIN]
    for kind in GGMLQuantizationType:
        if kind.name in _PLAIN or kind not in GGML_QUANT_SIZES:
            continue
        try:
            dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], dtype=np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    return found


def _place(
    path: Path, name: str, kind: TensorKind, shape: tuple[int, ...], offset: int, size: int
) -> _Placed:
    _, block, block_bytes = kind
    row = shape[-1] if len(shape) > 1 else 1
    if row % block:
        raise ModelFileError(
            f"{path}: a row of tensor {name!r} has {row} elements, {kind.name} needs a multiple of {block}; "
            "the file is damaged, get it again"
        )
    inner = 1
    for extent in shape[1:-1]:
        inner *= extent
    row_bytes = row // block * block_bytes * inner
    end = offset + shape[0] * row_bytes
    if end > size:
        raise ModelFileError(
            f"{path} is truncated: tensor {name!r} ends at byte {end}, the file has {size}. Get it again."
        )
    return _Placed(path, kind, shape, offset, row_bytes)


def _decoder_name(name: str, config: ModelConfig) -> str:
    """The decoder's name of a tensor; a name we do not know stays as it is, and is refused as unexpected."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    names = _GEMMA_LAYER_NAMES if config.family is Family.GEMMA3 else _LAYER_NAMES
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        return name
    return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"
