"""Putting a file under its final name: only whole, only with the right checksum."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from specinfer.errors import ChecksumError, DownloadError
from specinfer.files import NewFile
from specinfer.hub.catalogue import CatalogueEntry
from specinfer.progress import Progress, format_bytes

BLOCK = 1 << 22  # bytes read at once


def install_stream(source: IO[bytes], entry: CatalogueEntry, target: Path, progress: Progress) -> None:
    """Write `source` to `target`, hashing on the way.

    No more is written than the entry's size, however much would come. Raises ChecksumError or, on a full
    disk, DownloadError; nothing is left then.
    """
    digest, left = hashlib.sha256(), entry.size
    with disk_errors(target.parent), NewFile(target, 0o644) as new:
        while block := source.read(min(BLOCK, left + 1)):
            left -= len(block)
            if left < 0:
                raise ChecksumError(
                    f"{entry.file} is longer than the {entry.size} bytes the catalogue names; "
                    "nothing was kept: pull again, or report it if it stays so"
                )
            new.write(block)
            digest.update(block)
            progress.advance(len(block))
        _check(digest.hexdigest(), entry)
        new.keep(through_power_cuts=True)


def install_file(source: Path, entry: CatalogueEntry, target: Path) -> None:
    """Move a finished download, on the same disk, to `target` after checking it.

    Raises ChecksumError; the download is removed then.
    """
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    try:
        _check(digest, entry)
    except ChecksumError:
        source.unlink()
        raise
    os.replace(source, target)


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise DownloadError when the disk that holds `folder` has fewer than `needed` bytes free."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DownloadError(
            f"{what} needs {format_bytes(needed)} in {folder}, where {format_bytes(free)} are free; "
            "make room, or move the cache with SPECINFER_CACHE (HF_HOME for hub names)"
        )


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full or unwritable disk inside the block into a DownloadError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(
                f"the disk of {folder} is full; the partial file was removed: make room, or move the cache "
                "with SPECINFER_CACHE, and pull again"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise DownloadError(
                f"cannot write to {folder} ({error.strerror}); "
                "set SPECINFER_CACHE to a folder that can be written"
            ) from error
        raise


def _check(sha256: str, entry: CatalogueEntry) -> None:
    if sha256 != entry.sha256:
        raise ChecksumError(
            f"{entry.file} has sha256 {sha256}, the catalogue names {entry.sha256}; "
            "nothing was kept: pull again, or report it if it stays so"
        )
