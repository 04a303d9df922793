"""GGUF models: tensors by row ranges, with the decoder's names and order of rows.

The files do not stay in memory: tensors are read (not mapped) some rows at a time. hub/gguf_header.py reads
the headers, and models/families converts the metadata.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.errors import ModelFileError
from specinfer.files import read_exactly
from specinfer.hub.gguf_header import TENSOR_KINDS, GgufHeader, TensorKind, tensor_kind
from specinfer.kernels.file_blocks import BlockForm, StoredRows
from specinfer.models.config import ModelConfig
from specinfer.models.families.registry import gguf_family
from specinfer.models.gguf_blocks import FILE_BLOCKS, check_rows, rounded_form, rounded_rows
from specinfer.models.gguf_config import ROPE_TENSORS, GgufFamily, GgufHead, further_layers
from specinfer.models.next_layer import NextNames, nextn
from specinfer.models.sources import Sources

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Placed:
    """The place and format of a tensor."""

    path: Path
    kind: TensorKind
    shape: tuple[int, ...]  # rows first
    offset: int  # bytes from the start of the file
    row_bytes: int  # bytes of one row; of one element for a vector

    def as_matrix(self, name: str) -> Placed:
        """Concatenate matrices and biases of several experts, and make a shared expert's gate one row."""
        if len(self.shape) == (2 if name.endswith("_exps.bias") else 3):
            experts, rows, *rest = self.shape
            return replace(self, shape=(experts * rows, *rest), row_bytes=self.row_bytes // rows)
        if name.endswith("ffn_gate_inp_shexp.weight") and len(self.shape) == 1:
            return replace(self, shape=(1, *self.shape), row_bytes=self.row_bytes * self.shape[0])
        return self


class GGUFFile:
    """An open GGUF model: its config, and its tensors with the decoder's names and order of rows.

    Raises ModelFileError if the file is damaged, ModelError if it needs unsupported features.
    """

    next_names: NextNames | None = None  # names of its layer for further tokens, if it has one

    def __init__(self, header: GgufHeader) -> None:
        """`header` is that of complete files (`check_complete`)."""
        tensors, family = read_table(header), gguf_family(header.metadata)
        behind = further_layers(family.architecture, header.metadata)
        head = self._open(header, family, tensors)
        # Some converters drop an announced layer's tensors.
        if family.reads_next and behind and nextn(behind).of(head.shapes):
            self.next_names = nextn(behind)
        unread = tuple(f"blk.{layer}." for layer in behind)
        used = [name for name in head.shapes if not name.startswith(unread)]
        self._name(family, head, used, family.config(head))

    def _open(self, header: GgufHeader, family: GgufFamily, tensors: Mapping[str, Placed]) -> GgufHead:
        """Take these tensors, and return their description."""
        self.path, self._tensors = header.path, dict(tensors)
        rope = {name: self._tensors.pop(name) for name in ROPE_TENSORS if name in self._tensors}
        self._scales: dict[str, float] = {}  # factor of a matrix, by its name in the file
        for name in [*self._tensors]:
            stem, _, end = name.rpartition(".")
            if end in ("scale", "input_scale") and self._is_scale(name, f"{stem}.weight"):
                tensor = self._tensors.pop(name)
                if end == "scale":  # input_scale is for quantized activations, which are not used here
                    self._scales[f"{stem}.weight"] = float(self._read(tensor, 0, 1))
        self._tensors = {name: tensor.as_matrix(name) for name, tensor in self._tensors.items()}
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        numbers: dict[str, tuple[float, ...]] = {
            name: tuple(self._read(one, 0, one.shape[0]).float().tolist()) for name, one in rope.items()
        }
        return GgufHead(family.architecture, header.metadata, shapes, numbers)

    def _name(self, family: GgufFamily, head: GgufHead, used: Iterable[str], config: ModelConfig) -> None:
        """Give the tensors that are used the decoder's names."""
        self.config = config
        shapes = {name: self._tensors[name].shape for name in used}
        self._sources = Sources(self.path, family.names(head), shapes, config)
        self.shapes = self._sources.shapes  # shapes by the decoder's names of tensors

    def dtype(self, name: str) -> torch.dtype | None:
        """The dtype of a tensor in the file; None if it is quantized."""
        return _PLAIN.get(self.kind(name))

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, on the CPU, in the file's dtype or float32."""
        return self._sources.read(name, self._read_scaled, start, stop)

    def _read_scaled(self, there: str, start: int, stop: int) -> Tensor:
        rows, scale = self._read(self._tensors[there], start, stop), self._scales.get(there)
        return rows if scale is None else rows.float() * scale

    def kind(self, name: str) -> str:
        """The type of a tensor in the file, by ggml's name."""
        return self._tensors[self._sources[name].name].kind.name

    def has_own_blocks(self, name: str) -> bool:
        """True if a matrix runs in the file's blocks, without rounding."""
        source = self._sources[name]
        return not (source.name in self._scales or source.transposed) and self.kind(name) in FILE_BLOCKS

    def block_form(self, name: str) -> BlockForm | None:
        """The layout of a matrix's blocks, or of those it is rounded to; None for floats."""
        if self.dtype(name) is not None:
            return None
        kind = self.kind(name)
        return FILE_BLOCKS[kind].form if self.has_own_blocks(name) else rounded_form(kind)

    def block_reader(self, name: str) -> Callable[[int, int], Tensor]:
        """A reader of rows of such a matrix for `block_rows`."""
        if self.has_own_blocks(name):
            return partial(self._sources.read, name, self._read_blocks)

        form = rounded_form(self.kind(name))

        def read(start: int, stop: int) -> Tensor:
            rows = rounded_rows(self.read_rows(name, start, stop).float(), form)
            check_rows(name, rows)
            return rows

        return read

    def stored(self, name: str) -> StoredRows | None:
        """The place of a matrix in the file; None if its elements are not those of rows of the file."""
        if name not in self._sources:
            return None
        source = self._sources[name]
        if source.transposed or source.name in self._scales:
            return None
        tensor = self._tensors[source.name]
        rows = range(tensor.shape[0]) if source.rows is None else source.rows
        return StoredRows(tensor.path, source.name, tensor.kind.name, tensor.offset, tensor.row_bytes, rows)

    def _read_blocks(self, there: str, start: int, stop: int) -> Tensor:
        kind = self._tensors[there].kind
        octets = torch.from_numpy(_octets(self._tensors[there], start, stop))
        rows = FILE_BLOCKS[kind.name].rows(octets.view(stop - start, -1, kind.block_bytes))
        check_rows(there, rows)
        return rows

    def _read(self, tensor: Placed, start: int, stop: int) -> Tensor:
        elements = elements_of(tensor.kind.name, _octets(tensor, start, stop))
        return elements.view(stop - start, *tensor.shape[1:])

    def _is_scale(self, name: str, matrix: str) -> bool:
        """True for a one-element tensor beside a matrix, as in NVFP4."""
        scale, beside = self._tensors[name], self._tensors.get(matrix)
        return (
            (scale.kind.name, scale.shape) == ("F32", (1,)) and beside is not None and len(beside.shape) == 2
        )


def elements_of(kind: str, octets: NDArray[np.uint8]) -> Tensor:
    """The elements in bytes of rows, in the file's dtype or float32; the last dimension grows or shrinks."""
    dtype = _PLAIN.get(kind)
    if dtype is not None:
        return torch.from_numpy(octets).view(dtype)
    # Imported late: a start with quantized matrices on disk does not need it.
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(octets, GGMLQuantizationType[kind]))


