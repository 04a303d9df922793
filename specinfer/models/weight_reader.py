"""WeightReader: reads a model's tensors into given memory, with conversion of rows and precision.

    file --rows--> float --cast or quantize--> the given memory

Rows are read, dequantized and cast in pieces, directly into their destination. Quantized matrices are made of
such pieces, too, or read from a prepared file (prepared.py).
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Final, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.errors import ModelError, ModelFileError
from specinfer.hub.model_files import files_of
from specinfer.kernels.file_blocks import (
    BlockForm,
    StoredRows,
    block_elements,
    lay_out_blocks,
    one_form,
    read_stored,
)
from specinfer.kernels.layout import (
    BlocksWeight,
    FloatTable,
    FloatWeight,
    Int4Weight,
    Weight,
    lay_out_floats,
    lay_out_int4,
    quantize_int4,
    quantize_int8,
)
from specinfer.kernels.library import Library
from specinfer.kernels.recurrence_config import GATES
from specinfer.kernels.structures import BLOCK, FILE_KINDS, FLOAT_KINDS
from specinfer.models.gguf import GGUFFile, elements_of
from specinfer.models.hosted.folder import HostedFolder
from specinfer.models.prepared import NewPreparedFile, PreparedFile
from specinfer.models.safetensors import SafetensorsFolder
from specinfer.models.shared_sums import TableOnDisk
from specinfer.progress import Progress
from specinfer.speculation_config import Quantization

# Elements dequantized at a time. They use arrays of 0.5 MB, which stay in the CPU's cache even on a busy
# machine. Time per element (Q4_K): 10 ns with 0.5 MB and 16 ns with 1 MB on a busy machine; 1.3 ns with
# 0.5 MB and 6.8 ns with 8 MB on an idle one.
_CHUNK_ELEMENTS: Final = 1 << 17
READERS: Final = 2  # threads that read a tensor, or prepared layers
_SERIAL: Final = 1 << 14
# Tensors of routers, which are always float32.
ROUTERS: Final = ("mlp.gate.weight", "mlp.gate.bias", "mlp.shared_expert_gate.weight")
# Matrices that are always float32.
FLOAT32: Final = (*ROUTERS, *(f"mixer.{name}.weight" for name in (*GATES, "conv")))
_Reader = Callable[[int, int], Tensor]  # start row, end row -> rows


class TensorFile(Protocol):
    """The tensors of a model, of a head, or of parts of another file, by name."""

    path: Path

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor."""

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, on the CPU, in any floating dtype."""


def blocks_file(file: TensorFile) -> GGUFFile:
    """Return the file if it is a GGUFFile; raises ModelError if it has another format."""
    if not isinstance(file, GGUFFile):
        raise ModelError(
            f"quantization 'gguf' requires a GGUF file, and {file.path.name} is not one; "
            "use quantization none, int8 or int4"
        )
    return file


def table_in_file(file: TensorFile, quantization: Quantization, name: str) -> StoredRows | None:
    """The place of an embedding table that stays in its GGUF file; None for other tables."""
    stored = blocks_file(file).stored(name) if quantization == "gguf" else None
    return stored if stored is not None and isinstance(stored.rows, range) else None


def file_bytes(file: TensorFile, names: Iterable[str]) -> int:
    """The part of a model's files that these tensors take, about, in bytes."""
    elements = sum(math.prod(file.shapes[name]) for name in names)
    return round(elements * _bytes_per_element(file))


def _bytes_per_element(file: TensorFile) -> float:
    size = sum(path.stat().st_size for path in files_of(file.path) if path.is_file())
    return size / max(1, sum(map(math.prod, file.shapes.values())))


