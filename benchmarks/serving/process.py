"""A server as a child process: started on a port of its own, asked whether it is ready, ended."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from peers.process import Child, WorkerError

_EVERY = 0.2  # seconds between two questions whether it is ready
_DIRECT = build_opener(ProxyHandler({}))


class Server(Child):
    """A server of OpenAI's API on a port of this machine."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], port: int) -> None:
        """Start `command`, which serves at `port`. Raises WorkerError if it cannot be run."""
        super().__init__(command, environment, subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_ready(self, timeout: float) -> None:
        """Return when it lists its models; raises WorkerError when it ends before that, or takes longer."""
        end = time.monotonic() + timeout
        while not self._ready():
            if self._process.poll() is not None:
                raise WorkerError(self._how_it_ended())
            if time.monotonic() > end:
                raise WorkerError(f"not ready within {timeout:.0f} s")
            time.sleep(_EVERY)

    def close(self) -> None:
        """Ask the server to end, and see to it."""
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
    """A port of this machine that nobody listens to now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
