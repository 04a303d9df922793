"""Traffic log: file of prompts and answers, one JSON object per line, to tune drafts on."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, Final

from pydantic_core import to_json

from specinfer.errors import ConfigError
from specinfer.request import Delta, FinishReason, PrefixMiss, SpeculationFigures
from specinfer.sampling_params import SamplingParams
from specinfer.serve.backend.work import CompletionObserver, Work
from specinfer.serve.http.api_error import CALLER
from specinfer.tokenizer import Tokenizer

_PRIVATE: Final = 0o600
_OPEN_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW

_LOG = logging.getLogger(__name__)
_MAX_WAITING: Final = 1024  # completions queued for the file; more are dropped
_CLOSE_SECONDS: Final = 10.0  # that a closing server waits for the disk
_FINISHED: Final = (FinishReason.STOP, FinishReason.LENGTH)
# Parameters left out: they do not affect the text, or (cache_salt) are private to a caller.
_OMITTED: Final = frozenset(
    {
        "n",
        "best_of",
        "structured_output",
        "logprobs",
        "prompt_logprobs",
        "logprobs_mode",
        "cache_salt",
        "cache_pins",
    }
)
_ALWAYS_LOGGED: Final = frozenset({"temperature", "seed", "max_tokens"})
_DEFAULTS: Final = SamplingParams()


class PrivateLines:
    """Appends lines to the file `path`, which is renamed to PATH.1 before it exceeds `max_bytes` bytes.

    A torn line of a killed process or a full disk stays, and the next line starts on a new one. If the file
    is moved or removed, the next line creates a new file. A symbolic link is refused, since its target may
    belong to another user. All methods raise OSError on failure.
    """

    def __init__(self, path: str, max_bytes: int) -> None:
        """Open the file; create it if it is missing."""
        self._path = path
        self._max_bytes = max_bytes
        self._number: int | None = None  # file descriptor; None: the next line opens the file
        self._open()

    def append(self, line: bytes) -> None:
        """Write a line."""
        number = self._open()
        data = line + b"\n"
        size = os.fstat(number).st_size
        if size and size + len(data) > self._max_bytes:
            fcntl.flock(number, fcntl.LOCK_EX)  # other servers may write to the file
            with suppress(FileNotFoundError):  # one of them has renamed it
                if os.path.samestat(os.fstat(number), os.stat(self._path)):
                    os.replace(self._path, f"{self._path}.1")
            self.close()
            number, size = self._open(), 0
        if size and os.pread(number, 1, size - 1) != b"\n":
            data = b"\n" + data
        while data:
            data = data[os.write(number, data) :]

    def close(self) -> None:
        """Close the file; the next line reopens it."""
        if self._number is not None:
            number, self._number = self._number, None
            os.close(number)

    def _open(self) -> int:
        if self._number is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._number), os.lstat(self._path)):
                    return self._number
            self.close()
        try:
            number = os.open(self._path, _OPEN_FLAGS, _PRIVATE)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "it is a symbolic link") from None
            raise
        try:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            if stat.S_IMODE(found.st_mode) != _PRIVATE:
                os.fchmod(number, _PRIVATE)
        except BaseException:
            os.close(number)
            raise
        self._number = number
        return number


class TrafficLog:
    """Writes each finished completion to the file `path`, in a background thread.

    Only the file's owner may read it. Before it exceeds `max_bytes` bytes it is renamed to PATH.1, which
    replaces an earlier one. Serving never waits: if the disk is full or slow, lines are dropped, and `lost`
    is called for each. The server's log reports the first one, and the next line that is written. Raises
    ConfigError if the file cannot be opened.
    """

    def __init__(
        self,
        path: str,
        max_bytes: int,
        *,
        model: str,
        tokenizer: Tokenizer,
        lost: Callable[[], None],
    ) -> None:
        try:
            self._lines = PrivateLines(path, max_bytes)
        except OSError as error:
            raise ConfigError(
                f"cannot write log_traffic {path}: {error.strerror}; give another file"
            ) from None
        self._path = path
        self._model = model
        self._tokenizer = tokenizer
        self._on_lost = lost
        self._failing = False  # whether completions have been dropped since the last written line
        self._waiting: queue.Queue[LoggedCompletion | None] = queue.Queue(_MAX_WAITING)
        self._writer = threading.Thread(target=self._write_all, name="traffic-log", daemon=True)
        self._writer.start()

    def observe(self, work: Work, now: float) -> LoggedCompletion:
        """Return the observer of a completion that begins now."""
        return LoggedCompletion(work, now, self._put)

    def close(self) -> None:
        """Write the queued lines and close the file; waits at most 20 seconds."""
        with suppress(queue.Full):
            self._waiting.put(None, timeout=_CLOSE_SECONDS)
            self._writer.join(_CLOSE_SECONDS)
        if self._writer.is_alive():
            _LOG.warning("%s: the disk does not respond; the last completions are missing", self._path)
        else:
            self._lines.close()

    def _put(self, traffic: LoggedCompletion) -> None:
        try:
            self._waiting.put_nowait(traffic)
        except queue.Full:
            self._lose("completions finish faster than the disk writes them")

    def _lose(self, reason: str) -> None:
        if not self._failing:
            self._failing = True
            _LOG.warning("cannot write %s: %s; completions are dropped meanwhile", self._path, reason)
        self._on_lost()

    def _write_all(self) -> None:
        while (traffic := self._waiting.get()) is not None:
            try:
                self._lines.append(self._line(traffic))
            except OSError as error:
                self._lose(error.strerror or type(error).__name__)
            except Exception as error:
                # A bug; its message may contain text of a prompt, so only its type is logged.
                self._lose(type(error).__name__)
            else:
                if self._failing:
                    self._failing = False
                    _LOG.warning("%s is written again", self._path)

    def _line(self, traffic: LoggedCompletion) -> bytes:
        work = traffic.work
        # The model's exact input, with special tokens rendered as text.
        prompt = b"".join(map(self._tokenizer.bytes_of, work.prompt_token_ids))
        ended = datetime.fromtimestamp(traffic.ended_at, UTC).isoformat(timespec="milliseconds")
        first = traffic.first
        line = {
            "time": ended.replace("+00:00", "Z"),
            "request_id": traffic.request_id,
            "index": work.index,
            "model": work.adapter or self._model,
            "prompt": prompt.decode("utf-8", "replace"),
            "prompt_token_ids": work.prompt_token_ids,
            "params": _logged(work.params),
            "text": "".join(traffic.texts),
            "token_ids": traffic.token_ids,
            "finish_reason": traffic.finish_reason,
            "cached_tokens": traffic.cached_tokens,
            "prefix_miss": None if traffic.miss is None else asdict(traffic.miss),
            "first_token_seconds": None if first is None else round(first - traffic.arrived, 4),
            "seconds": traffic.seconds,
            "figures": traffic.figures,
        }
        return to_json(line, fallback=dict)  # other mappings are written as dicts


@dataclass(eq=False)
class LoggedCompletion(CompletionObserver):
    """Observer that logs one completion, unless it is aborted or fails."""

    _put: Callable[[LoggedCompletion], None]
    request_id: str = field(default_factory=lambda: CALLER.get().request_id, init=False)
    texts: list[str] = field(default_factory=list, init=False)
    token_ids: list[int] = field(default_factory=list, init=False)
    figures: SpeculationFigures | None = field(default=None, init=False)
    miss: PrefixMiss | None = field(default=None, init=False)
    seconds: float = field(default=0.0, init=False)
    ended_at: float = field(default=0.0, init=False)  # seconds since 1970

    def delta(self, delta: Delta, now: float) -> None:
        """See CompletionObserver."""
        super().delta(delta, now)
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.figures = delta.figures or self.figures
        self.miss = delta.miss or self.miss

    def end(self, now: float) -> None:
        """See CompletionObserver."""
        if self.finish_reason in _FINISHED:
            self.seconds = round(now - self.arrived, 4)
            self.ended_at = time.time()
            self._put(self)


def _logged(params: SamplingParams) -> dict[str, Any]:
    """Parameters that differ from their defaults, and those that are always logged."""
    logged = {}
    for name in (one.name for one in fields(params)):
        value = getattr(params, name)
        if name in _ALWAYS_LOGGED or (value != getattr(_DEFAULTS, name) and name not in _OMITTED):
            logged[name] = value
    return logged
