"""Weights of a model larger than memory: some layers stay in memory, the others use a few buffers in turn.

    memory     vectors, the output layer, pinned layers
    buffers    one layer each; a layer's products are created once per buffer that it may occupy
    disk       the prepared file: a record per layer, and the rows of the embedding table

Products use addresses (docs/contracts.md), so a layer does not depend on its place in memory. A pass runs
the layers in order, and waits for those that are being read.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from specinfer.errors import DamagedFileError, ModelFileError
from specinfer.kernels.choice import Kernels
from specinfer.kernels.disk import DiskRate, StreamSource
from specinfer.kernels.layout import Weight
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import Product
from specinfer.models.lent_memory import LentMemory, tensor_in
from specinfer.models.placement import Placement
from specinfer.models.prepared import Place, PreparedFile, Record
from specinfer.models.stream import LayerStream
from specinfer.models.stream_buffers import StreamRecord
from specinfer.models.weight_memory import EmbeddingTable, Weights
from specinfer.models.weight_reader import WeightReader
from specinfer.progress import Progress

_Part = TypeVar("_Part")
_LAYER: Final = re.compile(r".*\blayers\.\d+")


def layer_records(file: PreparedFile) -> list[str]:
    """The names of a prepared model's layers, in order."""
    names = [name for name in file.records if _LAYER.fullmatch(name)]
    return sorted(names, key=lambda name: int(name.rpartition(".")[2]))


def table_on_disk(file: PreparedFile) -> TableOnDisk:
    """The embeddings of a prepared model, read once completely to check them.

    Raises DamagedFileError if there are none or the checksum does not match.
    """
    for record in file.records.values():
        for name, place in record.tensors.items():
            if name.endswith("embed_tokens.weight.rows"):
                file.check(record)
                return TableOnDisk(file, record.offset + place.offset, place)
    raise DamagedFileError(f"{file.path} has no embeddings; delete it, and it is created again")


class StreamedWeights(Weights):
    """Weights of a prepared model; some layers may use buffers.

    With `table_in_memory` the embeddings are whole, as heads need them; otherwise rows are read when a token
    uses them.
    """

    def __init__(
        self,
        reader: WeightReader,
        kernels: Kernels,
        file: PreparedFile,
        placement: Placement,
        disk: DiskRate,
        *,
        table_in_memory: bool,
        lent: LentMemory | None = None,
    ) -> None:
        """Some of the streamed layers may use `lent` memory."""
        super().__init__(reader, torch.device("cpu"), kernels)
        self._file = file
        self._lent: Mapping[int, memoryview] = {} if lent is None else lent.layers
        self._layers = layer_records(file)
        self._streamed = {number: place for place, number in enumerate(placement.streamed)}
        self._table_in_memory = table_in_memory
        records = [
            StreamRecord(record.offset, record.length, record.crc, name)
            for name in (self._layers[number] for number in placement.streamed)
            for record in (file.records[name],)
        ]
        if records:
            source = StreamSource(file.path)
            self.stream = LayerStream(source, records, buffers=placement.buffers, disk=disk)
            if lent is not None:
                lent.serve(self.stream, file, [self._layers[number] for number in placement.streamed])
        self._buffer: memoryview | None = None  # memory of the layer being built
        self._record: Record | None = None  # record of that layer
        # vectors of that layer, shared by all its copies
        self._vectors: dict[tuple[object, ...], Tensor] = {}
        self._largest: float | None = None  # scale of the next product's matrix

    def tensor(self, *names: str, plus: float = 0.0) -> Tensor:
        """See Weights; copies of a layer share tensors."""
        if self._buffer is None:
            return super().tensor(*names, plus=plus)
        if (key := (names, plus)) not in self._vectors:
            self._vectors[key] = super().tensor(*names, plus=plus)
        return self._vectors[key]

    def table(self, name: str, rows: range | None = None) -> EmbeddingTable:
        """See Weights; or a table whose rows are on disk."""
        if self._table_in_memory:
            return super().table(name, rows)
        return table_on_disk(self._file)

    def each(self, make: Callable[[int], _Part], count: int) -> Sequence[_Part]:
        """See Weights; iterating waits for each streamed layer."""
        made = [self._made(make, number) for number in range(count)]
        return [one for [one] in made] if self.stream is None else _Layers(made, self._streamed, self.stream)

    def check(self, progress: Progress) -> None:
        """Read every streamed layer; raises DamagedFileError if a checksum does not match."""
        if self.stream is None:
            return
        with self.stream.passing():
            for number, place in self._streamed.items():
                self.stream.take(place)
                progress.advance(self._file.records[self._layers[number]].length)

    def _made(self, make: Callable[[int], _Part], number: int) -> list[_Part]:
        """Copies of a layer, one for each place it may occupy."""
        if self.stream is None or number not in self._streamed:
            return [make(number)]
        self._record, self._vectors = self._file.records[self._layers[number]], {}
        made: list[_Part] = []
        lent = self._lent.get(self._streamed[number])
        for buffer in [*self.stream.buffers, *([] if lent is None else [lent])]:
            self._buffer = buffer
            made.append(make(number))
        self._buffer = self._record = None
        return made

    def _filled(self, matrices: Sequence[str], weight: Weight, rows: Sequence[int] | None) -> Weight:
        if self._buffer is None or self._record is None:
            return super()._filled(matrices, weight, rows)
        name = "+".join(matrices)
        self._largest = self._file.largest.get(name)
        views = [tensor_in(self._buffer, self._record.tensors[f"{name}.{field}"]) for field in weight._fields]
        return type(weight)(*views)

    def _product(
        self,
        weight: Weight,
        bias: Tensor | None,
        inner: int,
        channels: int,
        largest: float | None = None,
        parts: SumParts | None = None,
    ) -> Product:
        if self._buffer is not None:
            largest = self._largest
        return super()._product(weight, bias, inner, channels, largest, parts)


