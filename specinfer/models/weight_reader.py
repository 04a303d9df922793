"""Reading a model's tensors into memory that somebody else owns: which tensors, which rows, which precision.

    file --rows--> float --cast or quantize--> the memory it was given

Rows are read, dequantized and cast in pieces, straight into the memory that is to be filled. Quantized
matrices are made of such pieces, too, or read as they were kept (prepared.py).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Final, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from specinfer.errors import ModelError
from specinfer.kernels.file_blocks import BlockForm, empty_blocks, lay_out_blocks, one_form
from specinfer.kernels.layout import (
    BlocksWeight,
    FloatTable,
    FloatWeight,
    Int4Weight,
    Int8Weight,
    Weight,
    choose_rows,
    empty_floats,
    empty_int8,
    lay_out_floats,
    lay_out_int4,
)
from specinfer.kernels.quantized import quantize_int4, quantize_int8
from specinfer.kernels.structures import BLOCK
from specinfer.models.prepared import NewPreparedFile, PreparedFile
from specinfer.progress import Progress
from specinfer.speculation_config import Quantization

# Elements dequantized at a time. They pass through arrays of 0.5 MB that stay in the CPU's cache even where
# others use it: 10 ns an element on a busy machine, 16 with 1 MB; in quiet 1.3, 6.8 with 8 MB (Q4_K).
_CHUNK_ELEMENTS: Final = 1 << 17
READERS: Final = 2  # threads that read a tensor, or layers that were kept
_SERIAL: Final = 1 << 14
_Reader = Callable[[int, int], Tensor]  # of rows from one to another


class TensorFile(Protocol):
    """Tensors on disk, by name: a model's, a head's, or slices of another file's."""

    path: Path

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor."""
        ...

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a tensor, on the CPU, in any floating dtype."""
        ...


@runtime_checkable
class PackedFile(Protocol):
    """A TensorFile some of whose matrices may have the numbers of int4 weights."""

    def int4_reader(self, name: str) -> Callable[[int, int], Tensor] | None:
        """What reads rows of a matrix as `int4_rows` has them, with nothing rounded; None: it is another."""
        ...


@runtime_checkable
class BlocksFile(Protocol):
    """A TensorFile whose matrices are GGUF blocks that run as they are."""

    def block_form(self, name: str) -> BlockForm:
        """How a matrix's blocks lie in memory; raises ModelError where they do not run."""
        ...

    def block_reader(self, name: str) -> Callable[[int, int], Tensor]:
        """What reads rows of such a matrix as `block_rows` has them."""
        ...


def blocks_file(file: TensorFile) -> BlocksFile:
    """A file whose matrices are GGUF blocks; raises ModelError where they are not."""
    if not isinstance(file, BlocksFile):
        raise ModelError(
            f"quantization 'gguf' runs the blocks of a GGUF file as they are, and {file.path.name} is none; "
            "use quantization none, int8 or int4"
        )
    return file


