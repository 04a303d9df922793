"""GGUF models: tensors by row ranges, and the names and layouts that differ from ours.

Nothing of the file stays in memory: tensors are read (not mapped) some rows at a time. hub/gguf_header.py
reads the file's head.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.files import read_exactly
from specinfer.hub.gguf_header import TENSOR_KINDS, GgufHeader, TensorKind
from specinfer.models.config import Family, ModelConfig
from specinfer.models.gguf_config import config_from_gguf
from specinfer.models.rope import is_rotated, read_in_order, rotated_order

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where a tensor lies in the file, and how it is written."""

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
        for name in self._tensors:
            if name != "rope_freqs.weight":  # part of the config
                self._names[_decoder_name(name, self.config)] = name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by the decoder's name."""
        return {name: self._tensors[there].shape for name, there in self._names.items()}

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, on the CPU, in the file's dtype or float32."""
        tensor = self._tensors[self._names[name]]
        read = partial(self._read, tensor)
        if self._order is None or not is_rotated(name):
            return read(start, stop)
        return read_in_order(read, start, stop, self._order)

    def _read(self, tensor: _Placed, start: int, stop: int) -> Tensor:
        data = np.empty((stop - start) * tensor.row_bytes, dtype=np.uint8)
        read_exactly(self.path, tensor.offset + start * tensor.row_bytes, data.data)
        shape = (stop - start, *tensor.shape[1:])
        dtype = _PLAIN.get(tensor.kind.name)
        if dtype is not None:
            return torch.from_numpy(data).view(dtype).view(shape)
        from gguf.constants import (
            GGMLQuantizationType,
        )  # a start that has quantized matrices needs none of it
        from gguf.quants import dequantize

        return torch.from_numpy(dequantize(data, GGMLQuantizationType[tensor.kind.name])).view(shape)

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
    """The tensors by name; every one is known to lie inside the file, or ModelFileError."""
    path = header.path
    parts = header.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ModelFileError(f"{path} is one of {parts} parts; merge them first (llama-gguf-split --merge)")
    size = path.stat().st_size
    placed: dict[str, _Placed] = {}
    for tensor in header.tensors:
        shape = tensor.shape[::-1]
        if not 1 <= len(shape) <= 4 or min(shape) < 1 or tensor.name in placed:
            raise ModelFileError(
                f"{path}: the entry of tensor {tensor.name!r} is damaged; get the file again"
            )
        kind = _kind(path, tensor.name, tensor.ggml_type)
        placed[tensor.name] = _place(path, tensor.name, kind, shape, header.data_offset + tensor.offset, size)
    return placed


def _kind(path: Path, name: str, number: int) -> TensorKind:
    if (kind := TENSOR_KINDS.get(number)) is not None:
        return kind
    from gguf.constants import GGMLQuantizationType

    names = {kind.value: kind.name for kind in GGMLQuantizationType}
    raise ModelFileError(
        f"{path}: tensor {name!r} is of type {names.get(number, number)}; supported: "
        f"{' '.join(kind.name for kind in TENSOR_KINDS.values())}. Use another quantization of the model."
    )


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
    return _Placed(kind, shape, offset, row_bytes)


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


def _decoder_name(name: str, config: ModelConfig) -> str:
    """The decoder's name of a tensor; a name we do not know stays as it is, and is refused as unexpected."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    names = _GEMMA_LAYER_NAMES if config.family is Family.GEMMA3 else _LAYER_NAMES
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in names:
        return name
    return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"
