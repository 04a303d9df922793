"""Reading GGUF files: header, tensors by row ranges, and the names and layouts that differ from ours.

Nothing of the file stays in memory: the header is parsed from a mapping that is closed again, and tensors are
read (not mapped) some rows at a time.

    magic, version | metadata key-values | tensor names, shapes, types, offsets | padding | tensor data
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.models.config import Family, ModelConfig

_MAGIC = b"GGUF"
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9

_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_QUANTIZED = frozenset(
    GGMLQuantizationType[name]
    for name in (
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
    )
)


@dataclass(frozen=True, slots=True)
class StringArray:
    """A list of strings in the metadata (a vocabulary), of which only the length was read."""

    count: int


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies in the file, and how it is written."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # rows first
    offset: int  # bytes from the start of the file
    row_bytes: int  # of one row; of one element where the tensor is a vector


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a GGUF file says about itself."""

    metadata: Mapping[str, object]
    tensors: Mapping[str, GGUFTensor]


class GGUFFile:
    """An open GGUF model: its config, and its tensors under the decoder's names, rows in the decoder's order.

    Raises ModelFileError where the file is truncated or damaged, ModelError where it needs the unsupported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self._tensors = header.tensors
        shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
        self.config = ModelConfig.from_gguf(header.metadata, shapes, self._rope_divisors())
        # Converters of the llama architecture interleave the two halves of each q and k head.
        self._interleaved = header.metadata["general.architecture"] == "llama"
        self._names: dict[str, str] = {}  # the decoder's name -> the file's
        for name in header.tensors:
            if name != "rope_freqs.weight":  # part of the config
                self._names[_decoder_name(name, self.config)] = name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor, by the decoder's name."""
        return {name: self._tensors[there].shape for name, there in self._names.items()}

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, on the CPU, in the file's dtype or float32."""
        tensor = self._tensors[self._names[name]]
        if not self._interleaved or not re.search(r"self_attn\.[qk]_proj\.", name):
            return self._read(tensor, start, stop)
        head = self.config.head_dim
        first, last = start // head * head, -(-stop // head) * head
        rows = self._read(tensor, first, last)
        ordered = rows.view(-1, head // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
        return ordered[start - first : stop - first]

    def _read(self, tensor: GGUFTensor, start: int, stop: int) -> Tensor:
        wanted = (stop - start) * tensor.row_bytes
        data = np.empty(wanted, dtype=np.uint8)
        with self.path.open("rb", buffering=0) as file:
            file.seek(tensor.offset + start * tensor.row_bytes)
            got = 0
            while got < wanted:
                count = file.readinto(data[got:].data)
                if not count:
                    raise ModelFileError(f"{self.path} got shorter while it was read; get it again")
                got += count
        shape = (stop - start, *tensor.shape[1:])
        dtype = _PLAIN.get(tensor.kind)
        if dtype is not None:
            return torch.from_numpy(data).view(dtype).view(shape)
        return torch.from_numpy(gguf.quants.dequantize(data, tensor.kind)).view(shape)

    def _rope_divisors(self) -> tuple[float, ...] | None:
        tensor = self._tensors.get("rope_freqs.weight")
        if tensor is None:
            return None
        return tuple(self._read(tensor, 0, tensor.shape[0]).to(torch.float32).tolist())


def read_header(path: Path) -> GGUFHeader:
    """Parse and check a GGUF file's header; raises ModelFileError.

    Every tensor is known to lie inside the file afterwards.
    """
    size = path.stat().st_size
    if size < 24:
        raise ModelFileError(f"{path} has {size} bytes; a GGUF file has at least 24. Get it again.")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return _parse(path, data, size)
        except (struct.error, UnicodeDecodeError) as error:
            raise ModelFileError(
                f"{path} ends or breaks off inside its header ({error}); get it again"
            ) from error


class _Cursor:
    """A position in the header."""

    __slots__ = ("at", "data")

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data = data
        self.at = at

    def scalar(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from(code, self.data, self.at)
        self.at += struct.calcsize(code)
        assert isinstance(value, (int, float))
        return value

    def count(self) -> int:
        return int(self.scalar("<Q"))

    def skip_string(self) -> None:
        self.at += 8 + struct.unpack_from("<Q", self.data, self.at)[0]
        if self.at > len(self.data):
            raise struct.error(f"a string would end at byte {self.at}")

    def string(self) -> str:
        start = self.at + 8
        self.skip_string()
        return self.data[start : self.at].decode("utf-8")

    def value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise struct.error(f"metadata type {kind} does not exist")
        inner, count = int(self.scalar("<I")), self.count()
        if count > len(self.data):
            raise struct.error(f"an array of {count} elements does not fit")
        if inner == _STRING:
            for _ in range(count):
                self.skip_string()
            return StringArray(count)
        return [self.value(inner) for _ in range(count)]


def _parse(path: Path, data: mmap.mmap, size: int) -> GGUFHeader:
    if data[:4] != _MAGIC:
        raise ModelFileError(
            f"{path} begins with {bytes(data[:4])!r}, not {_MAGIC!r}; give a GGUF file or a model folder"
        )
    cursor = _Cursor(data, 4)
    version = int(cursor.scalar("<I"))
    if version not in (2, 3):
        raise ModelFileError(f"{path} is GGUF version {version}; supported: 2 and 3, little-endian")
    num_tensors, num_keys = cursor.count(), cursor.count()
    metadata: dict[str, object] = {}
    for _ in range(num_keys):
        key = cursor.string()
        metadata[key] = cursor.value(int(cursor.scalar("<I")))
    parts = metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ModelFileError(f"{path} is one of {parts} parts; merge them first (llama-gguf-split --merge)")
    found: dict[str, tuple[GGMLQuantizationType, tuple[int, ...], int]] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        dimensions = int(cursor.scalar("<I"))
        if not 1 <= dimensions <= 4 or name in found:
            raise ModelFileError(f"{path}: the entry of tensor {name!r} is damaged; get the file again")
        shape = tuple(cursor.count() for _ in range(dimensions))[::-1]
        kind = int(cursor.scalar("<I"))
        found[name] = (_kind(path, name, kind), shape, cursor.count())
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ModelFileError(f"{path}: general.alignment is {alignment!r}; get the file again")
    start = -(-cursor.at // alignment) * alignment
    tensors = {
        name: _place(path, name, kind, shape, start + offset, size)
        for name, (kind, shape, offset) in found.items()
    }
    return GGUFHeader(metadata, tensors)


def _kind(path: Path, name: str, number: int) -> GGMLQuantizationType:
    known = {kind.value: kind for kind in GGMLQuantizationType}
    kind = known.get(number)
    if kind is None or (kind not in _PLAIN and kind not in _QUANTIZED):
        supported = ", ".join(sorted(k.name for k in (*_PLAIN, *_QUANTIZED)))
        raise ModelFileError(
            f"{path}: tensor {name!r} is of type {kind.name if kind else number}; supported: {supported}. "
            "Use another quantization of the model."
        )
    return kind


def _place(
    path: Path, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...], offset: int, size: int
) -> GGUFTensor:
    block, block_bytes = GGML_QUANT_SIZES[kind]
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
    return GGUFTensor(kind, shape, offset, row_bytes)


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
