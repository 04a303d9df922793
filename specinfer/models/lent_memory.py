"""A draft's memory, which layers of its target may have while nobody guesses.

    one memory     draft   | layer 0 | layer 1 | ... | output layer |
                   target  |   layer 4   |   layer 9   |   layer 14   |

A twin takes the memory of some of its target's layers, which are then read in every pass. Where its guesses
bring nothing, as in text that nobody can predict, it only makes passes slower. Both are records of prepared
files, and products compute where records lie. So either can be read over the other, in about the time of a
pass of the target.
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
from specinfer.models.prepared import Place, PreparedFile, Record
from specinfer.models.stream import LayerStream

_LOG = logging.getLogger(__name__)
Holder = Literal["nobody", "draft", "layers"]  # nobody: it may be half of either


class LentMemory:
    """Memory for records of a draft, or for some of the target's.

    It begins with the draft.
    """

    def __init__(
        self,
        draft: PreparedFile,
        names: Sequence[str],
        target: PreparedFile,
        streamed: Sequence[str],
        disk: DiskRate,
    ) -> None:
        """The draft's records of these names lie here, or some of the target's that are streamed else.

        Reads the draft: raises DamagedFileError unless it is what was written, ModelFileError where its file
        cannot be read.
        """
        self.holder: Holder = "nobody"
        self._kept = False  # for the draft, for good
        self._failed = False  # layers could not be read since the draft was here
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
        lent = spread(min(len(self._layers), self._size // longest), len(self._layers))
        # Where those of the target's lie, by their numbers in its stream.
        self.layers: Mapping[int, memoryview] = {
            number: memory[n * longest : n * longest + self._layers[number].length]
            for n, number in enumerate(lent)
        }
        self._stream: LayerStream | None = None  # of layers
        self._target: StreamSource | None = None  # which it reads
        self._load()

    @property
    def seconds(self) -> float:
        """About how long it takes to read either."""
        return self._size / self._disk.bytes_per_second

    @property
    def can_be_lent(self) -> bool:
        """Whether layers of the target may have it."""
        return bool(self.layers) and not self._kept and not self._failed

    @property
    def streamed_bytes(self) -> int:
        """Bytes that are read in each pass while layers of the target are here."""
        return sum(layer.length for number, layer in enumerate(self._layers) if number not in self.layers)

    def serve(self, stream: LayerStream, file: PreparedFile, streamed: Sequence[str]) -> None:
        """Say whose records `layers` are: a stream's of these records of a file, which may be a new one."""
        self._stream, self._target = stream, StreamSource(file.path)
        self._layers = [file.records[name] for name in streamed]

    def weight(self, matrix: str, kind: type[Weight]) -> Weight | None:
        """The draft's matrix of that name, as it lies here; None where it does not."""
        found = [self._places.get(f"{matrix}.{field}") for field in kind._fields]
        views = [tensor_in(*one) for one in found if one is not None]
        return kind(*views) if len(views) == len(found) else None

    def lend(self) -> None:
        """Have layers of the target here, between passes; nobody may ask the draft until it is back.

        Where they cannot be read they are streamed as before, which is logged, until the draft is back.
        """
        with self._turn:
            if self.can_be_lent and self.holder != "layers":
                self.holder = "nobody"
                self._failed = not self._moved([*self.layers], self._read_layers)
                if not self._failed:
                    self.holder = "layers"
                    _LOG.info("%d more layers are in memory, in place of the draft", len(self.layers))

    def take_back(self) -> bool:
        """Have the draft here, between passes of the target; returns whether it is.

        Where it cannot be read, which is logged, all layers are streamed.
        """
        with self._turn:
            if self.holder != "draft":
                self.holder = "nobody"
                if self._moved([], self._read_draft):
                    self.holder, self._failed = "draft", False
                    _LOG.info("the draft is back in memory")
            return self.holder == "draft"

    def keep(self) -> None:
        """Have the draft here for good, as more than one engine asks it."""
        with self._turn:
            self._kept = True
            self.take_back()

    def _moved(self, pinned: Sequence[int], fill: Callable[[], None]) -> bool:
        assert self._stream is not None, "only layers that are streamed come here"
        try:
            self._stream.pin(pinned, fill)
        except ModelFileError as error:
            _LOG.warning("a draft and layers of its target cannot change places: %s", error)
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
        assert self._target is not None, "only layers that are streamed come here"
        self._read(self._target, ((memory, self._layers[number]) for number, memory in self.layers.items()))

    def _read(self, source: StreamSource, records: Iterable[tuple[memoryview, Record]]) -> None:
        """Read records, as quickly as the disk reads."""
        piece = self._disk.piece
        pieces = [
            (memory[at : at + piece], record.offset + at)
            for memory, record in records
            for at in range(0, record.length, piece)
        ]
        with ThreadPoolExecutor(self._disk.readers, thread_name_prefix="lent") as pool:
            list(pool.map(lambda one: source.read_into(*one), pieces))
        source.check()


def tensor_in(memory: memoryview, place: Place) -> Tensor:
    """A tensor of a record that lies in `memory`, whatever is there now."""
    count = int(np.prod(place.shape))
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.offset).view(place.shape)
