"""Reported hardware: cores, their available time, and instruction sets."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from specinfer.kernels import machine
from specinfer.kernels.machine import cache_bytes, cpu_features, cpu_name, cpu_share, thread_count


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Clears cached facts of the CPU."""
    for known in (cpu_features, cpu_name, cache_bytes):
        known.cache_clear()
    yield
    for known in (cpu_features, cpu_name, cache_bytes):
        known.cache_clear()


@pytest.fixture(autouse=True)
def _no_omp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


Cores = dict[int, tuple[int, int] | None]


def set_cores(monkeypatch: pytest.MonkeyPatch, folder: Path, cores: Cores) -> None:
    """Logical CPUs this process may use, each with its package and core; None: the system does not say."""
    for cpu, place in cores.items():
        if place is not None:
            names = ("physical_package_id", "core_id")
            topology = folder / "cpus" / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            for name, number in zip(names, place, strict=True):
                (topology / name).write_text(f"{number}\n")
    monkeypatch.setattr(machine, "_CPUS", folder / "cpus")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(cores), raising=False)


# Four hyperthreads of two cores; the same numbers on two sockets; four cores without hyperthreads.
HYPERTHREADS: Cores = {0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1)}
SOCKETS: Cores = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
UNKNOWN: Cores = {0: None, 1: None, 2: None, 3: None}


THREADS = [  # cores, quota, threads
    (HYPERTHREADS, None, 2),
    (SOCKETS, None, 4),
    (UNKNOWN, None, 4),
    ({0: (0, 0), 2: (0, 0)}, None, 1),  # bound to both hyperthreads of a core
    ({1: (0, 1), 2: (0, 0)}, None, 2),  # bound to one of each
    ({7: (0, 3)}, None, 1),
    (SOCKETS, 3.0, 3),
    (SOCKETS, 2.5, 2),
    (SOCKETS, 0.5, 1),
    (SOCKETS, 9.0, 4),
    (HYPERTHREADS, 3.0, 2),
]


def test_as_many_threads_as_there_are_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number, (cores, quota, threads) in enumerate(THREADS):
        set_cores(monkeypatch, tmp_path / f"{number}", cores)
        monkeypatch.setattr(machine, "cgroup_cpus", lambda quota=quota: quota)
        assert thread_count() == threads, (cores, quota)
        assert [thread_count(None, processes) for processes in (2, 64)] == [max(1, threads // 2), 1]
        assert thread_count(threads, 2) == threads  # as it is said


def set_caches(folder: Path, caches: dict[int, list[tuple[int, str, str]]]) -> None:
    """The caches of logical CPUs, each with its level, size and the CPUs that share it."""
    for cpu, of_cpu in caches.items():
        for number, cache in enumerate(of_cpu):
            index = folder / "cpus" / f"cpu{cpu}" / "cache" / f"index{number}"
            index.mkdir(parents=True)
            for name, value in zip(("level", "size", "shared_cpu_list"), cache, strict=True):
                (index / name).write_text(f"{value}\n")


L1, L2 = (1, "32K", "0"), (2, "1024K", "0")


CACHES = [  # caches, bytes that the last of them hold
    ({0: [L1, L2, (3, "32768K", "0-1")], 1: [(3, "32768K", "0-1")]}, 32 << 20),  # one that both share
    ({0: [(3, "96M", "0")], 1: [(3, "96M", "1")]}, 192 << 20),  # one of each
    ({0: [L1, L2], 1: [(1, "32K", "1"), (2, "1024K", "1")]}, 2 << 20),  # no third level
    ({0: [(3, "much", "0")]}, 16 << 20),  # an unreadable value is unknown
    ({0: [(3, "", "0")]}, 16 << 20),
    ({}, 16 << 20),
]


def test_what_the_last_caches_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for number, (caches, held) in enumerate(CACHES):
        set_cores(monkeypatch, tmp_path / f"{number}", {0: None, 1: None})
        set_caches(tmp_path / f"{number}", caches)
        cache_bytes.cache_clear()
        assert cache_bytes() == held, caches


OMP = [  # OMP_NUM_THREADS, requested threads, threads: an explicit number is used, outer regions count
    *((None, None, 4), (None, 3, 3), (None, 9, 9), ("", None, 4), ("2", None, 2), ("2", 3, 2), ("2", 1, 1)),
    *(("8", None, 4), ("8", 9, 8), ("3,2", None, 3), (" 2 ", None, 2)),
    *((wrong, None, 4) for wrong in ("0", "-1", "many", ",2", "2.5")),
]


def test_omp_num_threads_bounds_the_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_cores(monkeypatch, tmp_path, SOCKETS)
    monkeypatch.setattr(machine, "cgroup_cpus", lambda: None)
    for variable, wanted, threads in OMP:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if variable is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", variable)
        assert thread_count(wanted) == threads, (variable, wanted)


def test_processes_of_a_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_cores(monkeypatch, tmp_path / "a", HYPERTHREADS)
    assert [cpu_share(number, 2) for number in range(2)] == [{0, 2}, {1, 3}]
    set_cores(monkeypatch, tmp_path / "b", SOCKETS)
    everything = machine.allowed_cpus()
    for count in (1, 2, 3, 4):
        shares = [cpu_share(number, count) for number in range(count)]
        assert frozenset().union(*shares) == everything
        assert sum(map(len, shares)) == len(everything)
        assert min(map(len, shares)) == 4 // count
    assert [cpu_share(number, 5) for number in range(5)] == [everything] * 5


def test_where_affinity_is_unknown_all_cpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(machine.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 3)
    assert machine.allowed_cpus() == {0, 1, 2}


X86 = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Gold 6430
flags\t\t: fpu sse2 avx2 amx_tile

processor\t: 1
model name\t: Intel(R) Xeon(R) Gold 6430
flags\t\t: fpu sse2 avx2 amx_tile
"""
ARM = """processor\t: 0
Features\t: fp asimd asimddp
CPU implementer\t: 0x41
CPU part\t: 0xd0c
"""


CPU_INFO = [
    (X86, "Intel(R) Xeon(R) Gold 6430", {"fpu", "sse2", "avx2", "amx_tile"}),
    (ARM, "0x41 0xd0c", {"fp", "asimd", "asimddp"}),
    ("", "a processor", set()),
]


def test_a_linux_cpu_says_what_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    monkeypatch.setattr(machine.platform, "processor", lambda: "a processor")
    for text, name, features in CPU_INFO:
        (tmp_path / "cpuinfo").write_text(text)
        cpu_name.cache_clear(), cpu_features.cache_clear()
        assert (cpu_name(), cpu_features()) == (name, features), text


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its malloc")
def test_freed_memory_is_given_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    size, blocks = 64 << 10, [libc.malloc(64 << 10) for _ in range(1024)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    taken = psutil.Process().memory_info().rss
    for block in blocks[:-1]:  # the last one is above them: the heap does not shrink by itself
        libc.free(block)
    machine.release_free_memory()
    assert psutil.Process().memory_info().rss < taken - (32 << 20)
    libc.free(blocks[-1])
