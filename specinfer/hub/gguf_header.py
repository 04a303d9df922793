"""GGUF header: the metadata and the tensor table, without the tensor data.

The `gguf` package's reader is too slow for large vocabularies. This one reads a quarter of a million
strings in a fraction of a second: lists of strings, most of a header, are decoded at first use. Format:
the GGUF specification, versions 2 and 3.

llama.cpp's gguf-split writes a model as parts, NAME-00001-of-00003.gguf and so on. The first part has the
metadata; each part has some of the tensors.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, overload

from specinfer.errors import ModelFileError, lack_of_memory
from specinfer.progress import format_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LENGTH = struct.Struct("<Q")
_PART: Final = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


class TensorKind(NamedTuple):
    """Storage format of a tensor's elements."""

    name: str
    block: int  # elements per block
    block_bytes: int


# Common types by ggml's number. The `gguf` package has all of them, but takes 0.1 s to import.
TENSOR_KINDS: Final = {
    0: TensorKind("F32", 1, 4),
    1: TensorKind("F16", 1, 2),
    30: TensorKind("BF16", 1, 2),
    2: TensorKind("Q4_0", 32, 18),
    3: TensorKind("Q4_1", 32, 20),
    6: TensorKind("Q5_0", 32, 22),
    7: TensorKind("Q5_1", 32, 24),
    8: TensorKind("Q8_0", 32, 34),
    10: TensorKind("Q2_K", 256, 84),
    11: TensorKind("Q3_K", 256, 110),
    12: TensorKind("Q4_K", 256, 144),
    13: TensorKind("Q5_K", 256, 176),
    14: TensorKind("Q6_K", 256, 210),
    20: TensorKind("IQ4_NL", 32, 18),
    23: TensorKind("IQ4_XS", 256, 136),
}


