"""Calls a function when files below a folder change, by looking again and again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path


class Kind(Enum):
    CREATED = "created"
    MODIFIED = "modified"
    DELETED = "deleted"


@dataclass(frozen=True)
class Change:
    kind: Kind
    path: Path

    def __str__(self) -> str:
        return f"{self.kind.value} {self.path}"


Snapshot = dict[Path, tuple[int, int]]


class Watcher:
    """Watches one folder and everything below it."""

    def __init__(self, root: Path, interval: float = 0.5) -> None:
        if not root.is_dir():
            raise NotADirectoryError(root)
        self.root = root
        self.interval = interval
        self._stopped = False
        self._last = self._take()

    def poll(self) -> list[Change]:
        """What changed since the last call, sorted by path."""
        before, now = self._last, self._take()
        self._last = now
        changes = [Change(Kind.CREATED, path) for path in now.keys() - before.keys()]
        changes += [Change(Kind.DELETED, path) for path in before.keys() - now.keys()]
        changes += [
            Change(Kind.MODIFIED, path) for path in now.keys() & before.keys() if now[path] != before[path]
        ]
        return sorted(changes, key=lambda change: change.path)

    def run(self, on_change: Callable[[list[Change]], None]) -> None:
        """Poll until `stop` is called; `on_change` sees the changes of a round together."""
        while not self._stopped:
            changes = self.poll()
            if changes:
                on_change(changes)
            time.sleep(self.interval)

    def stop(self) -> None:
        self._stopped = True

    def _take(self) -> Snapshot:
        snapshot = {}
        for path in self._files():
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            snapshot[path] = (status.st_mtime_ns, status.st_size)
        return snapshot

    def _files(self) -> Iterator[Path]:
        for path in self.root.rglob("*"):
            if path.is_file():
                yield path
