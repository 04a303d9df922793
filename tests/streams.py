"""Helpers for tests of weight streaming: a file with scripted reads, and its records."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from specinfer.errors import ModelFileError
from specinfer.kernels.disk import PAGE, DiskRate
from specinfer.models.stream import LayerStream, StreamRecord


class ScriptedSource:
    """A file in memory whose reads follow the test's script."""

    def __init__(self, data: bytes) -> None:
        self.path = Path("weights.safetensors")
        self.data = data
        self.size = len(data)
        self.direct = True
        self.offsets: list[int] = []  # offsets of reads, in order of their start
        self.sizes: list[int] = []  # bytes of reads that ended
        self.delay = 0.0  # seconds of each read
        self.faults: list[BaseException] = []  # exceptions of the next reads
        self.permanent: BaseException | None = None
        self.changed: ModelFileError | None = None  # the error that `check` raises
        self.open = threading.Event()  # reads wait until this is set
        self.open.set()
        self.stalled = threading.Event()  # set while a read waits

    def read_into(self, view: memoryview, offset: int) -> None:
        self.offsets.append(offset)
        if not self.open.is_set():
            self.stalled.set()
        self.open.wait()
        time.sleep(self.delay)
        if self.faults:
            raise self.faults.pop(0)
        if self.permanent is not None:
            raise self.permanent
        view[:] = self.data[offset : offset + len(view)]
        self.sizes.append(len(view))

    def check(self) -> None:
        if self.changed is not None:
            raise self.changed


def pages(*counts: int) -> list[StreamRecord]:
    """Return records of these numbers of pages, with a page between any two."""
    begins = accumulate([0, *(count + 1 for count in counts)])
    return [
        StreamRecord(begin * PAGE, count * PAGE, None, f"layer.{number}")
        for number, (begin, count) in enumerate(zip(begins, counts, strict=False))
    ]


def scripted(*counts: int) -> tuple[list[StreamRecord], ScriptedSource]:
    """Return records of these numbers of pages, and their source."""
    return (records := pages(*counts)), source_of(records)


def source_of(records: list[StreamRecord]) -> ScriptedSource:
    return ScriptedSource(random.Random(7).randbytes(records[-1].offset + records[-1].length))


def disk(readers: int = 2, piece: int = PAGE, rate: float = 1e9) -> DiskRate:
    return DiskRate(readers, piece, rate, direct=True)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("specinfer-reader")]


def until(holds: Callable[[], bool]) -> None:
    """Wait up to two seconds until `holds` returns True."""
    for _ in range(2000):
        if holds():
            return
        time.sleep(0.001)
    raise AssertionError("it is not true after two seconds")


def taken(stream: LayerStream, number: int, record: StreamRecord) -> bytes:
    return bytes(stream.buffers[stream.take(number)][: record.length])


def pass_over(stream: LayerStream, records: list[StreamRecord]) -> None:
    for number, _ in enumerate(records):
        stream.take(number)


def bytes_of(source: ScriptedSource, record: StreamRecord) -> bytes:
    return source.data[record.offset : record.offset + record.length]
