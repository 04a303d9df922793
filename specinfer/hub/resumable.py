"""A download over HTTP that goes on where an earlier one was cut off.

What has arrived lies in NAME.partial. A later try asks for the bytes behind it (RFC 9110, section 14)
and appends them; a server that sends everything instead is heard from the start. No message here holds
the URL, which may carry credentials.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

from specinfer.hub.catalogue import SourceUnavailableError
from specinfer.hub.verified_file import disk_errors
from specinfer.progress import Progress, format_bytes

PAUSES = (1.0, 2.0, 4.0, 8.0)  # seconds before each new try after the first
TIMEOUT_SECONDS = 60.0  # without a byte; then the connection counts as broken
BLOCK = 1 << 18  # bytes asked for at once
_TRANSIENT = (408, 425, 429)  # statuses below 500 that a later try may not meet
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class UnopenableError(Exception):
    """The URL cannot be opened this way: its scheme, certificate or authentication, or nobody answers."""


class _BrokenError(Exception):
    """A try ended before the file was whole; the message says why."""


def partial_of(target: Path) -> Path:
    """Where the bytes lie that have arrived of `target`."""
    return target.with_name(target.name + ".partial")


def download(url: str, target: Path, sha256: str | None, progress: Progress, label: str) -> None:
    """Fetch `url` to `target` through `partial_of(target)`, going on from what lies there.

    A connection that breaks is opened again a few times. Whatever ends the download but a full disk or
    a wrong checksum leaves the partial file for the next call, an interrupt too. `sha256` of the whole
    file, in hex, is checked when given.
    Raises UnopenableError (nothing arrived; another way may do), SourceUnavailableError (the connection
    broke too often, or the checksum is wrong), DownloadError (disk).
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise UnopenableError("not an HTTP address")
    partial = partial_of(target)
    # Bytes of an earlier pull prove that the URL can be opened, so it is worth another try.
    attempt = _Attempts(url, partial, progress, label, known_to_open=partial.exists())
    try:
        attempt.until_whole()
    finally:
        progress.finish()
    if sha256 is not None:
        with partial.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            partial.unlink()
            raise SourceUnavailableError(
                f"{target.name} arrived damaged and was deleted: its sha256 is {found}, "
                f"the registry names {sha256}; pull again"
            )
    os.replace(partial, target)


class _Attempts:
    """The tries at one file; they share the partial file and the progress bar."""

    def __init__(self, url: str, partial: Path, progress: Progress, label: str, known_to_open: bool) -> None:
        self.url = url
        self.partial = partial
        self.progress = progress
        self.label = label
        self.known_to_open = known_to_open
        self.opened = False
        self.total: int | None = None  # bytes of the whole file, once a server has said
        self.shown: int | None = None  # bytes the bar stands at, None before there is one

    def until_whole(self) -> None:
        """Try until the partial file is whole, pausing longer each time."""
        for pause in (*PAUSES, None):
            try:
                self._fetch_rest()
                return
            except _BrokenError as error:
                if not self.opened and not (self.known_to_open and pause is not None):
                    raise UnopenableError(str(error)) from error
                if pause is None:
                    raise SourceUnavailableError(self._gave_up(str(error))) from error
                time.sleep(pause)

    def _fetch_rest(self) -> None:
        have = self.partial.stat().st_size if self.partial.exists() else 0
        response = self._open(have)
        if response is None:
            return
        with response:
            self.opened = True
            start = self._where_it_starts(response, have)
            self._show_from(start)
            self._append(response, start)
        size = self.partial.stat().st_size
        if self.total is not None and size < self.total:
            raise _BrokenError("the connection ended early")

    def _open(self, have: int) -> http.client.HTTPResponse | None:
        """The answer to a request for what follows `have` bytes; None when nothing does."""
        headers = {"Range": f"bytes={have}-"} if have else {}
        request = urllib.request.Request(self.url, headers=headers)
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
            return response
        except urllib.error.HTTPError as error:
            with error:
                if have and error.code == 416:  # range not satisfiable
                    if error.headers.get("Content-Range") == f"bytes */{have}":
                        return None  # it was cut off after the last byte
                    self.partial.unlink()
                    raise _BrokenError("what had arrived is longer than the file") from error
                if self.opened or error.code >= 500 or error.code in _TRANSIENT:
                    raise _BrokenError(f"the server answered with status {error.code}") from error
                raise UnopenableError(f"status {error.code}") from error
        except (ValueError, http.client.InvalidURL) as error:
            raise UnopenableError(type(error).__name__) from error
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise UnopenableError("certificate") from error
            raise _BrokenError(_cause(reason)) from error

    def _where_it_starts(self, response: http.client.HTTPResponse, have: int) -> int:
        """The offset of the answer's first byte: `have`, or 0 where the server knows no ranges."""
        if response.status == 200:
            length = response.headers.get("Content-Length", "")
            self.total = int(length) if length.isdecimal() else None
            return 0
        match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if response.status != 206 or match is None or int(match[1]) != have:
            self.partial.unlink(missing_ok=True)  # ask for everything next time
            raise _BrokenError("the server sent another part of the file than it was asked for")
        self.total = None if match[2] == "*" else int(match[2])
        return have

    def _show_from(self, start: int) -> None:
        if self.shown is None or self.shown > start:
            self.progress.start(self.total, self.label)
            self.shown = 0
        self.progress.advance(start - self.shown)
        self.shown = start

    def _append(self, response: http.client.HTTPResponse, start: int) -> None:
        assert self.shown == start
        with disk_errors(self.partial.parent):
            try:
                with self.partial.open("ab" if start else "wb") as out:
                    while block := _read(response):
                        out.write(block)
                        self.shown += len(block)
                        self.progress.advance(len(block))
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self.partial.unlink()  # leave the disk no fuller than it was
                raise

    def _gave_up(self, reason: str) -> str:
        have = self.partial.stat().st_size if self.partial.exists() else 0
        of = "" if self.total is None else f" of {format_bytes(self.total)}"
        kept = "; the next pull goes on from there" if have else ""
        return (
            f"the download broke {len(PAUSES) + 1} times, at last with {format_bytes(have)}{of} here "
            f"({reason}){kept}"
        )


def _read(response: http.client.HTTPResponse) -> bytes:
    # read1 hands over what has come, where read would lose it when the connection breaks within a block.
    try:
        return response.read1(BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenError(_cause(error)) from error


def _cause(error: BaseException | str) -> str:
    """Why a connection failed, in words that cannot hold the URL."""
    if isinstance(error, TimeoutError):
        return f"nothing came for {TIMEOUT_SECONDS:.0f} seconds"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (
        "the connection ended early" if isinstance(error, BaseException) else "the server cannot be reached"
    )
