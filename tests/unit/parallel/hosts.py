"""Followers as if on other hosts."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tests.ranks import INT8, followers


class Hosts:
    """Followers, each as on a separate host, and the options of their engine."""

    def __init__(self, folder: Path, tmp_path: Path) -> None:
        # The bound socket reserves the port, and no program listens on it.
        self._kept = socket.socket()
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("127.0.0.1", 0))
        self.port = self._kept.getsockname()[1]
        self.master = f"127.0.0.1:{self.port}"
        self.key = tmp_path / "key"
        self.key.touch(0o600)
        self.key.write_text("a key that is long enough\n")
        self.options: dict[str, Any] = {
            **INT8,
            "tensor_parallel": 2,
            "master": self.master,
            "key_file": str(self.key),
        }
        # The same files elsewhere, and newer.
        self.model = Path(
            shutil.copytree(folder / "target", tmp_path / "there", copy_function=shutil.copyfile)
        )
        self._log = tmp_path / "log"
        self.begun: list[subprocess.Popen[bytes]] = []

    def follow(self, rank: int = 1, count: int = 1, **more: Any) -> subprocess.Popen[bytes]:
        """Start a follower, or several that share memory."""
        given = {"model": self.model, "key": self.key, **more}
        command = [sys.executable, "-m", "specinfer", "follow", str(given["model"]), "--rank", str(rank)]
        command += ["--master", self.master, "--key-file", str(given["key"]), "--local-ranks", str(count)]
        with self._log.open("ab") as log:
            self.begun.append(subprocess.Popen(command, stdout=log, stderr=log))
        return self.begun[-1]

    def says(self) -> str:
        """Return the log of all followers so far."""
        return self._log.read_text() if self._log.exists() else ""

    def workers(self) -> list[psutil.Process]:
        """The processes that compute, in the order in which their followers started."""
        found: list[psutil.Process] = []
        for one in self.begun:
            with suppress(psutil.NoSuchProcess):
                found += followers(one.pid)
        return found

    def close(self) -> None:
        """End them, and see that nothing is left."""
        for one in self.begun:
            one.terminate()
        for one in self.begun:
            one.wait(5)
        with socket.create_server(("127.0.0.1", self.port)):
            self._kept.close()