class WeightReader:
    """Fills memory with tensors of a file.

    A context manager, which ends its threads.
    """

    def __init__(
        self,
        file: TensorFile,
        dtype: torch.dtype,
        progress: Progress,
        quantization: Quantization = "none",
        kept: PreparedFile | NewPreparedFile | None = None,
        library: Library | None = None,
    ) -> None:
        """`dtype` is that of activations; matrices are read from or written to `kept`, if given.

        The `library` reads and converts blocks; None: PyTorch does.
        """
        self.dtype = dtype
        self.quantization = quantization
        self._file = file
        self._shapes = file.shapes
        self._kept = kept
        self._library = library
        self._progress = progress
        self._counted: set[str] = set()  # tensors reported to `progress`
        self._per_element = _bytes_per_element(file)
        self._elements = self._reported = 0
        self._counting = Lock()
        # Reading a GGUF file is mostly arithmetic in NumPy, which releases the GIL.
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="weights")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    @property
    def keeps(self) -> bool:
        """True if matrices are read from or written to a prepared file, of any kind."""
        return self._kept is not None

    @property
    def one_thread_each(self) -> bool:
        """True if one thread reads a tensor, so that calls from several threads run in parallel."""
        return isinstance(self._kept, PreparedFile)

    def shape(self, names: Sequence[str]) -> tuple[int, ...]:
        """The shape of these tensors, stacked along the first dimension."""
        return (sum(self._shapes[name][0] for name in names), *self._shapes[names[0]][1:])

    def read(self, names: Sequence[str], into: Weight) -> None:
        """Fill `into` with these tensors, stacked; its type is the precision.

        A FloatTable may be on any device, the others are on the CPU. Raises DamagedFileError if a prepared
        matrix does not match its checksum, and ModelFileError if a router's tensor has a value that is not
        finite.
        """
        key = "+".join(names)
        fresh = key not in self._counted
        self._counted.add(key)
        kept = self._kept if len(self._shapes[names[0]]) > 1 else None  # vectors are not kept
        if isinstance(kept, PreparedFile):
            kept.read(key, into)
            self._count(math.prod(self.shape(names)), fresh)
            return
        self._make(names, into, fresh)
        if kept is not None:
            kept.write(key, into)

    def mark_read(self, names: Sequence[str]) -> None:
        """Report tensors that are in memory already."""
        key = "+".join(names)
        fresh = key not in self._counted
        self._counted.add(key)
        self._count(math.prod(self.shape(names)), fresh)

    def block_form(self, names: Sequence[str]) -> BlockForm | None:
        """The layout of these matrices as one of GGUF blocks; None for floats, which a single one decides.

        Raises ModelError for other files.
        """
        forms = [blocks_file(self._file).block_form(name) for name in names]
        return None if None in forms else one_form([form for form in forms if form is not None])

    def is_float(self, names: Sequence[str]) -> bool:
        """True if these matrices, stacked, stay floats."""
        if self.quantization == "gguf":
            return self.block_form(names) is None
        return self.quantization == "none"

    def table_on_disk(self, name: str) -> TableOnDisk | None:
        """The embeddings of a model in its file's blocks, which stay there; None for other tables."""
        stored = None if self.keeps else table_in_file(self._file, self.quantization, name)
        return None if stored is None else self._table_on_disk(name, stored)

    def rows_on_disk(self, name: str) -> TableOnDisk | None:
        """A table that stays in its file for any quantization; None if its rows are not there."""
        stored = self._file.stored(name) if isinstance(self._file, GGUFFile | SafetensorsFolder) else None
        if stored is None or not isinstance(stored.rows, range):
            return None
        return self._table_on_disk(name, stored)

    def _table_on_disk(self, name: str, stored: StoredRows) -> TableOnDisk:
        self.mark_read([name])
        inner = self._shapes[name][1]

        def decode(octets_NB: NDArray[np.uint8]) -> Tensor:
            if self._library is None or stored.kind not in FILE_KINDS:
                return elements_of(stored.kind, octets_NB).to(self.dtype)
            return block_elements(self._library, stored.kind, octets_NB, inner, self.dtype)

        return TableOnDisk(stored.path, stored.offset, len(stored.rows), stored.row_bytes, decode)

    def _make(self, names: Sequence[str], into: Weight, fresh: bool) -> None:
        """Fill `into` with tensors of the file; raises ModelFileError if a router is not finite."""
        if isinstance(into, FloatTable | FloatWeight):
            if isinstance(into, FloatTable):
                matrix = into.rows
            else:
                matrix = torch.empty(self.shape(names), dtype=into.values.dtype)
            self._read_floats(names, matrix, fresh)
            if names[0].endswith(ROUTERS):
                self._check_finite(names, matrix)
            if isinstance(into, FloatWeight):
                lay_out_floats(matrix, into)
            return
        inner = self._shapes[names[0]][1]
        if (
            self._library is not None
            and (stored := self._stored(names, into))
            and read_stored(self._library, stored, inner, into, lambda read: self._count(read, fresh))
        ):
            return
        make, readers = self._makers(names, into)
        done = 0
        for part in self._parts(names, readers):
            found = make(part)
            for here, tensor in zip(into, found, strict=True):
                here[done : done + len(tensor)] = tensor
            done += len(found[0])
            self._count(len(part) * inner, fresh)

    def _makers(
        self, names: Sequence[str], into: Weight
    ) -> tuple[Callable[[Tensor], Weight], Sequence[_Reader]]:
        """A converter of whole blocks of rows to that kind of weight, and a reader of rows per matrix."""
        if isinstance(into, BlocksWeight):
            file, form = blocks_file(self._file), self.block_form(names)
            assert form is not None, "floats are no blocks"
            return partial(lay_out_blocks, form=form), [file.block_reader(name) for name in names]
        floats = [partial(self._read_floats_of, name) for name in names]
        if not isinstance(into, Int4Weight):
            return quantize_int8, floats
        packed = self._packed(names)
        return (quantize_int4, floats) if packed is None else (lay_out_int4, packed)

    def _stored(self, names: Sequence[str], into: Weight) -> list[StoredRows]:
        """The places of these matrices in a file; empty unless the library can read all of them."""
        file = self._file
        if not isinstance(file, GGUFFile | SafetensorsFolder | HostedFolder):
            return []
        kinds = FILE_KINDS if isinstance(into, BlocksWeight) else FILE_KINDS | FLOAT_KINDS
        found = [stored for name in names if (stored := file.stored(name)) and stored.kind in kinds]
        return found if len(found) == len(names) else []

    def _packed(self, names: Sequence[str]) -> list[_Reader] | None:
        """Readers of these matrices as int4 weights; None unless all are int4."""
        if not isinstance(self._file, SafetensorsFolder):
            return None
        readers = [reader for name in names if (reader := self._file.int4_reader(name)) is not None]
        return readers if len(readers) == len(names) else None

    def _check_finite(self, names: Sequence[str], stacked: Tensor) -> None:
        """Raise ModelFileError for the first of these tensors with a value that is not finite."""
        first = 0
        for name in names:
            rows = stacked[first : first + self._shapes[name][0]]
            first += len(rows)
            if not bool(rows.isfinite().all()):
                raise ModelFileError(
                    f"{self._file.path}: tensor {name!r} of a router holds values that are not finite; "
                    "get the model again"
                )

    def _read_floats_of(self, name: str, start: int, stop: int) -> Tensor:
        return self._file.read_rows(name, start, stop).float()

    def _read_floats(self, names: Sequence[str], into: Tensor, fresh: bool) -> None:
        pieces: list[tuple[str, int, int, Tensor]] = []
        first = 0
        for name in names:
            rows, *rest = self._shapes[name]
            step = max(1, _CHUNK_ELEMENTS // math.prod(rest))
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                pieces.append((name, start, stop, into[first + start : first + stop]))
            first += rows

        def read(piece: tuple[str, int, int, Tensor]) -> int:
            name, start, stop, there = piece
            _cast(self._file.read_rows(name, start, stop), there)
            return there.numel()

        # The calling thread reads a single piece, such as a norm.
        for elements in self._threads.map(read, pieces) if len(pieces) > 1 else map(read, pieces):
            self._count(elements, fresh)

    def _parts(self, names: Sequence[str], readers: Sequence[_Reader]) -> Iterator[Tensor]:
        """The rows of stacked matrices in parts: whole blocks, then the remaining rows."""
        inner = self._shapes[names[0]][1]
        step = max(1, _CHUNK_ELEMENTS // inner // BLOCK) * BLOCK
        rest = torch.empty(0)
        for name, read in zip(names, readers, strict=True):
            rows = self._shapes[name][0]
            for start in range(0, rows, step):
                part = read(start, min(start + step, rows))
                if len(rest):
                    part = torch.cat([rest, part])
                whole = len(part) // BLOCK * BLOCK
                if whole:
                    yield part[:whole]
                rest = part[whole:]
        if len(rest):
            yield rest

    def _count(self, elements: int, fresh: bool) -> None:
        """Report elements that were read, unless counted before in another precision."""
        if fresh:
            with self._counting:
                self._elements += elements
                before, self._reported = self._reported, round(self._elements * self._per_element)
                self._progress.advance(self._reported - before)


def chosen_rows(tensor: Tensor, ids: Sequence[int]) -> Tensor:
    """Those rows of a tensor; a prefix is returned as a view."""
    if all(map(operator.eq, ids, range(len(ids)))):
        return tensor[: len(ids)]
    return tensor[torch.tensor(ids, device=tensor.device)]


def _cast(source: Tensor, into: Tensor) -> None:
    if into.device.type != "cpu":
        into.copy_(source)
        return
    # The calling thread casts these small pieces. torch would divide larger ones between its threads, and
    # synchronizing them a thousand times took 50 s of a 64 s load on a busy machine.
    flat, out = source.reshape(-1), into.view(-1)
    for start in range(0, len(flat), _SERIAL):
        out[start : start + _SERIAL].copy_(flat[start : start + _SERIAL])
