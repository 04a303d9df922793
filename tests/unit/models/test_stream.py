"""Records that pass through buffers: order and bytes, faults, waits and ends."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.machines.memory_group import NoGroupError, memory_group
from specinfer.errors import ClosedError, DamagedFileError, IntegrityError, ModelFileError
from specinfer.kernels.disk import PAGE, StreamSource
from specinfer.models import stream as module
from specinfer.models.stream import LayerStream, StreamRecord
from tests import streams
from tests.streams import ScriptedSource, bytes_of, disk, pages, readers, scripted, source_of, taken, until


@pytest.fixture(autouse=True)
def _no_reader_is_left() -> Iterator[None]:
    yield
    until(lambda: not readers())


def test_every_pass_finds_every_record_in_order() -> None:
    for counts, buffers, threads, piece in (
        *(((2, 2, 2, 2, 2), 2, 1, 1), ((2, 2, 2, 2, 2), 3, 4, 1), ((1, 7, 2, 5), 2, 3, 2)),
        *(((3, 4), 3, 2, 16), ((5,), 2, 2, 1), ((2, 3, 4), 1, 2, 1)),
    ):
        records, source = scripted(*counts)
        with LayerStream(source, records, buffers=buffers, disk=disk(threads, piece * PAGE)) as stream:
            assert len(readers()) == threads
            for _ in range(3):
                with stream.passing():
                    for number, record in enumerate(records):
                        assert taken(stream, number, record) == bytes_of(source, record), counts
            assert stream.passes == 3
            assert {memory.nbytes for memory in stream.buffers} == {max(counts) * PAGE}
            assert stream.read_bytes >= 3 * sum(counts) * PAGE
        until(lambda: not readers())


def test_the_buffer_that_is_held_is_not_written_to() -> None:
    records, source = scripted(4, 4, 4, 4)
    with LayerStream(source, records, buffers=2, disk=disk(4)) as stream:
        buffer = stream.take(0)
        until(lambda: stream.read_bytes == 2 * 4 * PAGE)
        time.sleep(0.01)
        assert stream.read_bytes == 2 * 4 * PAGE, "two buffers hold two records"
        assert bytes(stream.buffers[buffer]) == bytes_of(source, records[0])
        assert taken(stream, 1, records[1]) == bytes_of(source, records[1])
        until(lambda: stream.read_bytes == 3 * 4 * PAGE)
        assert bytes(stream.buffers[buffer]) == bytes_of(source, records[2])


def test_a_pass_that_was_cut_short_reads_nothing_of_what_it_left_out() -> None:
    records, source = scripted(1, 1, 1, 1, 1, 1)
    with LayerStream(source, records, buffers=2, disk=disk(1)) as stream:
        with stream.passing():
            stream.take(0)
        until(lambda: len(source.offsets) == 3)  # 0, and 1 and 2 in its buffers
        for number in (0, 1, 5, 0, 3, 2):
            assert taken(stream, number, records[number]) == bytes_of(source, records[number])
        places = [offset // (2 * PAGE) for offset in source.offsets]
        assert places[:5] == [0, 1, 2, 0, 1]
        # 2 is read only if the reader begins it before the jump to 5.
        assert tuple(places[5:7]) in {(2, 5), (5, 0)}, "3 and 4 were never begun"


@pytest.mark.parametrize("buffers", [2, 3])
def test_a_record_given_up_in_mid_read_does_not_overwrite_the_next_one(buffers: int) -> None:
    records, source = scripted(3, 3, 3, 3, 3)
    source.delay = 0.0005
    chance = random.Random(buffers)
    with LayerStream(source, records, buffers=buffers, disk=disk(3)) as stream:
        for _ in range(60):
            number = chance.randrange(5)
            assert taken(stream, number, records[number]) == bytes_of(source, records[number])
    assert stream.read_bytes == sum(source.sizes), "pieces of a record that was given up were not read"


def test_a_fault_is_raised_once_by_a_take_that_waits_and_one_of_reading_ahead_is_repaired() -> None:
    records, source = scripted(1, 1, 1, 1)
    source.open.clear()
    source.faults.append(fault := OSError(5, "Input/output error"))
    with LayerStream(source, records, buffers=2, disk=disk(1)) as stream:
        threading.Timer(0.02, source.open.set).start()
        with pytest.raises(OSError, match="Input/output") as caught:
            stream.take(0)
        assert caught.value is fault
        assert taken(stream, 0, records[0]) == bytes_of(source, records[0])
        until(lambda: stream.read_bytes == 2 * PAGE)
        source.faults.append(OSError("gone"))
        stream.take(1)  # its buffer free, a reader meets the fault at record 2
        until(lambda: not source.faults)
        for number in (2, 3, 0):
            assert taken(stream, number, records[number]) == bytes_of(source, records[number])


def test_a_permanent_fault_is_raised_by_every_take_and_readers_do_not_spin() -> None:
    records, source = scripted(2, 2, 2)
    source.changed = ModelFileError("weights.safetensors was replaced while it was read")
    with LayerStream(source, records, buffers=2, disk=disk()) as stream:
        for _ in range(2):
            with pytest.raises(ModelFileError, match="was replaced"):
                stream.take(0)
    source.changed, source.permanent = None, MemoryError("no memory")
    source.offsets.clear()
    with LayerStream(source, records, buffers=2, disk=disk()) as stream:
        for _ in range(5):
            before = len(source.offsets)
            with pytest.raises(MemoryError, match="no memory"):
                stream.take(0)
            time.sleep(0.003)
            assert len(source.offsets) <= before + 4
        source.permanent = None
        for number in (0, 1):
            assert taken(stream, number, records[number]) == bytes_of(source, records[number])


def test_a_damaged_record_is_named_and_read_again() -> None:
    plain = pages(3, 3, 3)
    source = source_of(plain)
    records = [record._replace(crc=zlib.crc32(bytes_of(source, record))) for record in plain]
    whole = source.data
    source.data = whole[: records[1].offset + 5] + b"?" + whole[records[1].offset + 6 :]
    with LayerStream(source, records, buffers=2, disk=disk()) as stream:
        stream.take(0)
        for _ in range(2):
            with pytest.raises(DamagedFileError, match=r"weights.safetensors: layer.1 has"):
                stream.take(1)
        until(lambda: stream.read_bytes == 5 * 3 * PAGE)
        source.data = whole
        with pytest.raises(DamagedFileError):  # it was read again before that
            stream.take(1)
        assert taken(stream, 1, records[1]) == bytes_of(source, records[1])


def test_two_threads_pass_in_turn() -> None:
    records, source = scripted(2, 1, 3)
    wrong: list[int] = []
    with LayerStream(source, records, buffers=2, disk=disk()) as stream:

        def passes() -> None:
            for _ in range(20):
                with stream.passing():
                    for number, record in enumerate(records):
                        if taken(stream, number, record) != bytes_of(source, record):
                            wrong.append(number)

        threads = [threading.Thread(target=passes) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert stream.passes == 60
        assert wrong == []
        # 60 passes, and what is read ahead: no pass has read anything twice.
        assert stream.read_bytes <= 60 * 6 * PAGE + 6 * PAGE


def test_a_wait_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_WARN_AFTER", 0.02)
    records = [StreamRecord(n << 20, 1 << 20, None, f"model.layers.{n + 7}") for n in range(2)]
    source = source_of(records)
    source.open.clear()  # before there are readers
    with LayerStream(source, records, buffers=2, disk=disk(1, 1 << 19)) as stream:
        threading.Timer(0.1, source.open.set).start()
        with caplog.at_level(logging.WARNING):
            stream.take(0)
            stream.take(1)
        source.open.clear()
        threading.Timer(0.05, source.open.set).start()
        stream.take(0)
    assert 0.05 <= stream.waited < 0.6
    [line] = [record.getMessage() for record in caplog.records]  # the second was within a minute
    begin, _, end = line.partition(" MB of model.layers.7 of weights.safetensors after ")
    assert begin.startswith("waiting for the disk: ")
    assert begin.endswith(" of 1")
    assert end.endswith(" s")


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_records_that_lie_elsewhere_are_not_read(buffers: int) -> None:
    for pinned in ([1, 3], [0], [0, 1, 2, 3, 4]):
        records, source = scripted(1, 2, 1, 3, 1)
        with LayerStream(source, records, buffers=buffers, disk=disk()) as stream:
            with stream.passing():
                stream.take(1)  # a cycle has begun
            stream.pin(pinned)
            for _ in range(3):
                with stream.passing():
                    for number, record in enumerate(records):
                        if number in pinned:
                            assert stream.take(number) == buffers, pinned
                        else:
                            assert taken(stream, number, record) == bytes_of(source, record), pinned


def test_close_ends_a_take_and_later_takes() -> None:
    records, source = scripted(2, 2)
    source.open.clear()
    stream = LayerStream(source, records, buffers=2, disk=disk(1))
    threading.Timer(0.02, stream.close).start()
    threading.Timer(0.04, source.open.set).start()
    with pytest.raises(ClosedError, match="closed"):
        stream.take(0)
    with pytest.raises(ClosedError, match="closed"), stream.passing():
        pass
    stream.close()


def test_readers_may_be_stuck(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_CLOSING", 0.02)
    records, source = scripted(1, 1)
    source.open.clear()
    stream = LayerStream(source, records, buffers=2, disk=disk(2))
    source.stalled.wait()
    stream.close()
    assert ["does not respond" in record.getMessage() for record in caplog.records] == [True]
    source.open.set()
    until(lambda: not readers())


def test_an_interrupt_ends_a_wait_at_once_and_the_next_pass_is_right() -> None:
    records, source = scripted(1, 1, 1)
    with LayerStream(source, records, buffers=2, disk=disk()) as stream:
        stream.take(0)
        stream.take(1)
        until(lambda: stream.read_bytes == 3 * PAGE)
        source.open.clear()
        stream.take(2)
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt), stream.passing():
            stream.take(0)
        assert time.monotonic() - began < 1
        source.open.set()
        with stream.passing():
            for number, record in enumerate(records):
                assert taken(stream, number, record) == bytes_of(source, record)


def test_a_child_by_fork_is_refused_and_ends_cleanly() -> None:
    records, source = scripted(1, 1)
    with LayerStream(source, records, buffers=2, disk=disk()) as stream:
        stream.take(0)
        with stream._readers._news:  # as any thread may hold it when a process forks
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    stream.take(1)
                except ClosedError:
                    stream._end()
                    status = 0
                finally:
                    os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert taken(stream, 1, records[1]) == bytes_of(source, records[1])


def test_records_that_are_no_whole_pages_are_a_bug() -> None:
    for offset, length in ((1, PAGE), (0, PAGE + 1), (0, 0)):
        records = [StreamRecord(offset, length, None, "layer")]
        with pytest.raises(IntegrityError, match="whole pages"):
            LayerStream(ScriptedSource(bytes(PAGE)), records, buffers=2, disk=disk())


@pytest.mark.parametrize("folder", [None, "/dev/shm"], ids=["disk", "memory"])
def test_a_real_file_streams_until_it_is_cut(tmp_path: Path, folder: str | None) -> None:
    records = pages(300, 20, 7)
    data = source_of(records).data
    path = (Path(folder) if folder else tmp_path) / f"specinfer-test-{os.getpid()}"
    path.write_bytes(data)
    try:
        with LayerStream(StreamSource(path), records, buffers=2, disk=disk(3, 16 * PAGE)) as stream:
            for _ in range(3):
                with stream.passing():
                    for number, record in enumerate(records):
                        end = record.offset + record.length
                        assert taken(stream, number, record) == data[record.offset : end]
            os.truncate(path, 50 * PAGE)
            ending = pytest.raises(ModelFileError, match=r"(ended at byte|bytes) .*while it was read; load")
            with ending, stream.passing():
                streams.pass_over(stream, records)
    finally:
        path.unlink()


STREAMING = """
import os, sys
from pathlib import Path
if sys.argv[2] == "buffered":
    del os.O_DIRECT
