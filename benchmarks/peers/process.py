"""Engines as child processes: workers, with the parent's side of worker.py's protocol, and servers."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import psutil

_GRACE = 20  # seconds until a worker must have ended
_SHOWN = 160  # characters of its last line
_EVERY = 0.2  # seconds between checks of a server's readiness
_DIRECT = build_opener(ProxyHandler({}))


class WorkerError(Exception):
    """A worker did not start, ended, timed out or sent an invalid answer; the message is one line."""


class Child:
    """A process with its children; used as a context manager, which ends them."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], pipe: int) -> None:
        """Start `command`; `pipe` is its stdin and stdout. Raises WorkerError if it cannot be run."""
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=self._log,
                env={**os.environ, **environment},
                start_new_session=True,  # in its own process group with its children
            )
        except OSError as error:
            self._log.close()
            raise WorkerError(f"{command[0]} cannot be run: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def peak_memory(self) -> int:
        """Return the peak of resident bytes, summed over the process and its children."""
        return sum(memory("VmHWM", process.pid) for process in self._tree())

    def cpu_seconds(self) -> float:
        """Return CPU seconds of the process and its living children."""
        total = 0.0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def busy_elsewhere(self) -> float:
        """Return CPU seconds of all other processes, including other guests of the machine."""
        everybody = psutil.cpu_times()
        idle = everybody.idle + getattr(everybody, "iowait", 0.0)
        counted = sum(everybody) - getattr(everybody, "guest", 0.0) - getattr(everybody, "guest_nice", 0.0)
        return float(counted - idle - self.cpu_seconds())

    def close(self) -> None:
        """Kill the process and its children; all have ended when this returns."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        self._kill()
        self._log.close()

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


class Worker(Child):
    """A child process that answers one JSON line with one JSON line."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], timeout: float) -> None:
        """Start `command`; a reply may take `timeout` seconds. Raises WorkerError if it cannot be run."""
        super().__init__(command, environment, subprocess.PIPE)
        self._timeout = timeout
        self._unread = b""

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to `message`; raises WorkerError with the worker's last line if it gives none."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; reading shows the reason
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

    def close(self) -> None:
        """Close the worker's input, which ends it, and wait."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        super().close()
        assert self._process.stdout is not None
        self._process.stdout.close()

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


class Server(Child):
    """A server of OpenAI's API on a local port."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], port: int) -> None:
        """Start `command`, which serves at `port`. Raises WorkerError if it cannot be run."""
        super().__init__(command, environment, subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_ready(self, timeout: float) -> None:
        """Return once the server lists its models; raises WorkerError if it ends or takes longer."""
        end = time.monotonic() + timeout
        while not self._ready():
            if self._process.poll() is not None:
                raise WorkerError(self._how_it_ended())
            if time.monotonic() > end:
                raise WorkerError(f"not ready within {timeout:.0f} s")
            time.sleep(_EVERY)

    def close(self) -> None:
        """Terminate the server, and kill it if that fails."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        super().close()

    def _ready(self) -> bool:
        try:
            with _DIRECT.open(f"{self.url}/v1/models", timeout=5) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError, ValueError):
            return False


def free_port() -> int:
    """Return an unused local port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def memory(name: str, process: int | str = "self") -> int:
    """Return the bytes that /proc/PROCESS/status has under a name; 0 without such a file."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:  # ended, or not Linux
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), 0)