class _Layers(Sequence[_Part]):
    """Layers of a model with one or several places in memory; iterating waits for those being read.

    Iterate within a pass (`LayerStream.passing`).
    """

    def __init__(
        self, made: Sequence[Sequence[_Part]], streamed: dict[int, int], stream: LayerStream
    ) -> None:
        self._made = made
        self._streamed = streamed
        self._stream = stream

    def __len__(self) -> int:
        return len(self._made)

    @overload
    def __getitem__(self, number: int) -> _Part: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[_Part]: ...

    def __getitem__(self, number: int | slice) -> _Part | Sequence[_Part]:
        if isinstance(number, slice):
            return [made[0] for made in self._made[number]]
        return self._made[number][0]

    def __iter__(self) -> Iterator[_Part]:
        for number, made in enumerate(self._made):
            place = self._streamed.get(number)
            yield made[0] if place is None else made[self._stream.take(place)]


class TableOnDisk(EmbeddingTable):
    """Embeddings whose rows are read from a prepared file when tokens use them.

    Frequent rows stay in the page cache, which shrinks when memory is short.
    """

    __slots__ = ("__weakref__", "_dtype", "_number", "_offset", "_path", "_shape")

    def __init__(self, file: PreparedFile, offset: int, place: Place) -> None:
        """`place` describes the table, [V, D], at byte `offset` of the file."""
        super().__init__(None)
        self._path = file.path
        self._offset = offset
        self._shape = place.shape
        self._dtype = place.dtype
        self._number = os.open(file.path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._number).atexit = False

    def rows(self, token_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """See EmbeddingTable.

        Raises IndexError for a token outside the table, ModelFileError if the file cannot be read.
        """
        ids, places = np.unique(token_ids_T.numpy(), return_inverse=True)
        size, vocab = self._shape[1] * self._dtype.itemsize, self._shape[0]
        if len(ids) and not 0 <= ids[0] <= ids[-1] < vocab:
            raise IndexError(f"token ids must be 0 .. {vocab - 1}")
        rows_ND = torch.empty(len(ids), self._shape[1], dtype=self._dtype)
        into = rows_ND.view(torch.uint8).numpy()
        for n, token in enumerate(ids.tolist()):
            try:
                count = os.preadv(self._number, [into[n].data], self._offset + token * size)
            except OSError as error:
                raise ModelFileError(
                    f"{self._path} cannot be read ({error.strerror}); check the disk it is on"
                ) from error
            if count != size:
                raise ModelFileError(f"{self._path} got shorter while it was read; load the model again")
        return rows_ND, torch.from_numpy(places.reshape(-1).astype(np.int64, copy=False))
