"""Batch runs: answer a file of requests in OpenAI's batch format, without a socket.

Each input line is an object with custom_id, method, url and body; each answer is an output line.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import stat
import uuid
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

import httpx
from pydantic import ConfigDict
from pydantic_core import to_json
from starlette.types import ASGIApp

from specinfer.config import EngineConfig
from specinfer.errors import UserError
from specinfer.files import NewFile
from specinfer.hub.resolution import resolve
from specinfer.progress import Progress
from specinfer.serve.backend.engine_child import EngineChild
from specinfer.serve.config import ServeConfig, ServedModel
from specinfer.serve.fields.body import FieldPolicy, Fields
from specinfer.serve.http.access import Keys
from specinfer.serve.http.api_error import ApiError
from specinfer.serve.startup import open_pool

_OPEN_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
_BEGINNING: Final = b'{"id": "batch_req_'  # of every line
_FAILED: Final = 500  # HTTP status of server errors; their requests are sent again

_AHEAD: Final = 2  # requests beyond a full batch, so that one is ready when another ends


class BatchAnswers:
    """An output file that a later run can resume from; a context manager.

    Opening it removes a torn last line, and answers whose requests are sent again: server errors, and errors
    of lines without a custom id. Raises UserError if the file is not the output of a batch, or another run
    has it open, and OSError.
    """

    def __init__(self, path: Path) -> None:
        self.names: set[str] = set()  # custom ids with an answer
        self.refused = 0  # number of answers that are errors
        self._count = 0
        self._path = path
        self._file = os.open(path, _OPEN_FLAGS, 0o666)
        try:
            self._lock()
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def __len__(self) -> int:
        """The number of answers in the file."""
        return self._count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
        record = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": name,
            "response": response,
            "error": None if error is None else {**error, "line": line},
        }
        left = memoryview(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        while left:
            left = left[os.write(self._file, left) :]
        self._add(record)

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise UserError(
                f"{self._path} is not a regular file, which a run needs to resume; give another file"
            )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run has {self._path} open; wait until it ends, or give another file"
            ) from None
        except OSError:
            pass  # a disk without locks

    def _read(self) -> None:
        """Read the answers in the file, and remove the others."""
        again, whole = False, 0
        for number, raw in enumerate(self._raw_lines(), start=1):
            record = _record(raw)
            if record is None and not _is_torn(raw):
                raise UserError(
                    f"line {number} of {self._path} is not the answer of a batch; give another file"
                )
            if record is None:
                break  # the last line
            whole += len(raw)
            if _is_sent_again(record):
                again = True
            else:
                self._add(record)
        if again:
            self._rewrite()
        else:
            os.ftruncate(self._file, whole)  # also where the disk is full

    def _rewrite(self) -> None:
        with NewFile(self._path, mode=0o666 & os.fstat(self._file).st_mode) as new:
            for raw in self._raw_lines():
                if (record := _record(raw)) and not _is_sent_again(record):
                    new.write(raw)
            new.keep()
        old, self._file = self._file, os.open(self._path, _OPEN_FLAGS, 0o666)
        os.close(old)
        self._lock()

    def _raw_lines(self) -> Iterator[bytes]:
        with open(self._path, "rb") as file:
            yield from file

    def _add(self, record: Mapping[str, Any]) -> None:
        if record["custom_id"] is not None:
            self.names.add(record["custom_id"])
        self._count += 1
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
        case {"custom_id": str() | None, "response": _, "error": _}:
            return dict(found)
    return None


def _is_torn(raw: bytes) -> bool:
    return not raw.endswith(b"\n") and (raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw))


def _is_sent_again(record: Mapping[str, Any]) -> bool:
    status = 0 if record["response"] is None else record["response"]["status_code"]
    return record["custom_id"] is None or status >= _FAILED or status == 429


class BatchLine(Fields):
    """One request of a batch."""

    custom_id: str
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
    body: dict[str, Any]


class _Named(Fields):
    """The custom_id of a line that is not a valid request."""

    model_config = ConfigDict(extra="ignore")

    custom_id: str


@dataclass(frozen=True, slots=True)
class _OpenLine:
    """An input line without an answer."""

    number: int
    name: str | None  # custom_id, if the line has one
    request: BatchLine | None  # None if the line is not a valid request
    fault: str = ""  # error message of a line that is not valid


class BatchInput:
    """The input file, read line by line; raises UserError if the file does not exist, and OSError."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        if not path.is_file():
            raise UserError(f"{path} is not a file; give one with a request in each line")
        self._path = path
        self._policy = FieldPolicy(max_bytes=max_bytes)  # maximum of one request
        self.count = sum(1 for raw in self._lines() if raw.strip())

    def left(self, answers: BatchAnswers) -> Iterator[_OpenLine]:
        """The lines without an answer, in order."""
        seen: dict[str, int] = {}
        for number, raw in enumerate(self._lines(), start=1):
            if not raw.strip():
                continue
            line = self._read(number, raw)
            if line.name is None:
                yield line
            elif (first := seen.setdefault(line.name, number)) != number:
                fault = f"custom_id is {line.name[:100]!r}, like that of line {first}; rename it"
                yield _OpenLine(number, None, None, fault)
            elif line.name not in answers.names:
                yield line

    def _lines(self) -> Iterator[bytes]:
        """The lines of the file, without the byte order mark that some editors write."""
        with self._path.open("rb") as file:
            if file.read(len(BOM_UTF8)) != BOM_UTF8:
                file.seek(0)
            yield from file

    def _read(self, number: int, raw: bytes) -> _OpenLine:
        try:
            request = self._policy.parse(BatchLine, raw)
            if request.body.get("stream"):
                raise ApiError("body.stream is true, but a batch has no streams; remove it")
        except ApiError as error:
            try:
                name = self._policy.parse(_Named, raw).custom_id
            except ApiError:
                name = None
            return _OpenLine(number, name, None, error.body["error"]["message"])
        return _OpenLine(number, request.custom_id, request)


