"""TrafficLog: prompts and answers in a file, one JSON object a line, to tune drafts on."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, Final

from specinfer.errors import ConfigError
from specinfer.request import Delta, FinishReason, SpeculationFigures
from specinfer.sampling_params import SamplingParams
from specinfer.serve.backend.work import CompletionObserver, Work
from specinfer.serve.http.api_error import CALLER
from specinfer.tokenizer import Tokenizer

_PRIVATE: Final = 0o600
_HOW: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_LOCKS: Final = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)

_LOG = logging.getLogger(__name__)
_MOST_WAITING: Final = 1024  # completions that are not in the file yet; more are left out
_RETRY_SECONDS: Final = 5.0  # after which a file that could not be written is tried again
_CLOSE_SECONDS: Final = 10.0  # that the end of the server waits for a disk
_FINISHED: Final = (FinishReason.STOP, FinishReason.LENGTH)
# Parameters that say nothing about the text, and one that keeps callers apart.
_UNTOLD: Final = frozenset(
    {"n", "best_of", "structured_output", "logprobs", "prompt_logprobs", "logprobs_mode", "cache_salt"}
)
_ALWAYS_TOLD: Final = frozenset({"temperature", "seed", "max_tokens"})


class PrivateLines:
    """Appends lines to the file `path`; before it grows beyond `most` bytes it becomes PATH.1.

    What a killed process left of a line stays, and the next line begins behind it on its own. Where the file
    is moved or removed meanwhile, the next line begins a new one. Nobody else may append to it. A symbolic
    link is refused, as its target may be somebody else's file. All of this raises OSError.
    """

    def __init__(self, path: str, most: int) -> None:
        """Open the file, made where it is missing."""
        self._path = path
        self._most = most
        self._whole = True  # whether it ends with a whole line
        self._number: int | None = None  # of its descriptor; None: it is opened with the next line
        self._open()

    def append(self, line: bytes) -> None:
        """Write a line; one that does not fit on the disk leaves nothing behind."""
        number = self._open()
        data = line + b"\n"
        size = os.fstat(number).st_size
        if size and size + len(data) > self._most:
            self.close()
            os.replace(self._path, f"{self._path}.1")
            number, size = self._open(), 0
        left = memoryview(data if self._whole else b"\n" + data)
        try:
            while left:
                left = left[os.write(number, left) :]
        except OSError:
            with suppress(OSError):  # then it is looked at when it is opened again
                os.ftruncate(number, size)
            self.close()
            raise
        self._whole = True

    def close(self) -> None:
        """Close the file; the next line would open it again."""
        if self._number is not None:
            number, self._number = self._number, None
            os.close(number)

    def _open(self) -> int:
        if self._number is not None:
            if self._is_there(self._number):
                return self._number
            self.close()
        try:
            number = os.open(self._path, _HOW, _PRIVATE)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise OSError(errno.ELOOP, "it is a symbolic link") from None
            raise
        try:
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is no regular file")
            if stat.S_IMODE(found.st_mode) != _PRIVATE:
                os.fchmod(number, _PRIVATE)
            _lock(number)
            self._whole = not found.st_size or os.pread(number, 1, found.st_size - 1) == b"\n"
        except BaseException:
            os.close(number)
            raise
        self._number = number
        return number

    def _is_there(self, number: int) -> bool:
        """Whether the open file is still the one of that path."""
        try:
            return os.path.samestat(os.fstat(number), os.lstat(self._path))
        except FileNotFoundError:
            return False


def _lock(number: int) -> None:
    """Keep others from writing to the same file, which would rotate lines of ours away."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OSError(errno.EBUSY, "another server writes it") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


