"""The library of native kernels that this process uses: the best one that proves itself.

A library is tried in a process of its own before it is used on a machine. A wrong bit of a product, an
instruction the CPU does not have, or a crash then costs a line in the log and the next lesser level, never a
wrong text. What is tried, and how, is in faults.py. What was found is remembered for the machine and the
library.
"""

from __future__ import annotations

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

WRONG, REFUSED = 1, 2  # exit statuses of a trial
_TRIAL: Final = "specinfer.kernels.faults"  # imports PyTorch, in the child alone
_TIMEOUT: Final = 60  # seconds; a proof takes a few
_OF_THE_CODE: Final = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE")  # and of nothing else on the machine
_LOG: Final = logging.getLogger(__name__)


def prove(library: Path, level: Level, folder: Path | None = None) -> str | None:
    """Why a library must not be used on this machine; None: it may be.

    What was found before is read from `folder`, by default the one of compiled libraries. What may be
    otherwise the next time (no process to be had, no end, no permission) is not remembered.
    """
    key = {
        "library": hashlib.sha256(library.read_bytes()).hexdigest(),
        "machine": cpu_name(),
        "features": hashlib.sha256(" ".join(sorted(cpu_features())).encode()).hexdigest(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    name = f"proof-{level.name}-{digest}.json"
    try:
        file = (folder or kernels_folder()) / name
    except (KernelBuildError, OSError):  # nowhere to remember it: a wheel's library is tried each time
        return _try_in_child(library, level)[0]
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found["key"] == key and isinstance(found["fault"], str | None):
            return None if found["fault"] is None else f"{found['fault']} (found before; see {file})"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    fault, lasting = _try_in_child(library, level)
    if lasting:
        write_whole(file, json.dumps({"key": key, "fault": fault}, indent=1))
    return fault


def _try_in_child(library: Path, level: Level) -> tuple[str | None, bool]:
    """What is wrong, and whether it will be wrong the next time."""
    package = str(Path(__file__).parents[2])
    known = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{known}" if known else package}
    command = [sys.executable, "-m", _TRIAL, str(library), level.name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT, env=environment, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"it could not be tried: {error}", False
    if done.returncode == 0:
        return None, True
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"trying it ended with {name}", name in _OF_THE_CODE
    words = (done.stdout.strip() or done.stderr.strip()).splitlines()
    reason = words[-1] if words else f"trying it ended with status {done.returncode}"
    return reason, done.returncode == WRONG


@dataclass(frozen=True, slots=True)
class Refused:
    """A level this CPU has, and why its library is not used."""

    level: Level
    reason: str = field(compare=False)  # put in other words when it is found again


def load_library(progress: Progress | None = None) -> Library:
    """The library of the best level this CPU has, that can be had, and that proves itself.

    A better level that is refused costs one line in the log, once a process. Raises KernelBuildError where
    none is left, ConfigError where SPECINFER_CPU names what cannot be.
    """
    library, refused = find_best(progress)
    if library is None and not refused:
        raise KernelBuildError(
            f"there are no native kernels for this CPU ({architecture()}, {cpu_name()}); "
            "they need AVX2 or NEON"
        )
    last = None if library is not None else refused[-1].reason  # raised, and so not logged as well
    for better in refused:
        if better.reason != last:
            _tell(better)
    if library is None:
        raise KernelBuildError(last)
    return library


def find_best(progress: Progress | None = None) -> tuple[Library | None, list[Refused]]:
    """The library to use, and the better levels that are refused; raises ConfigError as above."""
    refused: list[Refused] = []
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
        refused.append(Refused(level, fault))
    return None, refused


@functools.cache
def _tell(refused: Refused) -> None:
    """Log it; every model that is loaded finds it again, and it is told once."""
    _LOG.warning("native kernels for %s are not used: %s", refused.level.words, refused.reason)


@functools.cache
def _loaded(path: Path, level: Level) -> Library:
    """One library a file: its threads and memory are there once, whoever asks."""
    return Library(path, level)
