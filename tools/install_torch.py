"""Install PyTorch into this Python's environment: the CPU build on machines without a GPU.

    .venv/bin/python tools/install_torch.py

On Linux x86-64 a plain `pip install torch` downloads gigabytes of CUDA libraries. The first line that applies
decides:

    a PyTorch in the range of pyproject.toml is installed   keep it
    there is an NVIDIA GPU, or the system is not Linux x86  plain torch
    an index or a find-links folder offers the CPU build    that
    uv can be installed and reaches PyTorch's own index     the CPU build from there
    else                                                    plain torch, with a message

This script uses only the standard library, as it runs before anything is installed.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSION = "2.13.0"  # the version to install; pyproject.toml has the accepted range
CONSTRAINTS = ROOT / "constraints.txt"
DRIVER = Path("/proc/driver/nvidia")


def main() -> int:
    found, least = installed(), least_version()
    if found is not None and as_numbers(found) >= as_numbers(least):
        print(f"torch {found} is installed, {least} or newer is needed: kept")
        return 0
    if reason := wants_plain():
        return pip("install", f"torch=={VERSION}", why=f"installing torch {VERSION} ({reason})")
    cpu = f"torch=={VERSION}+cpu"
    if pip("install", cpu, why=f"installing the CPU build of torch {VERSION}", quiet=True) == 0:
        return 0
    if uv_installs_cpu_build():
        return 0
    why = (
        f"no CPU build of torch {VERSION} was found, neither by pip nor by uv: installing the plain one, "
        "which may bring gigabytes of CUDA libraries; it runs on the CPU all the same"
    )
    return pip("install", f"torch=={VERSION}", why=why)


def installed() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def least_version() -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ranges = [r.removeprefix("torch>=") for r in project["dependencies"] if r.startswith("torch>=")]
    assert len(ranges) == 1, "pyproject.toml states one range of torch, as torch>=X"
    return str(ranges[0])


def as_numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0)."""
    return tuple(int(part) for part in re.split(r"[^\d.]", version)[0].strip(".").split("."))


def wants_plain() -> str | None:
    """Return the reason to install plain torch, or None to install the CPU build."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"{sys.platform} {platform.machine()}"
    if DRIVER.exists():
        return "an NVIDIA GPU is there"
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
        if listed.returncode == 0 and "GPU" in listed.stdout:
            return "an NVIDIA GPU is there"
    return None


def uv_installs_cpu_build() -> bool:
    if pip("install", "uv", why="trying uv, which has PyTorch's CPU index", quiet=True):
        return False
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    command += ["--torch-backend=cpu", "--constraint", str(CONSTRAINTS), f"torch=={VERSION}"]
    patience = os.environ | {"UV_HTTP_TIMEOUT": "30"}  # seconds for an index that does not answer
    try:
        return subprocess.run(command, env=patience, check=False).returncode == 0
    finally:
        pip("uninstall", "--yes", "uv", quiet=True)


def pip(action: str, *arguments: str, why: str = "", quiet: bool = False) -> int:
    """Run pip and return its exit status; `quiet` hides its errors, for attempts with a fallback."""
    if why:
        print(why, flush=True)
    command = [sys.executable, "-m", "pip", action, "--disable-pip-version-check", *arguments]
    if action == "install" and not in_shared_environment():
        command += ["--constraint", str(CONSTRAINTS)]
    return subprocess.run(command, stderr=subprocess.DEVNULL if quiet else None, check=False).returncode


def in_shared_environment() -> bool:
    """True if the environment uses system packages; the constraints must not replace these."""
    settings = Path(sys.prefix) / "pyvenv.cfg"
    return settings.exists() and "include-system-site-packages = true" in settings.read_text(encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
