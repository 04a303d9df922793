"""Fork server: runs `python -m specinfer...` in forks of a process that has imported PyTorch and specinfer.

An import takes 2 s of a core, a fork some milliseconds. `forking_popen` replaces `subprocess.Popen`, and the
replacement sends each such command to the server; every other command runs as usual. The server forks with
CLONE_PARENT, so the new process is a child of the process that sent the command. So `wait` and lists of
children work as after an exec. Two things differ:

- The signal at the end of a parent comes when the thread that started the server ends, and not when the
  thread that called Popen ends.
- A new process that may start processes has one more child, its own fork server. After a SIGKILL of the
  process that child is an orphan, which ends at once.

Other systems than Linux lack CLONE_PARENT.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import inspect
import json
import os
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

_PYTHON = sys.executable
_FOLLOWER = "specinfer.parallel.follower"  # the only one that starts no processes
_MODULES = ("specinfer", "specinfer.serve.backend.engine_process", _FOLLOWER)
_IMPORTED = (
    *("specinfer.llm", "specinfer.parallel.follower", "specinfer.serve.backend.engine_process"),
    *("specinfer.serve.server", "specinfer.cli.serve", "specinfer.cli.follow"),
)
_SHELL = ("PATH", "PWD", "OLDPWD", "SHLVL", "_", "PET_", "PYTHONPATH")
# Environment variables that are read after the imports, or change nothing that a test can see. PyTorch sets
# TORCHINDUCTOR_CACHE_DIR itself as soon as a test imports its compiler.
_FREE = ("SPECINFER_", "PYTEST_", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_", *_SHELL)
# Threads that exist before a fork are missing behind it, and OpenBLAS starts some at its import.
_SETTINGS = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())  # number of the system call
_CLONE_PARENT = 0x8000
_PDEATHSIG = 1
_HIGH = 256  # first file descriptor for the server's own files; commands name lower ones
_LONGEST = 1 << 17  # bytes of a message
_LIMIT = 240.0  # seconds for the imports and a fork

AVAILABLE = sys.platform == "linux" and _CLONE is not None


@contextmanager
def forking_popen() -> Iterator[type[subprocess.Popen[Any]]]:
    """Start a server, and yield a replacement of `subprocess.Popen`; the server ends with the block.

    Yields `subprocess.Popen` itself, with a warning, if the server cannot fork. The calling thread has to
    live as long as the server: Linux takes its end for the end of the parent.
    """
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    room = " " * 8192  # for the command lines of the forks
    with its:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.fork_server", str(its.fileno()), room],
            pass_fds=[its.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, **_SETTINGS},
        )
    try:
        with ours:
            if _is_ready(ours):
                yield _popen_of(ours, _fixed(os.environ))
            else:
                warnings.warn("the fork server of the tests has not started; see its error", stacklevel=3)
                yield subprocess.Popen
    finally:
        server.wait(10)


def _is_ready(server: socket.socket) -> bool:
    """Wait for the server's imports and its trial fork; False if this process has no such child."""
    server.settimeout(_LIMIT)
    try:
        return os.waitpid(int(server.recv(_LONGEST)), 0)[1] == 0
    except (OSError, ValueError):  # ValueError: the server has ended and sent nothing
        return False


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork has to share with its server."""
    return {name: value for name, value in environment.items() if not name.startswith(_FREE)}


def _popen_of(server: socket.socket, fixed: Mapping[str, str]) -> type[subprocess.Popen[Any]]:
    """Return a class like Popen, which sends the commands that `server` can run to it."""
    lock = threading.Lock()
    server.settimeout(_LIMIT)

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def _execute_child(self, *given: Any) -> None:
            how = inspect.signature(super()._execute_child).bind(*given).arguments
            pipes = [how[name] for name in ("p2cread", "c2pwrite", "errwrite")]
            standard = [number if file == -1 else file for number, file in enumerate(pipes)]
            if not _can_fork(how, fixed) or any(map(os.isatty, standard)):
                super()._execute_child(*given)
                return
            message = {
                "arguments": [os.fspath(one) for one in how["args"]],
                "folder": os.fspath(how["cwd"] or os.getcwd()),
                "environment": dict(os.environ if how["env"] is None else how["env"]),
                "targets": [0, 1, 2, *how["pass_fds"]],
                "session": bool(how["start_new_session"]),
                "cores": sorted(os.sched_getaffinity(0)),
            }
            with lock:
                socket.send_fds(server, [json.dumps(message).encode()], [*standard, *how["pass_fds"]])
                try:
                    pid, _, error = server.recv(_LONGEST).decode().partition(" ")
                except TimeoutError:
                    server.close()  # the next command would take a late reply for its own
                    raise
            if not pid:
                raise ChildProcessError("the fork server of the tests has ended; its error is above")
            if error:
                os.waitpid(int(pid), 0)
                raise ChildProcessError(error)
            self.pid = int(pid)
            self._child_created = True
            names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(how[name] for name in names))

    return Popen


def _can_fork(how: Mapping[str, Any], fixed: Mapping[str, str]) -> bool:
    """True if a command, with these arguments of Popen, runs as well in a fork."""
    args = how["args"]
    if not isinstance(args, list | tuple) or args[:2] != type(args)((_PYTHON, "-m")):
        return False
    plain = all(
        how[name] in (None, False, -1) for name in ("executable", "preexec_fn", "shell", "gid", "uid")
    )
    plain = plain and how["umask"] == -1 and how["process_group"] == -1
    return plain and args[2] in _MODULES and _fixed(how["env"] or os.environ) == fixed


@dataclass(frozen=True)
class _Command:
    """A command in the new process that runs it."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    targets: list[int]  # numbers of `files` in the command's process
    session: bool  # True for a new session
    cores: list[int]
    files: list[int]

    def run(self, server: socket.socket) -> None:
        """Make this process what the command's would be, report its id, and run the module.

        An error before the module runs is reported behind the id.
        """
        reply = _raised(server)
        try:
            self._prepare()
        except BaseException as error:
            reply.send(f"{os.getpid()} {type(error).__name__}: {error}".encode())
            os._exit(1)
        reply.send(str(os.getpid()).encode())
        reply.close()
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # it is imported already
        status = 0
        try:
            runpy.run_module(self.arguments[2], run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if not isinstance(end.code, int | None):
                raise
            status = end.code or 0
        # The end of the interpreter without its last part, which takes PyTorch's modules apart for a second.
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)

    def _prepare(self) -> None:
        """Give this process the command's files, folder, environment, cores and command line."""
        files = [_raised_file(file) for file in self.files]
        for file, target in zip(files, self.targets, strict=True):
            os.dup2(file, target)
            os.close(file)
        # The objects of the server's streams remember whether those can seek.
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            old = getattr(sys, name)
            how = {"encoding": old.encoding, "errors": old.errors, "closefd": False}
            new = os.fdopen(number, "w" if number else "r", buffering=1 if number == 2 else -1, **how)
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        os.sched_setaffinity(0, self.cores)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.path[0] = self.folder
        sys.argv = self.arguments[2:]
        _show(self.arguments)


