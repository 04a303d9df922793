"""This machine's CPU, matching kernel levels, and the threads and memory a process may use.

Native kernels are compiled for a few levels of CPU. All levels have the same sources, which test the
compiler's macros for features. int8 products have the same bits at every level, int4 ones at all but AMX. At
each level a row's result depends on the row alone, except for loose products (quantized.py). AMX also
requires float16 arithmetic, which every CPU with AMX has unless a hypervisor hides it, and an assembler that
supports it (binutils 2.38).

Control groups limit the CPUs and the memory of containers and services:

    /proc/self/cgroup     the group in each hierarchy:     4:memory:/docker/4f1a (version 1), 0::/user/a (2)
    /proc/self/mountinfo  where the hierarchy is mounted, and which of its groups is at the mount's root

A group's limit holds for all groups below it, so the minimum over all parents up to the mount's root counts.
Groups above a container's own cannot be seen from inside. Reading never raises: missing or damaged files mean
no limit.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from specinfer.errors import ConfigError

_ROOT = Path("/")
_UNLIMITED: Final = 1 << 62  # bytes; version 1 writes "no limit" as the largest number of whole pages
_CPU_INFO: Final = Path("/proc/cpuinfo")
_CPUS: Final = Path("/sys/devices/system/cpu")
_CACHE: Final = 16 << 20  # default bytes if the system reports none
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BFLOAT16: Final = ("avx512_bf16", "amx_bf16", "bf16")
# macOS names of features, and their names in Linux's /proc/cpuinfo.
_APPLE: Final = {
    "hw.optional.AdvSIMD": "asimd",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
}
VARIABLE: Final = "SPECINFER_CPU"
_V3: Final = "-march=x86-64-v3"
_V4: Final = "-march=x86-64-v4 -mavx512vnni"
_AMX: Final = "-mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16 -DSPECINFER_TILES"


@dataclass(frozen=True, slots=True)
class _Mount:
    """A mounted hierarchy of groups."""

    controllers: frozenset[str] | None  # None: version 2, with all controllers
    top: PurePosixPath  # the group at the mount's root
    folder: Path


def cgroup_cpus() -> float | None:
    """CPU limit of the process's groups, in CPUs; None: no limit."""
    return min((cpus for folder in _folders("cpu") if (cpus := _quota(folder)) is not None), default=None)


def cgroup_free_memory() -> int | None:
    """Bytes that the process's groups may still allocate; None: no limit.

    Inactive file pages count as free, since the kernel reclaims them on demand.
    """
    rooms = (_free_memory(folder) for folder in _folders("memory"))
    return min((room for room in rooms if room is not None), default=None)


def cgroup_memory() -> int | None:
    """Bytes that the process's groups may have, used or not; None: no limit."""
    limits = (_memory_limit(folder) for folder in _folders("memory"))
    return min((limit for limit in limits if limit is not None), default=None)


def release_free_memory() -> None:
    """Return freed memory from the C library to the system, if supported.

    The C library keeps memory that threads have freed: hundreds of megabytes after a model was prepared.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc
        trim(ctypes.c_size_t(0))


@contextmanager
def short_turns() -> Iterator[None]:
    """Let Python's threads take turns after 0.1 ms instead of 5 ms during the block.

    A thread that calls the library for each matrix would otherwise wait 5 ms after each call for a thread
    that runs Python.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


