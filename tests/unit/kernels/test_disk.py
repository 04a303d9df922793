"""Files that stream: their bytes, the faults of files and disks, and the speeds of disk and memory."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specinfer.errors import ModelFileError
from specinfer.kernels import disk
from specinfer.kernels.disk import PAGE, Bandwidth, DiskRate, StreamSource, aligned, measure, timed_reads
from tests.kernels import library_or_skip
from tests.streaming import Streaming

MIB = 1 << 20
ROOM = memoryview(bytearray(20 * MIB))
DATA = random.Random(5).randbytes(64 * PAGE)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def without_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening with O_DIRECT is refused, as by FUSE."""
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)


def read(source: StreamSource, offset: int, length: int) -> bytes:
    memory = aligned(length)
    source.read_into(memoryview(memory), offset)
    return bytes(memory)


def test_pieces_are_the_files_bytes(file: Path) -> None:
    source = StreamSource(file)
    assert source.size == len(DATA)
    assert read(source, 0, len(DATA)) == DATA
    assert read(source, 3 * PAGE, 2 * PAGE) == DATA[3 * PAGE : 5 * PAGE]
    source.check()


@pytest.mark.usefixtures("without_direct")
def test_without_o_direct_pieces_leave_the_page_cache(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    advice: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda number, *what: advice.append(what))
    with caplog.at_level(logging.INFO):
        source = StreamSource(file)
        assert read(source, PAGE, 3 * PAGE) == DATA[PAGE : 4 * PAGE]
        monkeypatch.setattr(disk, "_DROP_INTERVAL", 5 * PAGE)
        read(source, 4 * PAGE, 2 * PAGE)
        read(source, 6 * PAGE, 2 * PAGE)
    assert not source.direct
    dropped = os.POSIX_FADV_DONTNEED
    assert advice == [
        (0, 0, dropped),
        (PAGE, 3 * PAGE, dropped),
        (0, 0, dropped),
        (6 * PAGE, 2 * PAGE, dropped),
    ]
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: this file system has no O_DIRECT; each piece leaves the page cache again"
    ]


def test_a_disk_may_refuse_the_first_direct_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = os.preadv
    asked = 0

    def refuse_once(*arguments: Any) -> int:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise OSError(errno.EINVAL, "Invalid argument")
        return reads(*arguments)

    monkeypatch.setattr(os, "preadv", refuse_once)
    source = StreamSource(file)
    assert not source.direct
    assert read(source, 0, PAGE) == DATA[:PAGE]


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"none cannot be opened \(No such file or directory\); load"):
        StreamSource(tmp_path / "none")


