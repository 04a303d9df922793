"""Provenance of a figure: commit, versions, hardware."""

import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import psutil
import torch

from specinfer.kernels.machine import cpu_features, cpu_info, cpu_name, thread_count
from specinfer.version import VERSION

# Features of a CPU that a figure's hardware line names.
WIDE = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve", "bf16")


def provenance(threads: int | None = None) -> dict[str, Any]:
    """Return date, commit (None outside a checkout), versions and hardware, as plain JSON values.

    `threads` is the value of the option of that name, or None if it was not set.
    """
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "commit": commit(),
        "versions": versions(),
        "hardware": hardware(threads),
    }


def versions() -> dict[str, str]:
    """Return the versions of specinfer, Python and the libraries that compute."""
    return {
        "specinfer": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
    }


def commit() -> str | None:
    """Return the commit of specinfer's checkout, with "+" appended if the package has changes."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():  # installed, perhaps inside another project's checkout
        return None
    sha = _git(checkout, "rev-parse", "--short=12", "HEAD")
    changed = _git(checkout, "status", "--porcelain", "--", "specinfer")
    return f"{sha}+" if sha and changed else sha


def hardware(threads: int | None = None) -> dict[str, Any]:
    """Return CPU, cores, memory and GPUs of this machine, and the engine's number of threads."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu(),
        "cores": psutil.cpu_count(logical=False),
        "threads": thread_count(threads),  # PyTorch may use fewer (engine/build.py)
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": gpus,
        "system": f"{platform.system()} {platform.release()}",
    }


def _git(checkout: Path, *arguments: str) -> str | None:
    try:
        found = subprocess.run(
            ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:  # no git on this machine
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def _cpu() -> str:
    family = cpu_info("cpu family")
    named = cpu_name() + (f" (family {family})" if family else "")
    return " ".join([named, *(flag for flag in WIDE if flag in cpu_features())])
