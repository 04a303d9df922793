"""DraftMemory: a draft's memory, which streamed layers of its target get if the draft does not pay.

    one memory     draft   | layer 0 | layer 1 | ... | output layer |
                   target  |   layer 4   |   layer 9   |   layer 14   |

A draft takes memory that could hold some of its target's layers, which are then read in every pass. If its
guesses are rarely accepted, as in unpredictable text, it only slows passes down. Draft and layers are records
of prepared files, and products compute on records in place. So layers can be read over the draft, in about
the time of a target pass. The draft does not come back.
"""

import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from threading import RLock

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


class DraftMemory:
    """Memory for records of a draft, and then perhaps for some of the target's."""

    def __init__(
        self,
        draft: PreparedFile,
        names: Sequence[str],
        target: PreparedFile,
        streamed: Sequence[str],
        disk: DiskRate,
    ) -> None:
        """The memory holds the draft's records in `names`, then some of the target's in `streamed`.

        Reads the draft. Raises DamagedFileError if its checksums do not match, ModelFileError if its file
        cannot be read.
        """
        self.given = False  # True if the draft is no longer in memory
        self._kept = False  # kept for the draft permanently
        self._disk = disk
        self._turn = RLock()
        self._layers = [target.records[name] for name in streamed]
        records = [draft.records[name] for name in names]
        begins = [0, *accumulate(record.length for record in records)]
        memory = memoryview(aligned(begins[-1]))
        self._size = len(memory)
        memories = [memory[begin:end] for begin, end in pairwise(begins)]
        self._places = {
            tensor: (own, place)
            for record, own in zip(records, memories, strict=True)
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
        self._read(StreamSource(draft.path), zip(memories, records, strict=True))
        for record, own in zip(records, memories, strict=True):
            if zlib.crc32(own) != record.crc:
                raise DamagedFileError(f"{draft.path}: a record has a wrong checksum")

    @property
    def seconds(self) -> float:
        """Approximate time to read either."""
        return self._size / self._disk.bytes_per_second

    @property
    def layers_may_use(self) -> bool:
        """True if the memory may hold layers of the target."""
        return bool(self.layers) and not self._kept and not self.given

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

    def give_to_layers(self) -> bool:
        """Load the target's layers, between passes, over the draft, which must not run again.

        Returns True on success. If they cannot be read, they are streamed as before, with a log line. Does
        nothing if the draft is kept.
        """
        with self._turn:
            if not self.layers_may_use:
                return False
            assert self._stream is not None, "only streamed layers use this memory"
            assert self._target is not None
            self.given = True
            layers = [(memory, self._layers[number]) for number, memory in self.layers.items()]
            try:
                self._read(self._target, layers)
            except ModelFileError as error:
                _LOG.warning("cannot read layers over a draft, which no longer guesses: %s", error)
                return False
            self._stream.pin(self.layers)
            _LOG.info("%d more layers are in memory, in place of the draft", len(self.layers))
            return True

    def keep(self) -> bool:
        """Keep the draft permanently, for several engines; returns False if its memory was given away."""
        with self._turn:
            self._kept = not self.given
            return self._kept

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