def test_a_disk_that_fails_is_an_error_with_its_words(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = StreamSource(file)

    def fail(*arguments: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ModelFileError, match=r"cannot be read at byte 8192 \(Input/output error\); check"):
        read(source, 2 * PAGE, PAGE)
    with pytest.raises(ModelFileError, match=r"cannot be opened \(Input/output error\)"):
        StreamSource(file)  # a failing first read is no refusal


def _append(file: Path) -> None:
    with file.open("ab") as more:
        more.write(bytes(PAGE))


def _replace(file: Path) -> None:
    file.with_suffix(".new").write_bytes(DATA)
    os.replace(file.with_suffix(".new"), file)


def _write(file: Path) -> None:
    file.open("r+b").write(b"?")
    os.utime(file, ns=(0, 0))


CHANGES = [
    (
        lambda file: os.truncate(file, 10 * PAGE),
        "model.safetensors changed from 262144 to 40960 bytes while it was read; load the model again",
    ),
    (_append, "changed from 262144 to 266240 bytes while it was read"),
    (_replace, "was replaced while it was read"),
    (_write, "was written to while it was read"),
    (Path.unlink, r"disappeared while it was read \(No such file or directory\)"),
]


def test_a_file_that_changes_is_noticed(file: Path) -> None:
    for change, words in CHANGES:
        file.write_bytes(DATA)
        source = StreamSource(file)
        source.check()
        change(file)
        with pytest.raises(ModelFileError, match=words):
            source.check()


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_ends_early_is_noticed(file: Path, direct: bool, request: pytest.FixtureRequest) -> None:
    if not direct:
        request.getfixturevalue("without_direct")
    for within in (0, 100):
        file.write_bytes(DATA)
        source = StreamSource(file)
        os.truncate(file, 10 * PAGE + within)
        with pytest.raises(ModelFileError, match=r"ended at byte 4\d{4} while it was read; load the"):
            read(source, 8 * PAGE, 4 * PAGE)


def test_memory_begins_at_a_page_and_is_zero() -> None:
    memory = aligned(3 * PAGE)
    assert isinstance(memory, mmap.mmap)
    assert bytes(memory) == bytes(3 * PAGE)


class _Disk:
    """A source of `size` bytes that is never read."""

    path = Path("model")
    direct = True

    def __init__(self, size: int) -> None:
        self.size = size
        self.now = 0.0

    def read_into(self, view: memoryview, offset: int) -> None:
        raise AssertionError

    def check(self) -> None:
        raise AssertionError

    def measured(self, rates: Callable[[int, int], float]) -> DiskRate:
        """Return the chosen settings for these rates."""

        def trial(
            source: object, memory: memoryview, readers: int, piece: int, place: float, share: float
        ) -> tuple[int, float]:
            rate = rates(readers, piece)
            pieces = max(1, int(share * rate / (readers * piece)))
            taken = pieces * readers * piece / rate
            self.now += taken
            return pieces * readers * piece, taken

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(disk, "time", SimpleNamespace(perf_counter=lambda: self.now))
            patch.setattr(disk, "timed_reads", trial)
            return measure(self)


def test_more_readers_are_chosen_where_they_are_faster_by_a_twentieth() -> None:
    found = _Disk(1 << 31).measured(lambda readers, piece: 1.4e9 * (1.04 if readers == 8 else 1))
    assert (found.readers, found.piece, found.direct) == (1, 16 * MIB, True)
    assert found.bytes_per_second == pytest.approx(1.4e9)
    found = _Disk(1 << 31).measured(lambda readers, piece: {1: 1e9, 2: 0.97e9, 4: 0.97e9, 8: 2.1e9}[readers])
    assert (found.readers, found.piece) == (8, MIB)
    assert found.bytes_per_second == pytest.approx(2.1e9)
    assert str(found) == "2.1 GB/s by 8 readers of 1 MiB, past the page cache"


def test_readers_read_at_once() -> None:
    class Meeting(_Disk):
        def read_into(self, view: memoryview, offset: int) -> None:
            everybody.wait(2)

    everybody = threading.Barrier(4)
    done, _ = timed_reads(Meeting(1 << 20), ROOM, 4, PAGE, 0.0, 0.0)
    assert done == 4 * PAGE


def test_a_real_file_is_measured(file: Path) -> None:
    source = StreamSource(file)
    began = time.monotonic()
    found = measure(source)
    assert time.monotonic() - began < 2
    assert found.bytes_per_second > 1e5
    assert (found.readers, found.piece) in disk.SETTINGS
    assert found.direct == source.direct


def test_the_usual_bandwidth_is_the_median_of_three_and_all_of_them_are_kept() -> None:
    library: Any = Streaming(1e9, 9e9, 2e9)
    bandwidth = Bandwidth(library, 1 << 16)
    assert bandwidth.median() == 2e9
    assert bandwidth.found == [1e9, 9e9, 2e9]
    ((address, size),) = set(library.streamed)
    assert (address % PAGE, size) == (0, 1 << 16)
    assert Bandwidth(library_or_skip(), 1 << 20).median() > 1e6


def test_a_call_is_compared_with_the_memory_before_and_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory slows down by half, and so does what is bound by it."""
    library: Any = Streaming(100.0, 100.0, 50.0, 50.0)
    taken = iter([0.030, 0.045, 0.060])
    monkeypatch.setattr(disk, "seconds", lambda call: next(taken))
    milliseconds, times = Bandwidth(library, PAGE).compare(lambda: None, 1.0, 3)
    assert milliseconds == pytest.approx(45)
    assert times == pytest.approx(3)