def _folders(controller: str) -> list[Path]:
    """The visible folders of the process's groups, each before its parents."""
    mounts = _mounts()
    folders: list[Path] = []
    for line in (_read(_ROOT / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if name and (controllers == "" or controller in controllers.split(",")):
            folders += _ancestors(name, [m for m in mounts if _has(m, controllers, controller)])
    return folders


def _has(mount: _Mount, controllers: str, controller: str) -> bool:
    if controllers == "":
        return mount.controllers is None
    return mount.controllers is not None and controller in mount.controllers


def _ancestors(name: str, mounts: list[_Mount]) -> list[Path]:
    """The folders from a group's up to the mount's root; the root alone if the group is not below it."""
    group = PurePosixPath(name)
    for mount in mounts:
        if ".." not in group.parts and group.is_relative_to(mount.top):
            below = group.relative_to(mount.top)
            return [mount.folder / folder for folder in (below, *below.parents)]
    return [mount.folder for mount in mounts[:1]]


def _mounts() -> list[_Mount]:
    mounts: list[_Mount] = []
    for line in (_read(_ROOT / "proc/self/mountinfo") or "").splitlines():
        # `32 31 0:29 /docker/4f1a /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct`
        mount, _, kind = (part.split() for part in line.partition(" - "))
        if len(mount) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        top, folder = (
            re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), name) for name in mount[3:5]
        )
        controllers = frozenset(kind[2].split(",")) if kind[0] == "cgroup" else None
        mounts.append(_Mount(controllers, PurePosixPath(top), _ROOT / folder.lstrip("/")))
    return mounts


def _quota(folder: Path) -> float | None:
    both = (_read(folder / "cpu.max") or "").split()
    if not both:
        both = [(_read(folder / f"cpu.cfs_{part}_us") or "").strip() for part in ("quota", "period")]
    quota, period = (_number(text) for text in both) if len(both) == 2 else (None, None)
    return quota / period if quota is not None and period else None


def _memory_limit(folder: Path) -> int | None:
    limits = _numbers_in(folder, "memory.max", "memory.high", "memory.limit_in_bytes")
    limit = min(limits, default=_UNLIMITED)
    return None if limit >= _UNLIMITED else limit


def _free_memory(folder: Path) -> int | None:
    if (limit := _memory_limit(folder)) is None:
        return None
    taken = max(_numbers_in(folder, "memory.current", "memory.usage_in_bytes"), default=0)
    return max(0, limit - max(0, taken - _reclaimable(folder)))


def _reclaimable(folder: Path) -> int:
    """Bytes of inactive file pages; version 1 has a separate total that includes child groups."""
    lines = (line.partition(" ") for line in (_read(folder / "memory.stat") or "").splitlines())
    figures = {name: number for name, _, text in lines if (number := _number(text)) is not None}
    return figures.get("total_inactive_file", figures.get("inactive_file", 0))


def _numbers_in(folder: Path, *names: str) -> list[int]:
    numbers = (_number((_read(folder / name) or "").strip()) for name in names)
    return [number for number in numbers if number is not None]


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= 20 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):  # a damaged name may be no valid path
        return None


def architecture() -> str:
    """x86-64, aarch64, or the system's own name."""
    name = platform.machine()
    return {"AMD64": "x86-64", "x86_64": "x86-64", "arm64": "aarch64"}.get(name, name)


@functools.cache
def cpu_features() -> frozenset[str]:
    """Features of the CPU and the system's kernel, as named in /proc/cpuinfo."""
    if platform.system() == "Darwin":
        return frozenset(name for key, name in _APPLE.items() if _sysctl(key) == "1")
    return frozenset((cpu_info("flags") or cpu_info("Features") or "").split())


def is_quick_in_bfloat16() -> bool:
    """True if the CPU multiplies bfloat16 natively, which is faster than float32."""
    return not cpu_features().isdisjoint(_BFLOAT16)


@functools.cache
def cpu_name() -> str:
    """The CPU's name."""
    if platform.system() == "Darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    named = cpu_info("model name")
    parts = [cpu_info("CPU implementer"), cpu_info("CPU part")]
    return named or " ".join(part for part in parts if part) or platform.processor() or platform.machine()


