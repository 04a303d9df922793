"""PromptFiles: files of a prompt store, found, read and written in threads that no step waits for.

A file has one block's keys and values, or one checkpoint's recurrent states. It is named by the hash of the
text, in a folder for engines with one fingerprint. It has a checksum of its name and content, and is renamed
to its name once it is complete. Several processes may use one folder: a file may vanish at any time.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Final

from specinfer.progress import format_bytes

_LOG = logging.getLogger(__name__)
_FOLDER: Final = "specinfer-prompts-"  # other entries of the store's folder are not touched
_MAX_WAITING: Final = 1 << 28  # bytes of files that wait to be written, and of those read ahead
_PART: Final = 16  # one over this part of the size is made free at once
_SPARED: Final = 1 << 30  # bytes of a disk that stay free, of a small one a part
_MAX_LOST: Final = 1 << 16  # names of files that were not written, the last ones
_SKEW: Final = 60.0  # seconds that another machine's clock may be ahead
_AHEAD: Final = 8  # files that the disk reads at once
_SUM: Final = 32  # bytes of the checksum at the beginning of a file
_CLOSING: Final = 10.0  # seconds that all threads together have for their ends


class Lookup:
    """The question which one of some names, of a text's files, is the first that has a file."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        self.place: int | None = None  # place of that name; None: there is no file
        self.over = False  # set by the engine, once it has no more of the text to load
        self._answered = threading.Event()

    @property
    def left(self) -> bool:
        """True once the finder is done with it."""
        return self._answered.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the answer; returns whether it is there."""
        return self._answered.wait(seconds)

    def answer(self, place: int | None) -> None:
        """Set the answer, and wake the other thread."""
        self.place = place
        self._answered.set()


class Reading:
    """Files that the reader reads in order, up to the first one that it cannot use."""

    def __init__(self, names: Sequence[str], optional: tuple[str, ...] = ()) -> None:
        """Files with these `optional` ends are read as empty ones if they are not there."""
        self.names, self.optional = names, optional
        self.done = False  # also set by the engine, to stop the reader
        self.left = False  # True once the reader is done with it
        self._ready: list[bytearray] = []
        self._changed = threading.Condition()

    def take(self, wait: float) -> list[bytearray]:
        """Return the bodies that are ready; waits at most `wait` seconds for the first one."""
        with self._changed:
            if not self._ready and not self.done:
                self._changed.wait(wait)
            ready, self._ready = self._ready, []
            self._changed.notify_all()
        return ready

    def put(self, body: bytearray) -> bool:
        """Add a body, and wait until there is room for another; returns False if the reader has to stop."""
        with self._changed:
            self._ready.append(body)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.done or sum(map(len, self._ready)) < _MAX_WAITING)
        return not self.done

    def end(self) -> None:
        """Set `done`, and wake the other thread."""
        with self._changed:
            self.done = True
            self._changed.notify_all()


class PromptFiles:
    """The files of one engine; `counts` has numbers of files and bytes by event."""

    def __init__(self, root: Path, size: int, fingerprint: str) -> None:
        """Make the folder, of at most `size` bytes with those of other fingerprints; raises OSError."""
        self._root, self._size = root, size
        self._folder = root / f"{_FOLDER}{fingerprint[:32]}"
        others = [path for path in root.glob(f"{_FOLDER}*") if path != self._folder]
        self._folder.mkdir(0o700, parents=True, exist_ok=True)  # the numbers reveal texts
        if others:
            _LOG.info(
                "%s also has prompts of other models, options, machines or versions, which are not read", root
            )
        # The file of this writer alone, also if other machines use the folder.
        self._partial = self._folder / f"{os.urandom(8).hex()}.partial"
        self.counts: Counter[str] = Counter()
        self.lost: dict[str, None] = {}  # names of files that were not written
        self._said: set[str] = set()
        self._room = 0  # bytes that may be written before the folder is searched for old files
        self._waiting = 0  # bytes in `_writes`
        self._changed = threading.Condition()  # guards the fields below, `_waiting` and `lost`
        self._writes: deque[tuple[str, bytearray]] = deque()
        self._readings: deque[Reading] = deque()
        self._lookups: deque[Lookup] = deque()
        self._closed = False
        self._threads = [
            threading.Thread(target=run, name=f"specinfer-prompts-{run.__name__}", daemon=True)
            for run in (self._run_writer, self._run_reader, self._run_finder)
        ]
        for thread in self._threads:
            thread.start()

    def has(self, name: str) -> bool:
        """Return whether there is a file of this name, which may be damaged; a dead disk hangs here."""
        return os.path.exists(self._folder / name)  # Path.exists raises without rights

    def find(self, names: Sequence[str]) -> Lookup:
        """Begin to look for the first of these names that has a file."""
        lookup = Lookup(names)
        with self._changed:
            self._lookups.append(lookup)
            self._changed.notify_all()
        return lookup

    def has_room(self, name: str, size: int) -> bool:
        """Return whether a file of `size` bytes may wait to be written; it is lost if not."""
        if self._waiting + size <= _MAX_WAITING:
            return True
        self.counts["lost"] += 1
        self._lose(name)
        return False

    def write(self, name: str, body: bytearray) -> None:
        """Write a file behind the engine's back; `body` may not change any more."""
        with self._changed:
            self._waiting += len(body)
            self.lost.pop(name, None)
            self._writes.append((name, body))
            self._changed.notify_all()

    def read(self, names: Sequence[str], optional: tuple[str, ...] = ()) -> Reading:
        """Begin to read files."""
        reading = Reading(names, optional)
        with self._changed:
            self._readings.append(reading)
            self._changed.notify_all()
        return reading

    def stop(self) -> None:
        """End the threads when all is written, without waiting for that."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads; waits some seconds for the last writes."""
        self.stop()
        end = time.monotonic() + _CLOSING
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _run_finder(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lookups or self._closed)
                if self._closed:
                    return
                lookup = self._lookups.popleft()
            lookup.answer(next((place for place, name in enumerate(lookup.names) if self.has(name)), None))

    def _run_writer(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._writes or self._closed)
                if not self._writes:
                    return
                name, body = self._writes.popleft()
            try:
                self._write(name, body)
            except OSError as error:
                self.counts["failed"] += 1
                self._lose(name)
                self.say("cannot be written, and prompts end with this process", error)
            with self._changed:
                self._waiting -= len(body)

    def _lose(self, name: str) -> None:
        with self._changed:
            self.lost[name] = None
            if len(self.lost) > _MAX_LOST:
                del self.lost[next(iter(self.lost))]

    def _write(self, name: str, body: bytearray) -> None:
        path = self._folder / name
        if path.exists():
            os.utime(path)
            return
        if (size := _SUM + len(body)) > self._room:
            self._evict(size)
        partial = self._partial
        try:
            with partial.open("wb") as file:
                file.write(_sum(name, body))
                file.write(body)
            os.replace(partial, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink()
            if error.errno == errno.ENOSPC:  # others have filled the disk
                self._room = 0
            raise
        self._room -= size
        self.counts["written"] += 1
        self.counts["written_bytes"] += size

    def _evict(self, needed: int) -> None:
        """Remove the least recently used files until a part of the size is free.

        A disk with less room makes the size less. Raises OSError if `needed` bytes do not fit then.
        """
        files: list[tuple[float, int, Path]] = []
        latest = time.time() + _SKEW
        for path in self._root.glob(f"{_FOLDER}*/*"):
            with contextlib.suppress(OSError):  # another process evicted it, or its user has no rights
                found = path.stat()
                # A later time is of a clock that was wrong; each use of the file corrects it.
                used = found.st_mtime if found.st_mtime < latest else 0.0
                files.append((used, found.st_size, path))
        left, disk = sum(size for _, size, _ in files), shutil.disk_usage(self._root)
        most = min(self._size, left + disk.free - min(_SPARED, disk.total // _PART))
        if needed > most:
            raise OSError(errno.ENOSPC, f"{format_bytes(disk.free)} are free on its disk")
        self._room = max(most // _PART, needed)
        for _, size, path in sorted(files):
            if left <= most - self._room:
                break
            if most < self._size:
                self.say("goes early, as prompt_store_size is not free on its disk", format_bytes(disk.free))
            with contextlib.suppress(OSError):  # as above, or no file
                path.unlink()
                self.counts["evicted"] += 1
            left -= size

    def _run_reader(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._readings or self._closed)
                if self._closed:
                    for reading in self._readings:
                        reading.end()
                    return
                reading = self._readings.popleft()
            for name in reading.names[:_AHEAD]:
                self._advise(name)
            for place, name in enumerate(reading.names):
                for ahead in reading.names[place + _AHEAD :][:1]:  # while the sum of this one is computed
                    self._advise(ahead)
                body = self._read(name)
                if body is None and name.endswith(reading.optional):
                    body = bytearray()
                if body is None or not reading.put(body):
                    break
            reading.end()
            reading.left = True

    def _advise(self, name: str) -> None:
        """Let the system begin to read a file, if there is one."""
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError), (self._folder / name).open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def _read(self, name: str) -> bytearray | None:
        """Return a file's content, or None if there is no such file, or a damaged one."""
        path = self._folder / name
        try:
            with path.open("rb", buffering=0) as file:
                kept, size = file.read(_SUM), os.fstat(file.fileno()).st_size - _SUM
                body = bytearray(max(0, min(size, _MAX_WAITING + 1)))  # a longer one is damaged
                view = memoryview(body)
                while view and (count := file.readinto(view)):
                    view = view[count:]
            if not view and kept == _sum(name, body):
                self.counts["read"] += 1
                self.counts["read_bytes"] += _SUM + len(body)
                with contextlib.suppress(OSError):  # a folder without rights to write
                    os.utime(path)
                return body
            self.counts["wrong"] += 1
            self.say("has a wrong checksum; the prompt is computed", path)
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            self.counts["failed"] += 1
            self.say("cannot be read; the prompt is computed", error)
        return None

    def say(self, fault: str, detail: object) -> None:
        """Log a kind of fault once."""
        if fault not in self._said:
            self._said.add(fault)
            _LOG.warning("a file of the prompt store %s: %s; further ones are counted only", fault, detail)


def _sum(name: str, body: bytearray) -> bytes:
    found = sha256(name.encode())
    found.update(body)
    return found.digest()
