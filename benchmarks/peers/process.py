"""Engines as child processes, with the parent's side of the protocol of run_engines.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

from specinfer.errors import UserError

_GRACE = 20  # seconds until a worker must have ended
_SHOWN = 160  # characters of its last line


class WorkerError(UserError):
    """A worker did not start, ended or timed out; the message is one line."""


class Worker:
    """A process that answers one JSON line with one JSON line; as a context manager it ends at the end."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> None:
        """Start `command`; a reply may take `timeout` seconds. Raises WorkerError if it cannot be run."""
        self._timeout = timeout
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, **environment},
                start_new_session=True,  # in its own process group with its children
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(f"{command[0]} cannot be run: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close its input, which ends it, or kill it; all of its processes have ended when this returns."""
        with suppress(BrokenPipeError):
            self._in.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self._kill()
        self._log.close()
        self._out.close()

    def peak_memory(self) -> int:
        """Return the peak of resident bytes, summed over the process and its children."""
        return sum(memory("VmHWM", process.pid) for process in self._tree())

    def busy_elsewhere(self) -> float:
        """Return CPU seconds of all other processes, including other guests of the machine."""
        everybody, own = psutil.cpu_times(), 0.0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                own += times.user + times.system
        idle = everybody.idle + getattr(everybody, "iowait", 0.0)
        counted = sum(everybody) - getattr(everybody, "guest", 0.0) - getattr(everybody, "guest_nice", 0.0)
        return float(counted - idle - own)

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to `message`; raises WorkerError with the worker's last line if it gives none."""
        late = threading.Timer(self._timeout, self._kill)
        late.start()
        with suppress(BrokenPipeError):  # it has ended; reading shows the reason
            self._in.write(json.dumps(message).encode() + b"\n")
            self._in.flush()
        line = self._out.readline()
        in_time = late.is_alive()
        late.cancel()
        if not line.endswith(b"\n"):
            raise WorkerError(self._how_it_ended() if in_time else f"no answer within {self._timeout:.0f} s")
        reply: dict[str, Any] = json.loads(line)
        return reply

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


def memory(name: str, process: int | str = "self") -> int:
    """Return the bytes that /proc/PROCESS/status has under a name; 0 without such a file."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:  # ended, or not Linux
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)
