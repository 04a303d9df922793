"""DraftMemory: a draft's memory, which streamed layers of its target use while the draft is idle.

    one memory     draft   | layer 0 | layer 1 | ... | output layer |
                   target  |   layer 4   |   layer 9   |   layer 14   |

A draft takes memory that could hold some of its target's layers, which are then read in every pass. If its
guesses are rarely accepted, as in unpredictable text, it only slows passes down. Draft and layers are records
of prepared files, and products compute on records in place. So either can be read over the other, in about
the time of a target pass.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from threading import RLock
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from specinfer.errors import DamagedFileError, ModelFileError
from specinfer.kernels.disk import DiskRate, StreamSource, aligned
from specinfer.kernels.layout import Weight
from specinfer.models.placement import spread
from specinfer.models.prepared import PreparedFile, Record, TensorPlace
from specinfer.models.stream import LayerStream

_LOG = logging.getLogger(__name__)
Holder = Literal["neither", "draft", "layers"]  # with "neither" each may use half of the memory


class DraftMemory:
    """Memory for records of a draft, or for some of the target's.

    It starts with the draft.
    """

    def __init__(
        self,
        draft: PreparedFile,
        names: Sequence[str],
        target: PreparedFile,
        streamed: Sequence[str],
        disk: DiskRate,
    ) -> None:
        """The memory holds the draft's records of these names, or some of the target's records in `streamed`.

        Reads the draft. Raises DamagedFileError if its checksums do not match, ModelFileError if its file
        cannot be read.
        """
        self.holder: Holder = "neither"
        self._kept = False  # kept for the draft permanently
        self._failed = False  # layers could not be read since the draft was last in memory
        self._disk = disk
        self._turn = RLock()
        self._draft = StreamSource(draft.path)
        self._layers = [target.records[name] for name in streamed]
        self._records = [draft.records[name] for name in names]
        begins = [0, *accumulate(record.length for record in self._records)]
        memory = memoryview(aligned(begins[-1]))
        self._size = len(memory)
        self._memories = [memory[begin:end] for begin, end in pairwise(begins)]
        self._places = {
            tensor: (own, place)
            for record, own in zip(self._records, self._memories, strict=True)
            for tensor, place in record.tensors.items()
        }
        longest = max(record.length for record in self._layers)
        swapped = spread(min(len(self._layers), self._size // longest), len(self._layers))
        # Memory of the target's layers, by their numbers in its stream.
        self.layers: Mapping[int, memoryview] = {
            number: memory[n * longest : n * longest + self._layers[number].length]
            for n, number in enumerate(swapped)
        }
        self._stream: LayerStream | None = None  # the target's
        self._target: StreamSource | None = None  # the file of the stream
        self._load()

    @property
    def seconds(self) -> float:
        """Approximate time to read either."""
        return self._size / self._disk.bytes_per_second

    @property
    def layers_may_use(self) -> bool:
        """True if the memory may hold layers of the target."""
        return bool(self.layers) and not self._kept and not self._failed

    @property
    def streamed_bytes(self) -> int:
        """Bytes that each pass reads while the memory holds layers of the target."""
        return sum(layer.length for number, layer in enumerate(self._layers) if number not in self.layers)

    def serve(self, stream: LayerStream, file: PreparedFile, streamed: Sequence[str]) -> None:
        """Set the stream and the file of the target's layers; the file may be a new one."""
        self._stream, self._target = stream, StreamSource(file.path)
        self._layers = [file.records[name] for name in streamed]

    def weight(self, matrix: str, kind: type[Weight]) -> Weight | None:
        """The draft's matrix of that name in this memory; None if it is elsewhere."""
        found = [self._places.get(f"{matrix}.{field}") for field in kind._fields]
        views = [tensor_in(*one) for one in found if one is not None]
        return kind(*views) if len(views) == len(found) else None

    def give_to_layers(self) -> None:
        """Load the target's layers, between passes; the draft must not be used until it is back.

        If they cannot be read, they are streamed as before, with a log line, until the draft is back.
        """
        with self._turn:
            if self.layers_may_use and self.holder != "layers":
                self.holder = "neither"
                self._failed = not self._moved([*self.layers], self._read_layers)
                if not self._failed:
                    self.holder = "layers"
                    _LOG.info("%d more layers are in memory, in place of the draft", len(self.layers))

    def give_to_draft(self) -> bool:
        """Load the draft, between passes of the target; return True on success.

        If it cannot be read, which is logged, all layers are streamed.
        """
        with self._turn:
            if self.holder != "draft":
                self.holder = "neither"
                if self._moved([], self._read_draft):
                    self.holder, self._failed = "draft", False
                    _LOG.info("the draft is back in memory")
            return self.holder == "draft"

    def keep(self) -> None:
        """Keep the draft permanently, since more than one engine uses it."""
        with self._turn:
            self._kept = True
            self.give_to_draft()

    def _moved(self, pinned: Sequence[int], fill: Callable[[], None]) -> bool:
        assert self._stream is not None, "only streamed layers use this memory"
        try:
            self._stream.pin(pinned, fill)
        except ModelFileError as error:
            _LOG.warning("cannot exchange a draft and layers of its target: %s", error)
            return False
        return True

    def _load(self) -> None:
        self._read_draft()
        for record, memory in zip(self._records, self._memories, strict=True):
            if zlib.crc32(memory) != record.crc:
                raise DamagedFileError(f"{self._draft.path}: a record has a wrong checksum")
        self.holder = "draft"

    def _read_draft(self) -> None:
        self._read(self._draft, zip(self._memories, self._records, strict=True))

    def _read_layers(self) -> None:
        assert self._target is not None, "only streamed layers use this memory"
        self._read(self._target, ((memory, self._layers[number]) for number, memory in self.layers.items()))

    def _read(self, source: StreamSource, records: Iterable[tuple[memoryview, Record]]) -> None:
        """Read records at the disk's full speed."""
        piece = self._disk.piece
        pieces = [
            (memory[at : at + piece], record.offset + at)
            for memory, record in records
            for at in range(0, record.length, piece)
        ]
        with ThreadPoolExecutor(self._disk.readers, thread_name_prefix="draft-memory") as pool:
            list(pool.map(lambda one: source.read_into(*one), pieces))
        source.check()


def tensor_in(memory: memoryview, place: TensorPlace) -> Tensor:
    """A view of a record's tensor in `memory`, with any content."""
    count = int(np.prod(place.shape))
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)
