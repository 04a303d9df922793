"""Quantized matrices on disk, so that a model is quantized once; its embeddings beside them.

One safetensors file per model, quantization and dtype of the embeddings. (To dequantize and cast those of a
large vocabulary would take half of every start.) It is written while the model is quantized, matrix by matrix
behind room for its header, and gets its name when whole. What it was made from stands in the header, and a
checksum of every tensor: a file of another model, version or length is not opened, and a damaged tensor is
found when it is read. Either way the file is made anew. Not being able to write one costs the next start
its time, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor

from specinfer.files import NewFile, cache_dir, read_exactly
from specinfer.hub.gguf_header import part_files
from specinfer.kernels.layout import Weight

_VERSION: Final = 3  # of what the numbers mean and how they lie; a file of another is made anew
_HEADER: Final = 1 << 20  # bytes before the first tensor; 80 layers need a tenth of that
_NAMES: Final = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
}
_LOG = logging.getLogger(__name__)


class DamagedCacheError(Exception):
    """A kept tensor is not the one that was written; the model must be quantized anew."""


def cache_path(model: Path, quantization: str, dtype: torch.dtype, folder: Path | None = None) -> Path:
    """Where a model's quantized matrices are kept: in `folder`, by default of the user's cache."""
    place = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:12]
    name = f"{model.stem}-{quantization}-{_NAMES[dtype].lower()}-{place}.safetensors"
    return (folder or cache_dir() / "quantized") / name


def identity(
    model: Path, quantization: str, dtype: torch.dtype, borrowed: Path | None = None
) -> dict[str, str]:
    """What a cache file was made from: names, sizes and times of the model's files, and how.

    `borrowed` is another model of which some tensors are.
    """
    states = [_state(path) for path in (model, *([] if borrowed is None else [borrowed]))]
    return {
        "made_by": f"specinfer quantization {_VERSION}",
        "quantization": quantization,
        "dtype": _NAMES[dtype],
        "model": json.dumps(states[0] if borrowed is None else states),
    }


def _state(model: Path) -> list[object]:
    files = part_files(model)
    if model.is_dir():
        files = [model / "config.json", *sorted(model.glob("*.safetensors"))]
    return [
        str(model.resolve()),
        *((file.name, (state := file.stat()).st_size, state.st_mtime_ns) for file in files),
    ]


class KeptMatrices:
    """The matrices of a cache file, by name."""

    def __init__(self, path: Path, entries: Mapping[str, Any], checksums: Mapping[str, int]) -> None:
        self._path = path
        self._entries = entries
        self._checksums = checksums

    @classmethod
    def open(cls, path: Path, wanted: Mapping[str, str]) -> Self | None:
        """The file at `path`, if it is whole and was made from what is `wanted`; else None."""
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if length == _HEADER else {}
                size = file.seek(0, os.SEEK_END)
            made_from: dict[str, str] = header.pop("__metadata__")
            checksums = json.loads(made_from.pop("checksums"))
            end = max(int(entry["data_offsets"][1]) for entry in header.values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # no such file, or no header of ours
        if made_from != wanted or size != 8 + _HEADER + end:
            return None
        return cls(path, header, checksums)

    def read(self, name: str, into: Weight) -> None:
        """Fill `into` with that matrix; raises DamagedCacheError unless it is what was written."""
        for field, tensor in zip(into._fields, into, strict=True):
            self._read(f"{name}.{field}", tensor)

    def _read(self, name: str, into: Tensor) -> None:
        try:
            entry = self._entries[name]
            begin, end = entry["data_offsets"]
            if (entry["dtype"], entry["shape"]) != (_NAMES[into.dtype], list(into.shape)):
                raise ValueError(f"it is {entry['dtype']} {entry['shape']}")
            if end - begin != into.nbytes:
                raise ValueError("its length is not that of its shape")
            read_exactly(self._path, 8 + _HEADER + begin, _bytes(into))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedCacheError(f"{self._path}: {name} cannot be read ({error})") from error
        if _checksum(name, into) != self._checksums.get(name):
            raise DamagedCacheError(f"{self._path}: {name} has a wrong checksum")


class NewMatrices:
    """A cache file in the making, which appears at `path` when `finish` is called.

    A context manager: a file that is not finished is removed.
    """

    def __init__(self, path: Path, made_from: Mapping[str, str]) -> None:
        self._path = path
        self._made_from = made_from
        self._entries: dict[str, Any] = {}
        self._checksums: dict[str, int] = {}
        self._end = 0
        self._file: NewFile | None = None

    def __enter__(self) -> Self:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = NewFile(self._path)
            self._file.seek(8 + _HEADER)
        except OSError as error:
            self._give_up(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.__exit__(kind, error, trace)
            self._file = None

    def write(self, name: str, weight: Weight) -> None:
        """Write a matrix down."""
        for field, tensor in zip(weight._fields, weight, strict=True):
            self._write(f"{name}.{field}", tensor)

    def finish(self) -> None:
        """Write the header, and give the file its name."""
        if self._file is None:
            return
        made_from = {**self._made_from, "checksums": json.dumps(self._checksums)}
        header = json.dumps({"__metadata__": made_from, **self._entries}).encode().ljust(_HEADER)
        try:
            if len(header) > _HEADER:
                raise OSError(f"its header would take {len(header)} bytes of {_HEADER}")
            self._file.seek(0)
            self._file.write(_HEADER.to_bytes(8, "little") + header)
            self._file.keep()
        except OSError as error:
            self._give_up(error)

    def _write(self, name: str, tensor: Tensor) -> None:
        if self._file is None:
            return
        data = _bytes(tensor)
        self._checksums[name] = _checksum(name, tensor)
        self._entries[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._end, self._end + len(data)],
        }
        self._end += len(data)
        try:
            self._file.write(data)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        _LOG.warning("the quantized model is not kept for the next start: %s", error)
        self.__exit__(None, None, None)


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in place."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _checksum(name: str, tensor: Tensor) -> int:
    """Of what a tensor is called, of what kind it is, and of its bytes."""
    kind = f"{name} {_NAMES[tensor.dtype]} {list(tensor.shape)}"
    return zlib.crc32(_bytes(tensor), zlib.crc32(kind.encode()))
