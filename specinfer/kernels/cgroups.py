"""What the control groups of this process allow it: containers and services limit CPUs and memory by them.

    /proc/self/cgroup     which group of which hierarchy:  4:memory:/docker/4f1a (version 1), 0::/user/a (2)
    /proc/self/mountinfo  where the hierarchy is mounted, and which of its groups is at the mount's top

A group's limit holds for all groups below it, so the least on the way up to the mount's top counts. What lies
above a container's own group cannot be seen from inside. Nothing here raises: whatever is missing, damaged or
another system's is no limit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

_ROOT = Path("/")
_UNLIMITED: Final = 1 << 62  # bytes; version 1 writes "no limit" as the largest number of whole pages


@dataclass(frozen=True, slots=True)
class _Mount:
    """A hierarchy of groups in the file system."""

    controllers: frozenset[str] | None  # None: version 2, which has all of them
    top: PurePosixPath  # the group whose folder is the mount's
    folder: Path


def cgroup_cpus() -> float | None:
    """How many CPUs' time the process's groups may use; None: as much as there is."""
    return min((cpus for folder in _folders("cpu") if (cpus := _quota(folder)) is not None), default=None)


def cgroup_free_memory() -> int | None:
    """How many bytes the process's groups may still take; None: as many as there are.

    Pages of files that nobody has used lately count as free: they go when memory is asked for.
    """
    rooms = (_free_memory(folder) for folder in _folders("memory"))
    return min((room for room in rooms if room is not None), default=None)


def _folders(controller: str) -> list[Path]:
    """The folders of the process's groups, each before the ones around it, where they can be seen."""
    mounts = _mounts()
    folders: list[Path] = []
    for line in (_read(_ROOT / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if name and (controllers == "" or controller in controllers.split(",")):
            folders += _way_up(name, [m for m in mounts if _has(m, controllers, controller)])
    return folders


def _has(mount: _Mount, controllers: str, controller: str) -> bool:
    if controllers == "":
        return mount.controllers is None
    return mount.controllers is not None and controller in mount.controllers


def _way_up(name: str, mounts: list[_Mount]) -> list[Path]:
    """The folders from a group's up to the mount's top; the top alone where the group is not below it."""
    group = PurePosixPath(name)
    for mount in mounts:
        if ".." not in group.parts and group.is_relative_to(mount.top):
            below = group.relative_to(mount.top)
            return [mount.folder / folder for folder in (below, *below.parents)]
    return [mount.folder for mount in mounts[:1]]


def _mounts() -> list[_Mount]:
    mounts: list[_Mount] = []
    for line in (_read(_ROOT / "proc/self/mountinfo") or "").splitlines():
        # 32 31 0:29 /docker/4f1a /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
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


def _free_memory(folder: Path) -> int | None:
    limits = _numbers_in(folder, "memory.max", "memory.high", "memory.limit_in_bytes")
    limit = min(limits, default=_UNLIMITED)
    if limit >= _UNLIMITED:
        return None
    taken = max(_numbers_in(folder, "memory.current", "memory.usage_in_bytes"), default=0)
    return max(0, limit - max(0, taken - _reclaimable(folder)))


def _reclaimable(folder: Path) -> int:
    """Bytes of files that were not used lately; version 1 counts those of the groups below apart."""
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
    except (OSError, ValueError):  # a damaged name may hold what no path has
        return None
