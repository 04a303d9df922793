"""`specinfer serve` as a process on a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

_STARTING = 120.0  # seconds, enough for busy machines


class Served:
    """`specinfer serve MODEL FLAGS` as a context manager: ready at its start, ended at its end."""

    def __init__(
        self,
        model: str | Path,
        *flags: str,
        python: str = sys.executable,
        script: str | None = None,
        popen: type[subprocess.Popen[str]] | None = None,
    ) -> None:
        """`script` is a program that runs before `specinfer` in its process; `popen` starts the process."""
        self._popen = popen or subprocess.Popen
        program = ["-m", "specinfer"] if script is None else ["-c", script]
        self._command = [python, *program, "serve", str(model), "--port", "0", *flags]
        self._env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        self.log: list[str] = []
        self.url = ""
        self._listening = threading.Event()

    def __enter__(self) -> Served:
        files: Any = {"stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        self.process = self._popen(self._command, **files, text=True, env=self._env)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._listening.wait(_STARTING) or not self.url:
            self.process.kill()
            raise AssertionError("the server did not start:\n" + "".join(self.log))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(10)
        if error is not None:
            print("".join(self.log))  # shown if a test fails
        elif self.process.returncode == -signal.SIGKILL:
            raise AssertionError("the server did not end after SIGTERM:\n" + "".join(self.log))

    def _read(self) -> None:
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"specinfer serves (\S+)/v1", line):
                self.url = found[1]
                self._listening.set()
        self._listening.set()

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """POST a JSON body and return the response."""
        return httpx.post(self.url + path, json=body, timeout=120, **more)

    def get(self, path: str) -> httpx.Response:
        """GET a path and return the response."""
        return httpx.get(self.url + path, timeout=60)

    @property
    def engine_pid(self) -> int | None:
        """Return the engine process's id, or None without one."""
        found = [p.pid for p in psutil.Process(self.process.pid).children() if "engine_process" in _words(p)]
        return found[0] if found else None

    def metric(self, name: str) -> float:
        """Return one number of /metrics."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"specinfer:{name}{{"):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"/metrics has no {name}")

    def wait_idle(self) -> None:
        """Wait until no request runs and all blocks are free."""
        until = time.monotonic() + 60
        while self.metric("num_requests_running") + self.metric("kv_cache_usage_perc") > 0:
            assert time.monotonic() < until, "the engine is not idle"
            time.sleep(0.05)


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