def main() -> None:
    """Send the id of a trial fork, and serve until the other end of the socket is closed.

    In each fork, run its command.
    """
    _end_with(os.getppid())
    for module in _IMPORTED:
        import_module(module)
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, f"an import has started threads: {tasks}"
    gc.collect()
    gc.freeze()  # a collection would write to pages that the forks share
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = _raised(socket.socket(fileno=int(sys.argv[1])))
    trial = _fork_for_parent()
    if trial == 0:
        os._exit(0)
    server.send(str(trial).encode())
    fixed = _fixed(os.environ)
    command = _next_command(server)
    while command.arguments[2] != _FOLLOWER:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if os.fork():
            its.close()
            subprocess.Popen = _popen_of(_raised(ours), fixed)  # type: ignore[misc]
            break
        _end_with(parent)  # this is the server of the process that runs the command
        ours.close()
        server.close()
        for file in command.files:
            os.close(file)
        server = _raised(its)
        command = _next_command(server)
    command.run(server)


def _next_command(server: socket.socket) -> _Command:
    """Fork for each command that arrives, and return in the new process; exit at the end of the socket."""
    while True:
        message, files, *_ = socket.recv_fds(server, _LONGEST, 100)
        if not message:
            os._exit(0)
        if _fork_for_parent() == 0:
            command = _Command(**json.loads(message), files=list(files))
            if command.session:
                os.setsid()
            return command
        for file in files:
            os.close(file)


def _fork_for_parent() -> int:
    """Fork as os.fork does, except that the new process is a child of this one's parent."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    python.PyOS_BeforeFork()
    pid = libc.syscall(*map(ctypes.c_long, (_CLONE, _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)))
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(ctypes.get_errno(), "cannot fork")
    return int(pid)


def _end_with(parent: int) -> None:
    """End this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _raised_file(file: int) -> int:
    """Give a file a number that no command uses."""
    number = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    os.close(file)
    return number


def _raised(one: socket.socket) -> socket.socket:
    return socket.socket(fileno=_raised_file(one.detach()))


def _show(arguments: list[str]) -> None:
    """Write a command line over this process's own, where /proc and psutil read it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end (man 5 proc)
    line = b"".join(os.fsencode(one) + b"\0" for one in arguments)
    assert len(line) <= end - start, f"a command line of {len(line)} bytes; allowed: {end - start}"
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
