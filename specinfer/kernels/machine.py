"""What this machine is: its CPU, what that can do, and how many threads may use it."""

from __future__ import annotations

import functools
import math
import os
import platform
import subprocess
from pathlib import Path
from typing import Final

from specinfer.kernels.cgroups import cgroup_cpus

_CPU_INFO: Final = Path("/proc/cpuinfo")
_CPUS: Final = Path("/sys/devices/system/cpu")
_CACHE: Final = 16 << 20  # bytes, where the system does not say
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BFLOAT16: Final = ("avx512_bf16", "amx_bf16", "bf16")
# What macOS calls the features that Linux names in /proc/cpuinfo.
_APPLE: Final = {
    "hw.optional.AdvSIMD": "asimd",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
}


def architecture() -> str:
    """x86-64, aarch64, or what the system calls it."""
    name = platform.machine()
    return {"AMD64": "x86-64", "x86_64": "x86-64", "arm64": "aarch64"}.get(name, name)


@functools.cache
def cpu_features() -> frozenset[str]:
    """What the CPU and the system's kernel offer, as /proc/cpuinfo spells it."""
    if platform.system() == "Darwin":
        return frozenset(name for key, name in _APPLE.items() if _sysctl(key) == "1")
    return frozenset((_cpu_info("flags") or _cpu_info("Features") or "").split())


def is_quick_in_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 numbers itself, which takes it less time than float32."""
    return not cpu_features().isdisjoint(_BFLOAT16)


@functools.cache
def cpu_name() -> str:
    """What the CPU calls itself."""
    if platform.system() == "Darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    named = _cpu_info("model name")
    parts = [_cpu_info("CPU implementer"), _cpu_info("CPU part")]
    return named or " ".join(part for part in parts if part) or platform.processor() or platform.machine()


def thread_count(wanted: int | None = None) -> int:
    """How many threads compute: as many as wanted, by default the physical cores this process may use.

    OMP_NUM_THREADS bounds it either way.
    """
    count = usable_cores() if wanted is None else wanted
    bound = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(count, int(bound)) if bound.isdecimal() and int(bound) >= 1 else count


def usable_cores() -> int:
    """The physical cores this process may use, its cgroup's quota counted."""
    cores = len({_core(cpu) for cpu in allowed_cpus()})
    quota = cgroup_cpus()
    return cores if quota is None else min(cores, max(1, math.floor(quota)))


def allowed_cpus() -> frozenset[int]:
    """The logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


@functools.cache
def cache_bytes() -> int:
    """What the last caches before memory hold, those of all CPUs of this process together.

    Threads that compute may be fewer, and then fill fewer.
    """
    found: dict[tuple[int, str], int] = {}  # by level, and the CPUs that share one
    for cpu in allowed_cpus():
        for cache in (_CPUS / f"cpu{cpu}" / "cache").glob("index*"):
            level, size, shared = (
                (_read(cache / name) or "").strip() for name in ("level", "size", "shared_cpu_list")
            )
            if level.isdecimal() and size[:-1].isdecimal():
                found[int(level), shared] = int(size[:-1]) * _UNITS.get(size[-1], 0)
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or _CACHE


def _core(cpu: int) -> tuple[str, str]:
    """The physical core of a logical CPU; itself where the system does not say."""
    topology = _CPUS / f"cpu{cpu}" / "topology"
    package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
    return (package.strip(), core.strip()) if package and core else ("", str(cpu))


def _cpu_info(key: str) -> str | None:
    for line in (_read(_CPU_INFO) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _sysctl(key: str) -> str:
    done = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
