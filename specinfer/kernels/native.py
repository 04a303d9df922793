"""Selects the native library of this process: the best one that this CPU can run.

Before a library is used on a machine, a separate process runs it (survival.py), so that an illegal
instruction costs a log line and the next lower level. A level is chosen by the CPU alone, since another level
has other bits: not by a time limit, by a lack of memory, or by a folder that cannot be written. Tests and
`specinfer doctor` compare results with PyTorch's (check/kernel_faults.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from specinfer.errors import KernelBuildError
from specinfer.kernels.build import find_library, kernels_folder
from specinfer.kernels.library import Library
from specinfer.kernels.machine import Level, architecture, cpu_features, cpu_name, levels_here
from specinfer.progress import Progress

_CHILD: Final = "specinfer.kernels.survival"
_TIMEOUT: Final = 60  # seconds
_CODE_FAULTS: Final = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE")  # caused by the code alone
_LOG: Final = logging.getLogger(__name__)


def killer(library: Path, level: Level) -> str | None:
    """The name of the signal by which this library's code ends a process; None if it does not.

    A library that ran is noted in the folder of compiled ones, and is not run again on this machine. A
    process that could not start, or ends in another way, says nothing of the library.
    """
    machine = f"{cpu_name()} {sorted(cpu_features())}".encode()
    digest = hashlib.sha256(hashlib.sha256(library.read_bytes()).digest() + machine).hexdigest()[:16]
    note: Path | None = None
    with contextlib.suppress(KernelBuildError, OSError):
        note = kernels_folder() / f"survived-{level.name}-{digest}"
        if note.exists():
            return None
    status = _status(library, level, digest)
    if status == 0 and note is not None:
        with contextlib.suppress(OSError):
            note.touch()
    name = signal.Signals(-status).name if status < 0 else ""
    return name if name in _CODE_FAULTS else None


@functools.cache
def _status(library: Path, level: Level, digest: str) -> int:
    """The exit status of a process that runs the library, once in this process's life; 1 if there is none."""
    del digest  # the library's content, and the machine
    package = str(Path(__file__).parents[2])
    known = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{known}" if known else package}
    command = [sys.executable, "-m", _CHILD, str(library), level.name]
    try:
        return subprocess.run(
            command, capture_output=True, timeout=_TIMEOUT, env=environment, check=False
        ).returncode
    except (OSError, subprocess.SubprocessError):
        return 1


@dataclass(frozen=True, slots=True)
class RefusedLevel:
    """A level of this CPU whose library is not used, and the reason."""

    level: Level
    reason: str = field(compare=False)  # worded differently when it is found again


def load_library(progress: Progress | None = None) -> Library:
    """The library of the best level of this CPU that is available and runs.

    A rejected better level logs one line per process. Raises KernelBuildError if none is left, ConfigError if
    SPECINFER_CPU names an impossible one.
    """
    library, refused = find_best(progress)
    if library is None and not refused:
        raise KernelBuildError(
            f"there are no native kernels for this CPU ({architecture()}, {cpu_name()}); "
            "they need AVX2 or NEON"
        )
    last = None if library is not None else refused[-1].reason  # raised, hence not logged
    for better in refused:
        if better.reason != last:
            _warn_once(better)
    if library is None:
        raise KernelBuildError(last)
    return library


def find_best(progress: Progress | None = None) -> tuple[Library | None, list[RefusedLevel]]:
    """The library to use, and the rejected better levels; raises ConfigError as `load_library`."""
    refused: list[RefusedLevel] = []
    for level in levels_here():
        try:
            path = find_library(level, progress)
            killed = killer(path, level)
            if killed is None:
                library = _loaded(path, level)
                if library.ready():
                    return library, refused
                reason = "the system does not let this process use the CPU's matrix unit"
            else:
                reason = f"a process that runs them ends with {killed}"
        except (KernelBuildError, OSError) as error:
            reason = str(error)
        refused.append(RefusedLevel(level, reason))
    return None, refused


@functools.cache
def _warn_once(refused: RefusedLevel) -> None:
    """Log a rejection once per process, though every loaded model finds it again."""
    _LOG.warning("native kernels for %s are not used: %s", refused.level.words, refused.reason)


@functools.cache
def _loaded(path: Path, level: Level) -> Library:
    """One library object per file, which owns its threads and memory."""
    return Library(path, level)