def thread_count(wanted: int | None = None, processes: int = 1) -> int:
    """Number of compute threads: `wanted`, or by default the physical cores this process may use.

    If `processes` compute together, each gets an equal share of the cores. OMP_NUM_THREADS is an upper bound.
    """
    count = max(1, usable_cores() // processes) if wanted is None else wanted
    bound = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(count, int(bound)) if bound.isdecimal() and int(bound) >= 1 else count


def usable_cores() -> int:
    """The physical cores this process may use, within its cgroup's quota."""
    cores = len({_core(cpu) for cpu in allowed_cpus()})
    quota = cgroup_cpus()
    return cores if quota is None else min(cores, max(1, math.floor(quota)))


def allowed_cpus() -> frozenset[int]:
    """The logical CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_share(number: int, count: int) -> frozenset[int]:
    """The logical CPUs of process `number` of `count` on this machine: whole neighbouring cores.

    All processes get all CPUs if there are fewer cores than processes.
    """
    cores: dict[tuple[str, str], set[int]] = {}
    for cpu in sorted(allowed_cpus()):
        cores.setdefault(_core(cpu), set()).add(cpu)
    if len(cores) < count:
        return allowed_cpus()
    first, end = (n * len(cores) // count for n in (number, number + 1))
    return frozenset().union(*[*cores.values()][first:end])


@functools.cache
def cache_bytes() -> int:
    """Total bytes of the last-level caches of all CPUs of this process.

    Fewer compute threads fill less of them.
    """
    found: dict[tuple[int, str], int] = {}  # by level and sharing CPUs
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
    """The physical core of a logical CPU; the CPU itself if unknown."""
    topology = _CPUS / f"cpu{cpu}" / "topology"
    package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
    return (package.strip(), core.strip()) if package and core else ("", str(cpu))


def cpu_info(key: str) -> str | None:
    """The first value of `key` in /proc/cpuinfo; None if absent."""
    for line in (_read(_CPU_INFO) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _sysctl(key: str) -> str:
    done = subprocess.run(["sysctl", "-n", key], capture_output=True, text=True, check=False)
    return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class Level:
    """A level of CPU features."""

    name: str
    architecture: str
    needs: frozenset[str]  # features, as named in /proc/cpuinfo
    flags: tuple[str, ...]  # compiler flags
    words: str  # description, for display


def _levels(architecture: str, *steps: tuple[str, str, str, str]) -> tuple[Level, ...]:
    """Cumulative levels from steps of name, needs, flags and words."""
    levels: list[Level] = []
    needs: frozenset[str] = frozenset()
    for name, more, flags, words in steps:
        needs |= frozenset(more.split())
        levels.append(Level(name, architecture, needs, tuple(flags.split()), words))
    return tuple(levels)


# In ascending order.
LEVELS: Final = (
    *_levels(
        "x86-64",
        ("avx2", "avx2 fma f16c bmi1 bmi2 movbe abm", _V3, "AVX2"),
        ("avxvnni", "avx_vnni", f"{_V3} -mavxvnni", "AVX2 with VNNI"),
    ),
    *_levels(
        "x86-64",
        (
            "avx512",
            "avx2 fma f16c bmi1 bmi2 movbe abm avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni",
            _V4,
            "AVX-512 with VNNI",
        ),
        ("avx512bf16", "avx512_bf16", f"{_V4} -mavx512bf16", "AVX-512 with VNNI and bfloat16"),
        ("amx", "amx_tile amx_int8 amx_bf16 avx512_fp16", f"{_V4} {_AMX}", "AMX tiles"),
    ),
    *_levels(
        "aarch64",
        ("neon", "asimd", "-march=armv8-a", "NEON"),
        ("dotprod", "asimddp", "-march=armv8.2-a+dotprod", "NEON with dot products"),
        ("i8mm", "i8mm bf16", "-march=armv8.2-a+dotprod+i8mm+bf16", "NEON with dot products and bfloat16"),
    ),
)


def levels_here() -> tuple[Level, ...]:
    """The levels this CPU has, best first; SPECINFER_CPU sets an upper bound.

    Raises ConfigError if it does not name a level, or names one that this CPU lacks.
    """
    here, has = architecture(), cpu_features()
    found = tuple(level for level in reversed(LEVELS) if level.architecture == here and level.needs <= has)
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return found
    names = [level.name for level in found]
    if wanted not in names:
        known = wanted in [level.name for level in LEVELS]
        raise ConfigError(
            f"{VARIABLE} is {wanted!r}{', which this CPU lacks' if known else ''}; allowed here: "
            f"{', '.join(names) or 'nothing'} ({cpu_name()})"
        )
    return found[names.index(wanted) :]
