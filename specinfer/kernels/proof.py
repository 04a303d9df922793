"""Kernels prove themselves: a library is tried in a process of its own before it is used on a machine.

A wrong bit of a product, an instruction the CPU does not have, or a crash then costs a line in the log and
the next lesser level, never a wrong text. Products are held against plain arithmetic; whatever else there is
must run and give numbers. What was found is remembered for the machine and the library.

What is tried, and how, is in faults.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from specinfer.errors import KernelBuildError
from specinfer.files import write_whole
from specinfer.kernels import faults
from specinfer.kernels.levels import Level
from specinfer.kernels.machine import cpu_features, cpu_name
from specinfer.kernels.private_folder import kernels_folder

_TIMEOUT: Final = 60  # seconds; a proof takes half of one
_OF_THE_CODE: Final = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE")  # and of nothing else on the machine


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
    command = [sys.executable, "-m", faults.__name__, str(library), level.name]
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
    return reason, done.returncode == faults.WRONG
