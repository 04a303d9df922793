"""Weights of a model larger than memory: layers that do not fit are read in every pass.

    memory     vectors, the output layer, pinned layers
    buffers    one layer each; a layer's products are created once per buffer that it may occupy
    disk       the prepared file: a record per layer, and the rows of the embedding table

All layers of a mixture stay in memory, but not their experts, which are read when chosen
(expert_stream.py).

Products use addresses (docs/contracts.md), so a layer does not depend on its place in memory. A pass runs
the layers in order, and waits for those that are being read.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.errors import DamagedFileError
from specinfer.kernels.choice import Kernels
from specinfer.kernels.disk import DiskRate, StreamSource
from specinfer.kernels.layout import BlocksWeight, FloatWeight, Int4Weight, Int8Weight, Weight
from specinfer.kernels.parts import SumParts
from specinfer.kernels.product import Product
from specinfer.models.draft_memory import DraftMemory, tensor_in
from specinfer.models.expert_stream import ExpertStream, MakeProduct, Pair
from specinfer.models.placement import Placement
from specinfer.models.prepared import PreparedFile, Record
from specinfer.models.shared_sums import EmbeddingTable, TableOnDisk
from specinfer.models.stream import LayerStream
from specinfer.models.weight_memory import Weights, first_matrices, product_over
from specinfer.models.weight_reader import WeightReader
from specinfer.progress import Progress
from specinfer.speculation_config import Quantization

_Part = TypeVar("_Part")
_LAYER: Final = re.compile(r".*\blayers\.\d+")
_KINDS: Final[Mapping[Quantization, type[Weight]]] = {
    "int8": Int8Weight,
    "int4": Int4Weight,
    "gguf": BlocksWeight,
}


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
                return TableOnDisk(
                    file.path,
                    record.offset + place.offset,
                    place.shape[0],
                    place.shape[1] * place.dtype.itemsize,
                    partial(_viewed, place.dtype),
                )
    raise DamagedFileError(f"{file.path} has no embeddings; delete it, and it is created again")


def _viewed(dtype: torch.dtype, octets: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(octets).view(dtype)


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
        draft_memory: DraftMemory | None = None,
    ) -> None:
        """Some of the streamed layers may use the `draft_memory`."""
        super().__init__(reader, torch.device("cpu"), kernels)
        self._file = file
        self._swapped: Mapping[int, memoryview] = {} if draft_memory is None else draft_memory.layers
        self._layers = layer_records(file)
        self._streamed = {number: place for place, number in enumerate(placement.streamed)}
        self._table_in_memory = table_in_memory
        self._experts: ExpertStream | None = None
        self._layer_stream: LayerStream | None = None
        if streamed := [self._layers[number] for number in placement.streamed]:
            source, records = StreamSource(file.path), file.stream_records(streamed)
            self._layer_stream = LayerStream(source, records, buffers=placement.buffers, disk=disk)
            if draft_memory is not None:
                draft_memory.serve(self._layer_stream, file, streamed)
        if placement.experts is not None:
            self._experts = ExpertStream(file, slots=placement.experts.slots, disk=disk)
        self.stream = self._layer_stream or self._experts
        self._buffer: memoryview | None = None  # memory of the layer being built
        self._record: Record | None = None  # record of that layer
        # vectors of that layer, shared by all its copies
        self._vectors: dict[tuple[object, ...], Tensor] = {}

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

    def each(self, make: Callable[[int], _Part], count: int) -> Iterable[_Part]:
        """See Weights; iterating waits for each streamed layer."""
        made = [self._made(make, number) for number in range(count)]
        stream = self._layer_stream
        return [one for [one] in made] if stream is None else _Layers(made, self._streamed, stream)

    def gated(
        self,
        prefixes: Sequence[str],
        columns: range | None = None,
        parts: SumParts | None = None,
        *,
        bias: bool = False,
        gated: bool = True,
    ) -> list[Pair]:
        """See `Weights.gated`; experts are loaded when they are used."""
        experts = self._experts
        if experts is None or prefixes[0] not in experts.numbers:
            return super().gated(prefixes, columns, parts, bias=bias, gated=gated)
        assert columns is None, "one process has all of a streamed model"
        return [
            experts.products(
                prefix,
                (
                    self._expert_product(first_matrices(prefix, gated=gated), bias, None),
                    self._expert_product([f"{prefix}.down_proj"], bias, parts),
                ),
            )
            for prefix in prefixes
        ]

    def expert_prefetch(self, first: str) -> Callable[[Sequence[int]], None] | None:
        """See `Weights.expert_prefetch`."""
        return None if self._experts is None else partial(self._experts.want_of_layer, first)

    def _expert_product(self, names: Sequence[str], bias: bool, parts: SumParts | None) -> MakeProduct:
        """A function that makes the product with these matrices; it does not refer to the stream."""
        matrices = [f"{name}.weight" for name in names]
        channels, inner = self._reader.shape(matrices)
        self._reader.mark_read(matrices)
        matrix, kernels = "+".join(matrices), self.kernels
        kind = FloatWeight if self._reader.is_float(matrices) else _KINDS[self._reader.quantization]
        b = self.tensor(*(f"{name}.bias" for name in names)) if bias else None
        largest = self._file.largest.get(matrix)

        def made(record: Record, memory: memoryview) -> Product:
            views = [tensor_in(memory, record.tensors[f"{matrix}.{field}"]) for field in kind._fields]
            return product_over(kernels, kind(*views), b, inner, channels, largest, parts)

        return made

    def check(self, progress: Progress) -> None:
        """Read everything that is streamed; raises DamagedFileError if a checksum does not match."""
        if self._experts is not None:
            self._experts.check(progress)
        if self._layer_stream is None:
            return
        with self._layer_stream.passing():
            for number, place in self._streamed.items():
                self._layer_stream.take(place)
                progress.advance(self._file.records[self._layers[number]].length)

    def _made(self, make: Callable[[int], _Part], number: int) -> list[_Part]:
        """Copies of a layer, one for each place it may occupy."""
        if self._layer_stream is None or number not in self._streamed:
            return [make(number)]
        self._record, self._vectors = self._file.records[self._layers[number]], {}
        made: list[_Part] = []
        swapped = self._swapped.get(self._streamed[number])
        for buffer in [*self._layer_stream.buffers, *([] if swapped is None else [swapped])]:
            self._buffer = buffer
            made.append(make(number))
        self._buffer = self._record = self._largest = None
        return made

    def _filled(self, matrices: Sequence[str], weight: Weight) -> Weight:
        if self._buffer is None or self._record is None:
            return super()._filled(matrices, weight)
        name = "+".join(matrices)
        self._largest = self._file.largest.get(name)
        views = [tensor_in(self._buffer, self._record.tensors[f"{name}.{field}"]) for field in weight._fields]
        return type(weight)(*views)


@dataclass(frozen=True, slots=True)
class _Layers(Iterable[_Part]):
    """Layers of a model with one or several places in memory; iterating waits for those being read.

    Iterate within a pass (`LayerStream.passing`).
    """

    made: Sequence[Sequence[_Part]]
    streamed: Mapping[int, int]
    stream: LayerStream

    def __iter__(self) -> Iterator[_Part]:
        for number, made in enumerate(self.made):
            place = self.streamed.get(number)
            yield made[0] if place is None else made[self.stream.take(place)]