class Strings(Sequence[str]):
    """A list of strings, decoded at first use; equal raw bytes compare equal without decoding."""

    __slots__ = ("_count", "_decoded", "_raw")

    def __init__(self, raw: bytes, count: int) -> None:
        """`raw` holds exactly `count` strings, each after its length (8 bytes)."""
        self._raw = raw
        self._count = count
        self._decoded: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._all()[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Strings) and self._raw == other._raw:
            return True
        return isinstance(other, (Strings, list)) and self._all() == list(other)

    def _all(self) -> list[str]:
        if self._decoded is None:
            raw, end, decoded, length = self._raw, 0, list[str](), _LENGTH.unpack_from
            for _ in range(self._count):
                start = end + 8
                end = start + length(raw, end)[0]
                decoded.append(raw[start:end].decode("utf-8", "replace"))
            self._decoded = decoded
        return self._decoded


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]  # in the file's order: the fastest-varying dimension first
    ggml_type: int
    offset: int  # bytes from the start of the tensor data


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything in a GGUF file before the tensor data."""

    path: Path
    metadata: dict[str, Any]  # numbers, booleans, strings, lists of numbers and booleans, Strings
    tensors: tuple[TensorInfo, ...]
    data_offset: int  # bytes from the start of the file to the tensor data
    parts: tuple[GgufHeader, ...] = ()  # headers of a split model's other files


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file, without its tensor data.

    Raises ModelFileError if the file is not GGUF, has another version, or ends too early.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if not MAGIC.startswith(file.read(4)):
                raise ModelFileError(
                    f"{path} is not a GGUF file: it does not begin with 'GGUF'; give a .gguf file, or the "
                    "folder of a model"
                )
            if size < 24:
                raise ModelFileError(_cut_short(path, size))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
                return _parse(path, buffer)
    except OSError as error:
        if lack_of_memory(error):
            raise
        raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error


def check_complete(header: GgufHeader) -> None:
    """Raise ModelFileError if the file, or one of its parts, ends before its last tensor ends."""
    for part in (header, *header.parts):
        end = 0
        for tensor in part.tensors:
            _, block, block_bytes = tensor_kind(part.path, tensor)
            end = max(end, tensor.offset + math.prod(tensor.shape) // block * block_bytes)
        size = part.path.stat().st_size
        if size < part.data_offset + end:
            raise ModelFileError(
                f"{part.path} is cut short: {format_bytes(size)} of {format_bytes(part.data_offset + end)}; "
                "fetch it again"
            )


def tensor_kind(path: Path, tensor: TensorInfo) -> TensorKind:
    """Return the storage format of a tensor; raises ModelFileError if the format is unknown."""
    if (usual := TENSOR_KINDS.get(tensor.ggml_type)) is not None:
        return usual
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    if tensor.ggml_type not in GGML_QUANT_SIZES:
        raise ModelFileError(
            f"{path}: tensor {tensor.name} has the unknown type {tensor.ggml_type}; "
            "the file is damaged, or newer than the installed gguf package"
        )
    kind = GGMLQuantizationType(tensor.ggml_type)
    return TensorKind(kind.name, *GGML_QUANT_SIZES[kind])


def _cut_short(path: Path, size: int) -> str:
    return f"{path} is cut short or damaged: its header is longer than {format_bytes(size)}; fetch it again"


def _parse(path: Path, buffer: mmap.mmap) -> GgufHeader:
    cursor = _Cursor(buffer, 4)
    try:
        version = cursor.scalar("I")
        if version not in VERSIONS:
            raise ModelFileError(
                f"{path} is GGUF version {version}; allowed: versions {VERSIONS} in little-endian order. "
                "Convert it again with a current converter"
            )
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        tensors = tuple(cursor.tensor() for _ in range(num_tensors))
    except (struct.error, IndexError, KeyError) as error:
        raise ModelFileError(_cut_short(path, len(buffer))) from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelFileError(f"{path}: general.alignment is {alignment!r}; allowed: an integer >= 1")
    return GgufHeader(path, metadata, tensors, -(-cursor.position // alignment) * alignment)


class _Cursor:
    """A position in the header.

    Reads advance it; one past the end raises IndexError or struct.error, an unknown kind of value KeyError.
    """

    def __init__(self, buffer: mmap.mmap, position: int) -> None:
        self.buffer = buffer
        self.position = position

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        values = struct.unpack_from(form, self.buffer, self.position)
        self.position += struct.calcsize(form)
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> Strings:
        buffer, position, size, length = self.buffer, self.position, len(self.buffer), _LENGTH.unpack_from
        for _ in range(count):
            position += 8 + length(buffer, position)[0]
            if position > size:
                raise IndexError("past the end")
        raw = buffer[self.position : position]
        self.position = position
        return Strings(raw, count)

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        element, count = self.scalar("I"), self.scalar("Q")
        if element == _STRING:
            return self.strings(count)
        return list(self.scalars(_SCALARS[element], count))

    def tensor(self) -> TensorInfo:
        name = self.string()
        shape = self.scalars("Q", self.scalar("I"))
        return TensorInfo(name, shape, self.scalar("I"), self.scalar("Q"))


def part_names(name: str) -> list[str]:
    """Return the names of all parts of the split model that `name` is a part of.

    Returns [name] if the name is not a part's. Folders in front of the name are kept.
    """
    match = _PART.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def first_parts(names: Iterable[str]) -> list[str]:
    """Return one file per model, sorted: the first part of each split model, and all other files."""
    return sorted({part_names(name)[0] for name in names})


def part_files(path: Path) -> list[Path]:
    """Return the existing files of the model that this file is a part of, itself included."""
    return [file for name in part_names(path.name) if (file := path.with_name(name)).is_file()]


def read_gguf(path: Path) -> GgufHeader:
    """Read the header of a GGUF model from the path of any of its parts.

    Returns the first part's header, with the others in its `parts`. Raises ModelFileError like
    `read_header`, and if a part is missing or belongs to another model.
    """
    named = read_header(path)
    count = named.metadata.get("split.count", 1)
    if count in (0, 1):
        return named
    names = part_names(path.name)
    if len(names) != count:
        raise ModelFileError(
            f"{path} is one of {count} parts of a model, but its name has another form: name the parts "
            "NAME-00001-of-00002.gguf and so on, or merge them (llama-gguf-split --merge)"
        )
    missing = [name for name in names if not path.with_name(name).is_file()]
    if missing:
        raise ModelFileError(
            f"{path} is one of {count} parts of a model, but {missing[0]} "
            + (
                f"and {len(missing) - 1} more are missing; fetch them"
                if len(missing) > 1
                else "is missing; fetch it"
            )
        )
    parts = [named if path.name == name else read_header(path.with_name(name)) for name in names]
    for number, part in enumerate(parts):
        found = part.metadata.get("split.no"), part.metadata.get("split.count")
        if found != (number, count):
            raise ModelFileError(
                f"{part.path} has split.no {found[0]} and split.count {found[1]}, expected {number} and "
                f"{count}; fetch the model again"
            )
    return replace(parts[0], parts=tuple(parts[1:]))
