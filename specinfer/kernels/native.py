"""Selects the native library of this process: the best one that passes a trial.

A library is tried in a separate process before it is used on a machine. A wrong bit in a product, an illegal
instruction or a crash then costs a log line and the next lower level, never a wrong text. faults.py contains
the trial. Results are cached per machine and library. A trial that does not end (no memory, a busy host) says
nothing of the library: its level is used, since another level has other bits, and is tried at the next start.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from specinfer.errors import KernelBuildError
from specinfer.files import write_whole
from specinfer.kernels.build import find_library, kernels_folder
from specinfer.kernels.library import Library
from specinfer.kernels.machine import Level, architecture, cpu_features, cpu_name, levels_here
from specinfer.progress import Progress

WRONG, REFUSED = 81, 82  # exit statuses of a trial; an exception ends Python with 1
_TRIAL: Final = "specinfer.kernels.faults"  # imports PyTorch in the child alone
_TIMEOUT: Final = 60  # seconds; a trial takes a few
_CODE_FAULTS: Final = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE")  # caused by the code alone
_LOG: Final = logging.getLogger(__name__)


def prove(library: Path, level: Level, folder: Path | None = None) -> str | None:
    """Why a library must not be used on this machine; None if it passes the trial.

    Earlier results are read from the library's folder and from `folder`, by default the folder of compiled
    libraries. A trial that did not
    end logs a line, is not cached and counts as passed, until this process ends.
    """
    key = {
        "library": hashlib.sha256(library.read_bytes()).hexdigest(),
        "machine": cpu_name(),
        "features": hashlib.sha256(" ".join(sorted(cpu_features())).encode()).hexdigest(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    name = f"proof-{level.name}-{digest}.json"
    files = [library.with_name(name)]  # in a cache that another user filled
    with contextlib.suppress(KernelBuildError, OSError):  # a wheel's library is tried at each start
        files.append((folder or kernels_folder()) / name)
    for file in files:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            if found["key"] == key and isinstance(found["fault"], str | None):
                return None if found["fault"] is None else f"{found['fault']} (found before; see {file})"
        except (OSError, ValueError, KeyError, TypeError):
            continue
    fault, lasting = _tried(library, level, digest)
    if lasting and len(files) > 1:
        write_whole(files[1], json.dumps({"key": key, "fault": fault}, indent=1))
    return fault


@functools.cache
def _tried(library: Path, level: Level, digest: str) -> tuple[str | None, bool]:
    """Try a library once in this process; returns its fault, and True if that may be cached."""
    del digest  # the library's content, and the machine
    try:
        return _try_in_child(library, level)
    except _TrialError as error:
        _LOG.warning(
            "native kernels for %s are used without a trial, which is repeated at the next start: %s",
            *(level.words, error),
        )
        return None, False


class _TrialError(Exception):
    """A trial did not end for a reason outside the library."""


def _try_in_child(library: Path, level: Level) -> tuple[str | None, bool]:
    """The fault, and True if it is permanent; raises _TrialError if the trial did not end."""
    package = str(Path(__file__).parents[2])
    known = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{known}" if known else package}
    command = [sys.executable, "-m", _TRIAL, str(library), level.name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _TrialError(f"it took more than {_TIMEOUT} seconds") from error
    except (OSError, subprocess.SubprocessError) as error:
        raise _TrialError(str(error)) from error
    if done.returncode == 0:
        return None, True
    name = signal.Signals(-done.returncode).name if done.returncode < 0 else f"status {done.returncode}"
    if name in _CODE_FAULTS:
        return f"the trial ended with {name}", True
    words = (done.stdout.strip() or done.stderr.strip()).splitlines()
    reason = words[-1] if words else f"it ended with {name}"
    if done.returncode in (WRONG, REFUSED):
        return reason, done.returncode == WRONG
    raise _TrialError(reason)


@dataclass(frozen=True, slots=True)
class RefusedLevel:
    """A level of this CPU whose library is not used, and the reason."""

    level: Level
    reason: str = field(compare=False)  # worded differently when it is found again


def load_library(progress: Progress | None = None) -> Library:
    """The library of the best level of this CPU that is available and passes the trial.

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
            fault = prove(path, level)
            if fault is None:
                library = _loaded(path, level)
                if library.ready():
                    return library, refused
                fault = "the system does not let this process use the CPU's matrix unit"
        except (KernelBuildError, OSError) as error:
            fault = str(error)
        refused.append(RefusedLevel(level, fault))
    return None, refused


@functools.cache
def _warn_once(refused: RefusedLevel) -> None:
    """Log a rejection once per process, though every loaded model finds it again."""
    _LOG.warning("native kernels for %s are not used: %s", refused.level.words, refused.reason)


@functools.cache
def _loaded(path: Path, level: Level) -> Library:
    """One library object per file, which owns its threads and memory."""
    return Library(path, level)
