"""BatchAnswers: the output file of a batch, one JSON line per answer."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from specinfer.errors import UserError
from specinfer.files import NewFile

_BEGINNING: Final = b'{"id": "batch_req_'  # of every line
_FAILED: Final = 500  # HTTP status of server errors; their requests are sent again


class BatchAnswers:
    """An output file that a later run can resume from; a context manager.

    Opening it removes a torn last line, and answers that are server errors. Raises UserError if the file is
    not the output of a batch, or another run has it open, and OSError.
    """

    def __init__(self, path: Path) -> None:
        self.names: set[str] = set()  # custom ids with an answer
        self.lines: set[int] = set()  # input line numbers of errors without a custom id
        self.refused = 0  # number of answers that are errors
        self._path = path
        self._file = self._open()
        try:
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def __len__(self) -> int:
        """The number of answers in the file."""
        return len(self.names) + len(self.lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)

    def add(
        self,
        name: str | None,
        *,
        line: int,
        response: Mapping[str, Any] | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> None:
        """Append the answer to the request `name`, which is in line `line` of the input."""
        told = None if error is None else {**error, "line": line}
        record = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": name,
            "response": response,
            "error": told,
        }
        left = memoryview(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        while left:
            left = left[os.write(self._file, left) :]
        self._count(record)

    def _open(self) -> int:
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise UserError(f"{self._path} is no plain file; a run needs one to go on from")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise UserError(f"another run has {self._path} open; wait for it, or give another file") from None
        except OSError:
            pass  # a disk without locks
        return file

    def _read(self) -> None:
        """Read the answers in the file, and remove torn and failed ones."""
        whole, failed = 0, False
        for number, raw in enumerate(self._raw_lines(), start=1):
            record = _record(raw)
            if record is None:
                if raw.endswith(b"\n") or not (raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw)):
                    raise UserError(
                        f"{self._path} has no answer of a batch in line {number}; give another file"
                    )
                os.ftruncate(self._file, whole)  # a torn line
                break
            whole += len(raw)
            if _has_failed(record):
                failed = True
            else:
                self._count(record)
        if failed:
            self._drop_failed()

    def _drop_failed(self) -> None:
        with NewFile(self._path, mode=0o666 & os.fstat(self._file).st_mode) as new:
            for raw in self._raw_lines():
                record = _record(raw)
                if record is not None and not _has_failed(record):
                    new.write(raw)
            new.keep()
        os.close(self._file)
        self._file = self._open()

    def _raw_lines(self) -> Iterator[bytes]:
        with open(self._path, "rb") as file:
            yield from file

    def _count(self, record: Mapping[str, Any]) -> None:
        if record["custom_id"] is None:
            self.lines.add(record["error"]["line"])
        else:
            self.names.add(record["custom_id"])
        self.refused += record["error"] is not None


def _record(raw: bytes) -> dict[str, Any] | None:
    """The answer in a line; None if the line is not one."""
    if not raw.endswith(b"\n"):
        return None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    match found:
        case {"custom_id": str(), "response": _, "error": _} | {"custom_id": None, "error": {"line": int()}}:
            return dict(found)
    return None


def _has_failed(record: Mapping[str, Any]) -> bool:
    response = record["response"]
    return response is not None and (response["status_code"] >= _FAILED or response["status_code"] == 429)
