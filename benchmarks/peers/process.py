"""The parent's side of the protocol in worker.py: one engine as a child process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

_GRACE = 20  # seconds a worker has to end by itself
_SHOWN = 160  # characters of its last words


class WorkerError(Exception):
    """A worker cannot be started, ended, answered nonsense or nothing in time; the message is one line."""


class Worker:
    """A child process that answers one JSON line with one JSON line; used as a context, it ends with it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> None:
        """Start `command`; a reply may take `timeout` seconds. Raises WorkerError if it cannot be run."""
        self._timeout = timeout
        self._unread = b""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **environment},
                start_new_session=True,  # with the processes it starts, to be ended together
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(f"{command[0]} cannot be run: {error.strerror}") from None

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to `message`; raises WorkerError when there is none, with the worker's last words."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; reading says how
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        line = self._read_line()
        try:
            reply = json.loads(line)
        except ValueError:
            reply = None
        if not isinstance(reply, dict):
            raise WorkerError(f"answered {line[:80]!r}, which is not a JSON object")
        return reply

    def peak_memory(self) -> int:
        """The most bytes that were resident so far, the sum over the worker and its children."""
        return sum(_peak_memory(process) for process in self._tree())

    def cpu_seconds(self) -> float:
        """CPU time used so far by the worker and its living children."""
        total = 0.0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        """End the worker and all it started; nothing of it runs when this returns."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self._kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        end = time.monotonic() + self._timeout
        while b"\n" not in self._unread:
            if not select.select([file], [], [], max(end - time.monotonic(), 0))[0]:
                self._kill()
                raise WorkerError(f"no answer within {self._timeout:.0f} s")
            chunk = os.read(file, 1 << 16)
            if not chunk:
                raise WorkerError(self._how_it_ended())
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        cause = f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").splitlines()
        last = next((line.strip() for line in reversed(words) if line.strip()), "")
        return f"{cause}: {last[:_SHOWN]}" if last else cause

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _tree(self) -> list[psutil.Process]:
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _peak_memory(process: psutil.Process) -> int:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:  # gone, or not Linux, where only the present is known
        with suppress(psutil.NoSuchProcess):
            return int(process.memory_info().rss)
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields.get("VmHWM", "0 kB").split()[0]) << 10
