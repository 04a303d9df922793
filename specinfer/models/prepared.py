"""Prepared files: a model's matrices on disk in the layout of its products, made once and read in place.

There is one safetensors file per model, kind and dtype of activations. (Quantizing a large model takes
minutes, and dequantizing and casting the embeddings of a large vocabulary takes half of every start.) Its
unit is a record, for example the matrices of a layer in order of use, so that one read of whole pages loads
all of them.

    header                 2^20 bytes or more, so that records start and end at pages
    model.embed_tokens     a record; its tensors are aligned to 64 bytes
    lm_head
    model.layers.0         tensors named padding.N fill the gaps
    model.layers.0.mlp.experts.0    one expert of a mixture, which may be read alone

The header identifies the source of the file, and has checksums of itself, of every record and of every
tensor. So a file of another model, version or length is not opened, and damage is detected when it is read.
In both cases the file is made again.
"""

import glob
import hashlib
import json
import logging
import os
import re
import shutil
import zlib
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor

from specinfer.errors import DamagedFileError, ModelFileError
from specinfer.files import NewFile, cache_dir, locked, read_by_pieces
from specinfer.hub.model_files import files_of
from specinfer.kernels.disk import StreamSource, aligned
from specinfer.kernels.layout import Int4Weight, Weight
from specinfer.models.safetensors import DTYPE_NAMES, DTYPES
from specinfer.models.stream import StreamRecord

_VERSION: Final = 5  # version of the numbers and their layout; files of other versions are made again
_PAGE: Final = 4096  # alignment of records, for readers that bypass the page cache
_LINE: Final = 64  # alignment of tensors
_PIECE: Final = 1 << 20  # bytes per read
_HEADER: Final = 1 << 20  # minimum bytes before the first record
_MAX_HEADER: Final = 1 << 28
_UNKNOWN: Final = b'"header":"00000000"'  # a header before its own checksum is known
_KNOWN: Final = re.compile(rb'"header":"([0-9a-f]{8})"')
_LAYER: Final = re.compile(r"(.*?\blayers\.\d+(?:\.mlp\.experts\.\d+)?)\.")
_LOG: Final = logging.getLogger(__name__)