class WeightReader:
    """Fills memory with tensors of a file; it knows nothing of where that memory is.

    A context manager: its threads end with it.
    """

    def __init__(
        self,
        file: TensorFile,
        dtype: torch.dtype,
        progress: Progress,
        quantization: Quantization = "none",
        kept: PreparedFile | NewPreparedFile | None = None,
    ) -> None:
        """`dtype` is that of activations; matrices come from `kept` or go there, where there is one."""
        self.dtype = dtype
        self.quantization = quantization
        self._file = file
        self._shapes = file.shapes
        self._kept = kept
        self._progress = progress
        self._counted: set[str] = set()  # what `progress` has seen
        self._counting = Lock()
        # Of a GGUF most of the time goes into arithmetic in NumPy, which leaves the other threads alone.
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="weights")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    @property
    def keeps(self) -> bool:
        """Whether matrices are read or written as products read them, whatever their kind."""
        return self._kept is not None

    @property
    def one_thread_each(self) -> bool:
        """Whether one thread reads a tensor, so that several are read at once by calling from several."""
        return isinstance(self._kept, PreparedFile)

    def shape(self, names: Sequence[str]) -> tuple[int, ...]:
        """The shape of these tensors, stacked along the first dimension."""
        return (sum(self._shapes[name][0] for name in names), *self._shapes[names[0]][1:])

    def read(self, names: Sequence[str], into: Weight, rows: Sequence[int] | None = None) -> None:
        """Fill `into` with these tensors, stacked, or with some `rows` of the stack, in their order.

        The kind of `into` is the precision; rows are chosen of FloatWeights, Int8Weights and BlocksWeights. A
        FloatTable is of any device, the others are on the CPU. Raises DamagedFileError where a matrix that
        was kept is not what was written.
        """
        if rows is not None:
            whole = self._whole(names, into)
            self.read(names, whole)
            choose_rows(whole, rows, into)
            return
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

    def found(self, names: Sequence[str]) -> None:
        """Tell of tensors that are there already."""
        key = "+".join(names)
        fresh = key not in self._counted
        self._counted.add(key)
        self._count(math.prod(self.shape(names)), fresh)

    def block_form(self, names: Sequence[str]) -> BlockForm:
        """How these matrices lie in memory as one of GGUF blocks; raises ModelError where that cannot be."""
        return one_form([blocks_file(self._file).block_form(name) for name in names])

    def _whole(self, names: Sequence[str], like: Weight) -> FloatWeight | Int8Weight | BlocksWeight:
        """Memory for all rows of these tensors."""
        channels, inner = self.shape(names)
        if isinstance(like, BlocksWeight):
            return empty_blocks(channels, inner, self.block_form(names))
        if isinstance(like, FloatWeight):
            return empty_floats(channels, inner, like.values.dtype)
        return empty_int8(channels, inner)

    def _make(self, names: Sequence[str], into: Weight, fresh: bool) -> None:
        """Fill `into` with tensors of the file."""
        if isinstance(into, FloatTable):
            self._read_floats(names, into.rows, fresh)
            return
        if isinstance(into, FloatWeight):
            matrix = torch.empty(self.shape(names), dtype=into.values.dtype)
            self._read_floats(names, matrix, fresh)
            lay_out_floats(matrix, into)
            return
        make, readers = self._makers(names, into)
        done, inner = 0, self._shapes[names[0]][1]
        for part in self._parts(names, readers):
            found = make(part)
            for here, tensor in zip(into, found, strict=True):
                here[done : done + len(tensor)] = tensor
            done += len(found[0])
            self._count(len(part) * inner, fresh)

    def _makers(
        self, names: Sequence[str], into: Weight
    ) -> tuple[Callable[[Tensor], Weight], Sequence[_Reader]]:
        """What makes whole blocks of rows into weights of that kind, and what reads rows of each matrix."""
        if isinstance(into, BlocksWeight):
            file = blocks_file(self._file)
            make = partial(lay_out_blocks, form=self.block_form(names))
            return make, [file.block_reader(name) for name in names]
        floats = [partial(self._read_floats_of, name) for name in names]
        if not isinstance(into, Int4Weight):
            return quantize_int8, floats
        packed = self._packed(names)
        return (quantize_int4, floats) if packed is None else (lay_out_int4, packed)

    def _packed(self, names: Sequence[str]) -> list[_Reader] | None:
        """What reads each of these matrices as int4 weights; None unless all of them have such numbers."""
        if not isinstance(self._file, PackedFile):
            return None
        readers = [reader for name in names if (reader := self._file.int4_reader(name)) is not None]
        return readers if len(readers) == len(names) else None

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

        # The calling thread reads a lone piece, a norm, say.
        for elements in self._threads.map(read, pieces) if len(pieces) > 1 else map(read, pieces):
            self._count(elements, fresh)

    def _parts(self, names: Sequence[str], readers: Sequence[_Reader]) -> Iterator[Tensor]:
        """What `readers` read of stacked matrices, some rows at a time: whole blocks, the last part apart."""
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
        """Tell of elements that are read, unless they were before, in another precision."""
        if fresh:
            with self._counting:
                self._progress.advance(elements * self.dtype.itemsize)


def chosen_rows(tensor: Tensor, ids: Sequence[int]) -> Tensor:
    """Those rows of a tensor; the first so many of them are no copy."""
    if all(map(operator.eq, ids, range(len(ids)))):
        return tensor[: len(ids)]
    return tensor[torch.tensor(ids, device=tensor.device)]


def _cast(source: Tensor, into: Tensor) -> None:
    if into.device.type != "cpu":
        into.copy_(source)
        return
    # Pieces this small are cast by the calling thread. torch would share larger ones out among its threads,
    # and meeting them a thousand times took 50 s of a 64 s load on a machine that was busy otherwise.
    flat, out = source.reshape(-1), into.view(-1)
    for start in range(0, len(flat), _SERIAL):
        out[start : start + _SERIAL].copy_(flat[start : start + _SERIAL])