def run_batch(
    config: ServeConfig,
    engine: EngineConfig,
    child: EngineChild,
    source: BatchInput,
    answers: BatchAnswers,
    progress: Progress,
) -> None:
    """Answer all requests of `source` without an answer, with the engine in `child`.

    Each answer is written when it is complete, so an interrupted run loses only requests in progress. Raises
    UserError if the engine cannot start, and OSError if an answer cannot be written.
    """
    files = resolve(engine.model, progress=progress)
    at_once = engine.scheduler.max_batch_size * config.replicas + _AHEAD
    # Each request may have max_n prompts of max_n completions; the queue must hold all of them.
    config = replace(config, max_waiting=at_once * config.max_n**2, max_wait=0.0, page=False)

    async def run() -> None:
        async with open_pool(config, [ServedModel.of(config, engine)], files, child) as pool:
            from specinfer.serve.app import build_app

            progress.start(source.count, "batch", "requests")
            progress.advance(len(answers))
            await answer_all(build_app(pool, Keys([])), source.left(answers), answers, at_once, progress)
            progress.finish()

    asyncio.run(run())


async def answer_all(
    app: ASGIApp, lines: Iterator[_OpenLine], answers: BatchAnswers, at_once: int, progress: Progress
) -> None:
    """Send all of `lines` to the application, `at_once` at a time."""

    async def work(client: httpx.AsyncClient) -> None:
        for line in lines:  # one iterator, shared by all workers
            await _answer(client, line, answers)
            progress.advance(1)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
        workers = [asyncio.ensure_future(work(client)) for _ in range(at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for one in workers:
                one.cancel()
            await asyncio.gather(*workers, return_exceptions=True)


async def _answer(client: httpx.AsyncClient, line: _OpenLine, answers: BatchAnswers) -> None:
    if line.request is None:
        answers.add(line.name, line=line.number, error={"code": "invalid_line", "message": line.fault})
        return
    answer = await client.post(line.request.url, content=to_json(line.request.body))
    response = {
        "status_code": answer.status_code,
        "request_id": answer.headers["x-request-id"],
        "body": answer.json(),
    }
    error = None
    if answer.is_error:
        body = response["body"]["error"]
        error = {"code": body.get("code") or body["type"], "message": body["message"]}
    answers.add(line.name, line=line.number, response=response, error=error)