class TensorPlace(NamedTuple):
    """The place of a tensor in its record."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class Record(NamedTuple):
    """Matrices that are read together."""

    offset: int  # in the file; this and the length are multiples of a page
    length: int
    crc: int  # checksum of all its bytes
    tensors: Mapping[str, TensorPlace]  # in order, without padding


def prepared_path(model: Path, kind: str, dtype: torch.dtype, folder: Path | None = None) -> Path:
    """The path of a model's prepared file: in `folder`, by default in the user's cache."""
    place = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:12]
    name = f"{model.name.removesuffix('.gguf')}-{kind}-{DTYPE_NAMES[dtype].lower()}-{place}.safetensors"
    return (folder or cache_dir() / "prepared") / name


def identity(model: Path, kind: str, dtype: torch.dtype, borrowed: Path | None = None) -> dict[str, str]:
    """The source of a prepared file: names, sizes and times of the model's files, and the kind.

    `borrowed` is another model that provides some of the tensors.
    """
    states = [_state(path) for path in (model, *([] if borrowed is None else [borrowed]))]
    return {
        "made_by": f"specinfer prepared {_VERSION}",
        "kind": kind,
        "dtype": DTYPE_NAMES[dtype],
        "model": json.dumps(states[0] if borrowed is None else states),
    }


def _state(model: Path) -> list[object]:
    return [
        str(model.resolve()),
        *((file.name, (state := file.stat()).st_size, state.st_mtime_ns) for file in files_of(model)),
    ]


class PreparedFile:
    """An open prepared file: the places of its tensors, without their values."""

    def __init__(
        self,
        path: Path,
        records: Mapping[str, Record],
        checksums: Mapping[str, int],
        largest: Mapping[str, float],
    ) -> None:
        self.path = path
        self.records = records  # by name, in order
        self.largest = largest  # largest scale of each int4 matrix
        self._checksums = checksums
        self._record_of = {tensor: record for record in records.values() for tensor in record.tensors}

    @classmethod
    def open(cls, path: Path, wanted: Mapping[str, str]) -> Self | None:
        """The file at `path`, if it is complete and was made from the `wanted` source; else None."""
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                text = file.read(length) if length < _MAX_HEADER else b""
                size = file.seek(0, os.SEEK_END)
            entries = json.loads(_verified(text))
            made_from: dict[str, str] = entries.pop("__metadata__")
            del made_from["header"]
            ours = [json.loads(made_from.pop(name)) for name in ("records", "checksums", "largest")]
        except (OSError, ValueError, KeyError):
            return None  # no such file, or not a prepared file
        records, checksums, largest = ours
        if made_from != wanted or size != max(offset + length for offset, length, _ in records.values()):
            return None
        entries = {name: entry for name, entry in entries.items() if name in checksums}
        return cls(path, _with_tensors(records, entries, 8 + length), checksums, largest)

    def stream_records(self, names: Sequence[str]) -> list[StreamRecord]:
        """These records, for a stream."""
        records = [(self.records[name], name) for name in names]
        return [StreamRecord(record.offset, record.length, record.crc, name) for record, name in records]

    def read(self, name: str, into: Weight) -> None:
        """Fill `into` with that matrix; raises DamagedFileError if its checksum does not match."""
        for field, tensor in zip(into._fields, into, strict=True):
            self._read(f"{name}.{field}", tensor)

    def check(self, record: Record) -> None:
        """Read a record, bypassing the page cache; raises DamagedFileError as `read`."""
        piece, crc = aligned(min(_PIECE, record.length)), 0
        try:
            source = StreamSource(self.path)
            for begin in range(0, record.length, _PIECE):
                part = memoryview(piece)[: record.length - begin]
                source.read_into(part, record.offset + begin)
                crc = zlib.crc32(part, crc)
        except ModelFileError as error:
            raise DamagedFileError(f"{self.path} cannot be read ({error})") from error
        if crc != record.crc:
            raise DamagedFileError(f"{self.path}: a record has a wrong checksum; the disk may be failing")

    def _read(self, name: str, into: Tensor) -> None:
        try:
            record = self._record_of[name]
            dtype, shape, offset = record.tensors[name]
            if (dtype, shape) != (into.dtype, tuple(into.shape)):
                raise ValueError(f"it is {dtype} {list(shape)}")
            read_by_pieces(self.path, record.offset + offset, _bytes(into))
        except (OSError, ValueError, KeyError) as error:
            raise DamagedFileError(f"{self.path}: {name} cannot be read ({error})") from error
        if _checksum(name, into) != self._checksums[name]:
            raise DamagedFileError(f"{self.path}: {name} has a wrong checksum; the disk may be failing")


class NewPreparedFile:
    """A prepared file being written, which appears at its path after `finish`.

    A context manager, which removes an unfinished file. If it cannot be written, `failed` is called; if that
    returns, everything else continues without the file.
    """

    def __init__(
        self,
        path: Path,
        made_from: Mapping[str, str],
        tensors: Collection[str],
        size: int,
        failed: Callable[[OSError], None],
    ) -> None:
        """`tensors` are a model's tensors, whose matrices take at most `size` bytes."""
        self._path = path
        self._made_from = made_from
        self._failed = failed
        self._header_bytes = _header_size(tensors)
        self._needed = size + self._header_bytes + 2 * _PAGE * len(tensors)
        self._end = self._header_bytes
        self._record, self._start, self._crc = "", 0, 0  # the current record
        self._records: dict[str, tuple[int, int, int]] = {}  # complete records: offset, length, checksum
        self._entries: dict[str, Any] = {}
        self._checksums: dict[str, int] = {}
        self._largest: dict[str, float] = {}
        self._file: NewFile | None = None
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="checksums")

    def __enter__(self) -> Self:
        folder = self._path.parent
        try:
            if (free := shutil.disk_usage(folder).free) < self._needed:
                raise OSError(
                    f"the prepared model may need {self._needed / 1e9:.2f} GB, "
                    f"{folder} has {free / 1e9:.2f} GB free"
                )
            self._file = NewFile(self._path)
            self._file.seek(self._header_bytes)
        except OSError as error:
            self._give_up(error)
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()
        if self._file is not None:
            self._file.__exit__(*error)
            self._file = None

    def write(self, name: str, weight: Weight) -> None:
        """Append a matrix."""
        if self._file is None:
            return
        try:
            record = self._record_for(name)
            if record != self._record:
                self._end_record()
                self._record, self._start, self._crc = record, self._end, 0
            for field, tensor in zip(weight._fields, weight, strict=True):
                self._pad(_LINE)
                own = f"{name}.{field}"
                checksum = self._threads.submit(_checksum, own, tensor)
                self._append(own, DTYPE_NAMES[tensor.dtype], tensor.shape, _bytes(tensor))
                self._checksums[own] = checksum.result()
        except OSError as error:
            self._give_up(error)
        if isinstance(weight, Int4Weight):
            self._largest[name] = float(weight.scales.max())

    def finish(self) -> None:
        """Write the header, and give the file its name."""
        if self._file is None:
            return
        try:
            self._end_record()
            self._file.seek(0)
            self._file.write((self._header_bytes - 8).to_bytes(8, "little") + self._header())
            self._file.keep()
        except OSError as error:
            self._give_up(error)

    def _header(self) -> bytes:
        made_from = {
            "header": "00000000",
            **self._made_from,
            "records": json.dumps(self._records),
            "checksums": json.dumps(self._checksums),
            "largest": json.dumps(self._largest),
        }
        text = json.dumps({"__metadata__": made_from, **self._entries}, separators=(",", ":")).encode()
        if len(text) > self._header_bytes - 8:
            raise OSError(f"its header would take {len(text)} bytes of {self._header_bytes - 8}")
        text = text.ljust(self._header_bytes - 8)
        return text.replace(_UNKNOWN, f'"header":"{zlib.crc32(text):08x}"'.encode(), 1)

    def _record_for(self, matrix: str) -> str:
        """The record of a matrix: its layer's, its expert's, or a separate one."""
        names = matrix.split("+")
        layer, *others = {found[1] if (found := _LAYER.match(name)) else "" for name in names}
        if layer and not others and layer not in self._records:
            return layer
        taken = {*self._records, self._record}
        own = names[0].removesuffix(".weight")
        choices = (own, "lm_head", f"{own}.{len(taken)}")  # lm_head: if the table is used for embeddings, too
        return next(choice for choice in choices if choice not in taken)

    def _end_record(self) -> None:
        if self._record:
            self._pad(_PAGE)
            self._records[self._record] = (self._start, self._end - self._start, self._crc)

    def _pad(self, to: int) -> None:
        if missing := -self._end % to:
            self._append(f"padding.{len(self._entries)}", "U8", (missing,), memoryview(bytes(missing)))

    def _append(self, name: str, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        """Append a tensor to the file."""
        assert self._file is not None
        checksum = self._threads.submit(zlib.crc32, data, self._crc)
        self._file.write(data)
        self._crc = checksum.result()
        begin, self._end = self._end, self._end + len(data)
        self._entries[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [begin - self._header_bytes, self._end - self._header_bytes],
        }

    def _give_up(self, error: OSError) -> None:
        self.__exit__(None, None, None)
        self._failed(error)


@contextmanager
def prepare_once(
    path: Path,
    made_from: Mapping[str, str],
    tensors: Collection[str],
    size: int,
    failed: Callable[[OSError], None],
) -> Iterator[PreparedFile | NewPreparedFile]:
    """The existing file, if another process has made it, or a NewPreparedFile.

    One process at a time is in this block; others wait and log it.
    """
    new = NewPreparedFile(path, made_from, tensors, size, failed)
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.with_name(f"{path.name}.lock")
            stack.enter_context(
                locked(lock, lambda: _LOG.warning("waiting for another process to make %s", path))
            )
        except OSError as error:
            failed(error)
        else:
            for remains in path.parent.glob(f"{glob.escape(path.name)}.*.partial"):
                with suppress(OSError):
                    remains.unlink()  # left by a killed process, since this process holds the lock
            if (kept := PreparedFile.open(path, made_from)) is not None:
                yield kept
                return
            stack.enter_context(new)
        yield new


def _header_size(tensors: Collection[str]) -> int:
    """Bytes before the first record, including the eight of the header's length."""
    # A matrix has at most three tensors, each with an entry, a checksum and a gap after it.
    needed = (1 << 17) + sum(6 * len(name) + 1000 for name in tensors)
    return max(_HEADER, -(-needed // _PAGE) * _PAGE)


def _verified(header: bytes) -> bytes:
    """Check a header's checksum; raises ValueError if it does not match."""
    found = _KNOWN.search(header)
    if found is None or zlib.crc32(header.replace(found[0], _UNKNOWN, 1)) != int(found[1], 16):
        raise ValueError("the header is damaged")
    return header


def _with_tensors(
    records: Mapping[str, tuple[int, int, int]], entries: Mapping[str, Any], start: int
) -> dict[str, Record]:
    """Records of offset, length and checksum, with their tensors, whose entries count from `start`."""
    found: list[dict[str, TensorPlace]] = [{} for _ in records]
    offsets = [offset for offset, _, _ in records.values()]
    for name, entry in entries.items():
        begin = start + entry["data_offsets"][0]
        number = bisect(offsets, begin) - 1
        place = TensorPlace(DTYPES[entry["dtype"]], tuple(entry["shape"]), begin - offsets[number])
        found[number][name] = place
    return {
        name: Record(*numbers, tensors)
        for (name, numbers), tensors in zip(records.items(), found, strict=True)
    }


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in place."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _checksum(name: str, tensor: Tensor) -> int:
    """A checksum of a tensor's name, dtype, shape and bytes."""
    kind = f"{name} {DTYPE_NAMES[tensor.dtype]} {list(tensor.shape)}"
    return zlib.crc32(_bytes(tensor), zlib.crc32(kind.encode()))
