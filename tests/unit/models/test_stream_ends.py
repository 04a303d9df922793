"""How streams end: by close, interrupts, as garbage, in a child by fork; and real files."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.machines.memory_group import NoGroupError, memory_group
from specinfer.errors import ClosedError, IntegrityError, ModelFileError
from specinfer.kernels.disk import PAGE, StreamSource
from specinfer.models import stream as module
from specinfer.models.stream import LayerStream, StreamRecord
from tests.streams import ScriptedSource, bytes_of, disk, pages, pass_over, readers, source_of, taken, until


@pytest.fixture(autouse=True)
def _no_reader_is_left() -> Iterator[None]:
    yield
    until(lambda: not readers())


def test_close_ends_a_take_and_later_takes() -> None:
    records = pages(2, 2)
    source = source_of(records)
    source.open.clear()
    stream = LayerStream(source, records, buffers=2, disk=disk(1))
    threading.Timer(0.02, stream.close).start()
    threading.Timer(0.04, source.open.set).start()
    with pytest.raises(ClosedError, match="closed"):
        stream.take(0)
    with pytest.raises(ClosedError, match="closed"), stream.passing():
        pass
    stream.close()


def test_readers_that_are_stuck_are_left_behind_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_CLOSING", 0.02)
    records = pages(1, 1)
    source = source_of(records)
    source.open.clear()
    stream = LayerStream(source, records, buffers=2, disk=disk(2))
    source.stalled.wait()
    stream.close()
    assert ["does not respond" in record.getMessage() for record in caplog.records] == [True]
    source.open.set()
    until(lambda: not readers())


def test_an_interrupt_ends_a_wait_at_once_and_the_next_pass_is_right() -> None:
    records = pages(1, 1, 1)
    source = source_of(records)
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
    records = pages(1, 1)
    source = source_of(records)
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
                pass_over(stream, records)
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
