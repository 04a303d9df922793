"""Where a number comes from: command, commit, versions, hardware."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import psutil
import torch

from specinfer import __version__


def provenance_lines() -> list[str]:
    """Markdown lines that say how and where the figures above them were measured."""
    command = " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *map(_short, sys.argv[1:])])
    return [
        f"- date: {datetime.now(UTC):%Y-%m-%d}",
        f"- command: `{command}`",
        f"- commit: {_commit()}",
        f"- specinfer {__version__}, Python {platform.python_version()}, torch {torch.__version__}",
        f"- hardware: {_cpu()}, {psutil.cpu_count(logical=False)} cores, "
        f"{psutil.virtual_memory().total / 2**30:.0f} GiB, {torch.get_num_threads()} threads{_gpu()}",
    ]


def _short(argument: str) -> str:
    """Paths by their last part: where a file lay on some machine helps nobody."""
    name, sign, path = argument.rpartition("=")
    return name + sign + (Path(path).name if "/" in path else path)


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "not a checkout"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        fields = {key.strip(): value.strip() for key, value in lines.items()}
        flags = fields.get("flags", "").split()
        wide = [f for f in ("avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8") if f in flags]
        model = f"{fields.get('model name', '?')} (family {fields.get('cpu family', '?')})"
        return f"{model}, {' '.join(wide) or 'no AVX-512'}"
    return platform.processor() or platform.machine()


def _gpu() -> str:
    return f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