class TrafficLog:
    """Writes each completion that came to its end into the file `path`, in a thread of its own.

    Only the file's owner may read it. Before it grows beyond `most` bytes it becomes PATH.1, in place of an
    earlier one. Serving never waits: where the disk is full or slow, lines are left out, `lost` is called for
    each, and the server's log says when it begins and how many there were. Raises ConfigError where the file
    cannot be written at the start.
    """

    def __init__(
        self,
        path: str,
        most: int,
        *,
        model: str,
        tokenizer: Tokenizer,
        lost: Callable[[], None],
        retry: float = _RETRY_SECONDS,
    ) -> None:
        try:
            self._lines = PrivateLines(path, most)
        except OSError as error:
            raise ConfigError(f"cannot write log_traffic {path}: {error.strerror}; name another") from None
        self._path = path
        self._model = model
        self._tokenizer = tokenizer
        self._tell_lost = lost
        self._retry = retry
        self._next_try = 0.0  # on the monotonic clock; nothing is written before
        self._lost = 0  # since the last line that was written
        self._counting = threading.Lock()
        self._waiting: queue.Queue[LoggedCompletion | None] = queue.Queue(_MOST_WAITING)
        self._writer = threading.Thread(target=self._write_all, name="traffic-log", daemon=True)
        self._writer.start()

    def observe(self, work: Work, now: float) -> LoggedCompletion:
        """The observer of a completion that begins now."""
        return LoggedCompletion(work, now, self._put)

    def close(self) -> None:
        """Write what waits, and close the file."""
        try:
            self._waiting.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            pass
        else:
            self._writer.join(_CLOSE_SECONDS)
        if self._writer.is_alive():
            _LOG.warning("%s: the disk does not answer; the last completions are not in it", self._path)
            return
        self._lines.close()
        if self._lost:
            _LOG.warning("%s ends without the last %d completions", self._path, self._lost)

    def _put(self, traffic: LoggedCompletion) -> None:
        try:
            self._waiting.put_nowait(traffic)
        except queue.Full:
            self._lose("more completions end than can be written")

    def _lose(self, reason: str) -> None:
        with self._counting:
            self._lost += 1
            first = self._lost == 1
        if first:
            _LOG.warning("cannot write %s: %s; completions are left out of it meanwhile", self._path, reason)
        self._tell_lost()

    def _write_all(self) -> None:
        while (traffic := self._waiting.get()) is not None:
            if time.monotonic() < self._next_try:
                self._lose("it is tried again soon")
                continue
            try:
                self._lines.append(self._line(traffic))
            except OSError as error:
                self._next_try = time.monotonic() + self._retry
                self._lose(error.strerror or type(error).__name__)
            except Exception as error:  # a bug of ours; its own words may be those of a prompt
                self._lose(type(error).__name__)
            else:
                with self._counting:
                    lost, self._lost = self._lost, 0
                if lost:
                    _LOG.warning("%s is written again; %d completions were left out", self._path, lost)

    def _line(self, traffic: LoggedCompletion) -> bytes:
        work = traffic.work
        # As the model read it: special tokens stand in it by their names.
        prompt = b"".join(map(self._tokenizer.bytes_of, work.prompt_token_ids))
        ended = datetime.fromtimestamp(traffic.ended_at, UTC).isoformat(timespec="milliseconds")
        line = {
            "time": ended.replace("+00:00", "Z"),
            "request_id": traffic.request_id,
            "index": work.index,
            "model": work.adapter or self._model,
            "prompt": prompt.decode("utf-8", "replace"),
            "prompt_token_ids": work.prompt_token_ids,
            "params": _told(work.params),
            "text": "".join(traffic.texts),
            "token_ids": traffic.token_ids,
            "finish_reason": traffic.finish_reason,
            "cached_tokens": traffic.cached_tokens,
            "first_token_seconds": traffic.first_token_seconds,
            "seconds": traffic.seconds,
            "figures": traffic.figures,
        }
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), default=_plain)
        return text.encode("utf-8", "replace")


class LoggedCompletion(CompletionObserver):
    """One completion, as the log is going to have it; what does not come to its end is left out of it."""

    def __init__(self, work: Work, begun: float, put: Callable[[LoggedCompletion], None]) -> None:
        super().__init__(work, begun)
        self.request_id = CALLER.get().request_id
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.figures: SpeculationFigures | None = None
        self.seconds = 0.0
        self.ended_at = 0.0  # since 1970
        self._put = put

    @property
    def first_token_seconds(self) -> float | None:
        """How long its first token took, from arrival; None where it has none."""
        return None if self.first is None else round(self.first - self.begun, 4)

    def delta(self, delta: Delta, now: float) -> None:
        """As CompletionObserver says."""
        super().delta(delta, now)
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.figures = delta.figures or self.figures

    def end(self, now: float) -> None:
        """As CompletionObserver says."""
        if self.finish_reason in _FINISHED:
            self.seconds = round(now - self.begun, 4)
            self.ended_at = time.time()
            self._put(self)


def _told(params: SamplingParams) -> dict[str, Any]:
    """What was asked for beyond the usual."""
    told = {}
    for one in fields(params):
        usual = one.default if one.default_factory is MISSING else one.default_factory()
        value = getattr(params, one.name)
        if one.name in _ALWAYS_TOLD or (value != usual and one.name not in _UNTOLD):
            told[one.name] = value
    return told


def _plain(value: object) -> object:
    """What JSON has no word for, as an object."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be written")