def _octets(tensor: Placed, start: int, stop: int) -> NDArray[np.uint8]:
    """The bytes of rows start..stop."""
    data = np.empty((stop - start) * tensor.row_bytes, dtype=np.uint8)
    read_exactly(tensor.path, tensor.offset + start * tensor.row_bytes, data.data)
    return data


def read_table(header: GgufHeader) -> dict[str, Placed]:
    """The tensors of complete files by name."""
    placed: dict[str, Placed] = {}
    for part in (header, *header.parts):
        path = part.path
        for tensor in part.tensors:
            shape = tensor.shape[::-1]
            if not 1 <= len(shape) <= 4 or min(shape) < 1 or tensor.name in placed:
                raise ModelFileError(
                    f"{path}: the entry of tensor {tensor.name!r} is damaged; get the file again"
                )
            kind = tensor_kind(path, tensor)
            # The usual kinds need no import of the package.
            if kind not in TENSOR_KINDS.values() and not _dequantizes(kind):
                raise ModelFileError(
                    f"{path}: tensor {tensor.name!r} is of type {kind.name}; supported: "
                    f"{' '.join(usual.name for usual in TENSOR_KINDS.values())}, and other kinds that the "
                    "gguf package dequantizes. Use another quantization of the model."
                )
            _, block, block_bytes = kind
            row = shape[-1] if len(shape) > 1 else 1
            if row % block:
                raise ModelFileError(
                    f"{path}: a row of tensor {tensor.name!r} has {row} elements, {kind.name} needs a "
                    f"multiple of {block}; the file is damaged, get it again"
                )
            row_bytes = row // block * block_bytes * math.prod(shape[1:-1])
            placed[tensor.name] = Placed(path, kind, shape, part.data_offset + tensor.offset, row_bytes)
    return placed


def _dequantizes(kind: TensorKind) -> bool:
    """True if the gguf package makes floats of such blocks."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        dequantize(np.zeros(kind.block_bytes, dtype=np.uint8), GGMLQuantizationType[kind.name])
    except NotImplementedError:
        return False
    return True