from specinfer.kernels.disk import DiskRate, StreamSource
from specinfer.models.stream import LayerStream, StreamRecord
source = StreamSource(Path(sys.argv[1]))
records = [StreamRecord(n << 23, 1 << 23, None, "layer") for n in range(source.size >> 23)]
with LayerStream(source, records, buffers=2, disk=DiskRate(2, 1 << 20, 1e9, source.direct)) as stream:
    for _ in range(3):
        for number in range(len(records)):
            assert stream.buffers[stream.take(number)][0] == number
"""


@pytest.mark.parametrize("how", ["direct", "buffered"])
def test_memory_is_that_of_the_buffers_however_large_the_file(tmp_path: Path, how: str) -> None:
    path, root = tmp_path / "weights", Path(__file__).parents[3]
    with path.open("wb") as file:
        for number in range(16):
            file.write(bytes([number]) * (1 << 23))
        os.fsync(file.fileno())  # the page cache drops no page that is not on the disk yet
    try:
        with memory_group(112 << 20) as group:
            ran = group.run([sys.executable, "-c", STREAMING, str(path), how], cwd=root)
    except NoGroupError as error:
        pytest.skip(str(error))
    assert (ran.returncode, ran.stderr, ran.oom_kills) == (0, "", 0)
    assert ran.peak_resident >= 16 << 20
    assert ran.peak_usage < 96 << 20, "of a file of 128 MiB, under a limit of 112"
