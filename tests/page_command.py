"""Commands of the pages' blocks: a thread of the test runs them for the program `specinfer`.

`serve` starts the server in the background, in place of an earlier one, at the port of the page, and returns
when it is ready; with `--master` it returns at once. `follow` and `torchrun` start a process of another host
and return when the server is ready. Other commands answer fewer prompts and tokens, unless the page says how
many. Models of the hub are stand-ins.

Processes start by `subprocess.Popen`, which the fork server may replace (tests/fork_server.py): the import of
PyTorch is the longest part of most commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FEWER = {  # options that are appended unless the page has them
    "generate": {"--max-tokens": "16"},
    "bench": {"--max-tokens": "16"},
    "serve": {"--kv-cache-memory": "64MB"},
    "tune": {"--max-tokens": "16", "--collect-minutes": "0.05"},
}
SHORTER = {  # options that replace the page's
    "check": {"--prompts": "1", "--max-tokens": "6", "--samples": "24"},
    "tune": {"--minutes": "0.1"},
}
HUB = "Qwen/Qwen2.5-Coder"  # beginning of names on the hub
STANDIN = "smollm2-135m"
PROGRAM = [sys.executable, "-m", "specinfer"]
_LONGEST = 1 << 17  # bytes of a message


@dataclass(frozen=True)
class Shell:
    """The place of a command: its folder, its variables, and its standard files."""

    folder: str
    environment: Mapping[str, str]
    files: Sequence[int]  # input, output, errors

    def run(self, command: Sequence[str], given: str | None = None) -> int:
        """Run a process with this input, or that of the command; return its exit status."""
        stdin: Any = subprocess.PIPE if given is not None else self.files[0]
        with subprocess.Popen(
            command, stdin=stdin, stdout=self.files[1], stderr=self.files[2], **self.where
        ) as process:
            process.communicate(None if given is None else given.encode())
        return process.returncode

    @property
    def where(self) -> dict[str, Any]:
        """Arguments of Popen."""
        return {"cwd": self.folder, "env": dict(self.environment)}


@dataclass
class PageCommands:
    """Runs commands that arrive at the socket `path`; servers answer at `port`.

    `processes` are those of the page's server, its own first.
    """

    path: Path
    port: int
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Run what arrives within the block; end the servers behind it."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self.path))
            listener.listen()
            thread = threading.Thread(target=self._serve, args=(listener,))
            thread.start()
            try:
                yield
            finally:
                listener.shutdown(socket.SHUT_RDWR)
                thread.join()
                self.stop()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                program, _ = listener.accept()
            except OSError:
                return  # shut down
            with program, contextlib.ExitStack() as stack:
                message, numbers, *_ = socket.recv_fds(program, _LONGEST, 3)
                command = json.loads(message)
                for number in numbers:
                    stack.callback(os.close, number)
                shell = Shell(command["folder"], command["environment"], numbers)
                status = 1
                try:
                    status = self.run(command["arguments"], shell)
                except Exception as error:
                    os.write(shell.files[2], f"{error!r}\n".encode())
                program.send(str(status).encode())

    def run(self, arguments: list[str], shell: Shell) -> int:
        """Run a command; return its exit status."""
        if "_SPECINFER_COMPLETE" in shell.environment:  # a shell that completes
            return shell.run([*PROGRAM, *arguments])
        if arguments[0] == "torchrun":
            self._start([sys.executable, "-m", "torch.distributed.run", *arguments[1:]], shell)
            return self._until_ready(shell)
        given = {argument.partition("=")[0] for argument in arguments}
        fewer, shorter = (options.get(arguments[0], {}) for options in (FEWER, SHORTER))
        for option, value in [*((o, v) for o, v in fewer.items() if o not in given), *shorter.items()]:
            if "--suite" not in given or option == "--prompts":
                arguments = [*arguments, option, value]  # the last one counts
        # 2048 is the longest context of the stand-in.
        arguments = [STANDIN if one.startswith(HUB) else one.replace("32768", "2048") for one in arguments]
        if arguments[0] == "serve":
            self.stop()
            self._start([*PROGRAM, *arguments, "--port", str(self.port)], shell)
            return 0 if "--master" in given else self._until_ready(shell)
        if arguments[0] == "follow":
            self._start([*PROGRAM, *arguments], shell)
            return self._until_ready(shell)
        return shell.run([*PROGRAM, *arguments], "Name a river.\n" if arguments[0] == "chat" else "")

    @property
    def _log(self) -> Path:
        return self.path.with_suffix(".log")

    def _start(self, command: Sequence[str], shell: Shell) -> None:
        """Start a process that `stop` ends."""
        with self._log.open("ab") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                **shell.where,
            )
        self.processes.append(process)

    def _until_ready(self, shell: Shell) -> int:
        """Wait for the server; return 0, or 1 with the log of all processes if one has ended."""
        while all(process.poll() is None for process in self.processes):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5):
                    return 0
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        os.write(shell.files[2], self._log.read_bytes())
        return 1

    def stop(self) -> None:
        """End the server and the processes of other hosts, if any run."""
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()
