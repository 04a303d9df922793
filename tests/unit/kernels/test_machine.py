"""What a machine is said to be: how many cores, how much of their time, and what they can do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specinfer.kernels import machine
from specinfer.kernels.machine import (
    allowed_cpus,
    architecture,
    cgroup_cpus,
    cpu_features,
    cpu_name,
    thread_count,
)

# The files of cgroups, by their path below /sys/fs/cgroup.
Groups = dict[str, str]

V2: list[tuple[str, str, Groups, float | None]] = [
    ("no quota", "0::/", {}, None),
    ("as much as there is", "0::/", {"cpu.max": "max 100000"}, None),
    ("two CPUs", "0::/", {"cpu.max": "200000 100000"}, 2.0),
    ("half a CPU", "0::/", {"cpu.max": "25000 50000"}, 0.5),
    ("its own group", "0::/a", {"a/cpu.max": "300000 100000"}, 3.0),
    ("the group around it", "0::/a/b", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, 1.0),
    ("the least of nested", "0::/a/b", {"a/cpu.max": "400000 100000", "a/b/cpu.max": "150000 100000"}, 1.5),
    ("the least is outside", "0::/a/b", {"a/cpu.max": "150000 100000", "a/b/cpu.max": "4000 1000"}, 1.5),
    ("another group", "0::/a", {"b/cpu.max": "100000 100000"}, None),
    ("a container's root", "0::/docker/4f1a/init.scope", {"cpu.max": "200000 100000"}, 2.0),
    ("a container seen from a sibling", "0::/../other", {"cpu.max": "200000 100000"}, 2.0),
    ("a damaged file", "0::/", {"cpu.max": "lots"}, None),
    ("a period of nothing", "0::/", {"cpu.max": "100000 0"}, None),
]


def v1(folder: str, quota: int, period: int = 100000) -> Groups:
    """The files of a group under version 1."""
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}


V1: list[tuple[str, str, Groups, float | None]] = [
    ("no quota", "3:cpu:/", v1("cpu", -1), None),
    ("two CPUs", "4:memory:/\n3:cpu:/\n1:name=systemd:/", v1("cpu", 200000), 2.0),
    ("half a CPU", "3:cpu:/", v1("cpu", 25000, 50000), 0.5),
    ("controllers side by side", "3:cpu,cpuacct:/a", v1("cpu,cpuacct/a", 300000), 3.0),
    ("the least of nested", "3:cpu:/a/b", {**v1("cpu/a", 150000), **v1("cpu/a/b", 400000)}, 1.5),
    ("a container's root", "3:cpu:/docker/4f1a", v1("cpu", 200000), 2.0),
    (
        "another controller",
        "3:cpuacct:/\n2:cpuset:/",
        {**v1("cpuacct", 100000), **v1("cpuset", 100000)},
        None,
    ),
    ("both versions", "3:cpu:/\n0::/a", {**v1("cpu", 200000), "a/cpu.max": "100000 100000"}, 1.0),
]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What is asked of the CPU once a process is asked again."""
    for known in (cpu_features, cpu_name):
        known.cache_clear()
    yield
    for known in (cpu_features, cpu_name):
        known.cache_clear()


@pytest.fixture(autouse=True)
def _no_omp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def write(folder: Path, files: Groups) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def set_cgroup(monkeypatch: pytest.MonkeyPatch, folder: Path, own: str | None, files: Groups) -> None:
    """The process is in the groups `own` says; None: the system has no cgroups."""
    groups = folder / "mounted" / "cgroup"
    groups.mkdir(parents=True)
    write(groups, files)
    if own is not None:
        (folder / "own").write_text(f"{own}\n")
    monkeypatch.setattr(machine, "_CGROUP", folder / "own")
    monkeypatch.setattr(machine, "_CGROUPS", groups)


def set_cores(
    monkeypatch: pytest.MonkeyPatch, folder: Path, cores: dict[int, tuple[int, int] | None]
) -> None:
    """Logical CPUs this process may use, each with its package and core; None: the system does not say."""
    for cpu, place in cores.items():
        if place is not None:
            names = ("physical_package_id", "core_id")
            topology = {f"cpu{cpu}/topology/{name}": f"{n}\n" for name, n in zip(names, place, strict=True)}
            write(folder / "cpus", topology)
    monkeypatch.setattr(machine, "_CPUS", folder / "cpus")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(cores), raising=False)


@pytest.mark.parametrize(("own", "files", "cpus"), [row[1:] for row in V2], ids=[row[0] for row in V2])
def test_quotas_of_cgroups_version_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, files: Groups, cpus: float | None
) -> None:
    set_cgroup(monkeypatch, tmp_path, own, files)
    assert cgroup_cpus() == cpus


@pytest.mark.parametrize(("own", "files", "cpus"), [row[1:] for row in V1], ids=[row[0] for row in V1])
def test_quotas_of_cgroups_version_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: str, files: Groups, cpus: float | None
) -> None:
    set_cgroup(monkeypatch, tmp_path, own, files)
    assert cgroup_cpus() == cpus


def test_groups_outside_the_tree_are_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_cgroup(monkeypatch, tmp_path, "0::/a/b", {})
    write(tmp_path, {"cpu.max": "100000 100000", "mounted/cpu.max": "100000 100000"})
    assert cgroup_cpus() is None


def test_a_system_without_cgroups_has_no_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_cgroup(monkeypatch, tmp_path, None, {"cpu.max": "100000 100000"})
    assert cgroup_cpus() is None


# Four hyperthreads of two cores; the same numbers on two sockets; four cores without hyperthreads.
HYPERTHREADS: dict[int, tuple[int, int] | None] = {0: (0, 0), 1: (0, 1), 2: (0, 0), 3: (0, 1)}
SOCKETS: dict[int, tuple[int, int] | None] = {0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1)}
UNKNOWN: dict[int, tuple[int, int] | None] = {0: None, 1: None, 2: None, 3: None}


@pytest.mark.parametrize(
    ("cores", "cpu_max", "threads"),
    [
        (HYPERTHREADS, "max 100000", 2),
        (SOCKETS, "max 100000", 4),
        (UNKNOWN, "max 100000", 4),
        ({0: (0, 0), 2: (0, 0)}, "max 100000", 1),  # bound to both hyperthreads of a core
        ({1: (0, 1), 2: (0, 0)}, "max 100000", 2),  # bound to one of each
        ({7: (0, 3)}, "max 100000", 1),
        (SOCKETS, "300000 100000", 3),
        (SOCKETS, "250000 100000", 2),
        (SOCKETS, "50000 100000", 1),
        (SOCKETS, "900000 100000", 4),
        (HYPERTHREADS, "300000 100000", 2),
    ],
)
def test_as_many_threads_as_physical_cores_may_be_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    cores: dict[int, tuple[int, int] | None],
    cpu_max: str,
    threads: int,
) -> None:
    set_cores(monkeypatch, tmp_path, cores)
    set_cgroup(monkeypatch, tmp_path, "0::/", {"cpu.max": cpu_max})
    assert thread_count() == threads


@pytest.mark.parametrize(
    ("variable", "wanted", "threads"),
    [
        (None, None, 4),
        (None, 3, 3),
        (None, 9, 9),  # whoever names a number gets it
        ("", None, 4),
        ("2", None, 2),
        ("2", 3, 2),
        ("2", 1, 1),
        ("8", None, 4),
        ("8", 9, 8),
        ("3,2", None, 3),  # outer and nested regions
        (" 2 ", None, 2),
        ("0", None, 4),
        ("-1", None, 4),
        ("many", None, 4),
        (",2", None, 4),
        ("2.5", None, 4),
    ],
)
def test_omp_num_threads_bounds_the_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str | None, wanted: int | None, threads: int
) -> None:
    set_cores(monkeypatch, tmp_path, SOCKETS)
    set_cgroup(monkeypatch, tmp_path, "0::/", {})
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert thread_count(wanted) == threads


def test_only_cpus_of_the_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {1, 5}, raising=False)
    assert allowed_cpus() == {1, 5}


def test_where_affinity_is_unknown_all_cpus_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(machine.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 3)
    assert allowed_cpus() == {0, 1, 2}


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


@pytest.mark.parametrize(
    ("text", "name", "features"),
    [
        (X86, "Intel(R) Xeon(R) Gold 6430", {"fpu", "sse2", "avx2", "amx_tile"}),
        (ARM, "0x41 0xd0c", {"fp", "asimd", "asimddp"}),
        ("", "a processor", set()),
    ],
    ids=["x86", "ARM", "nothing"],
)
def test_a_linux_cpu_says_what_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, name: str, features: set[str]
) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "_CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    monkeypatch.setattr(machine.platform, "processor", lambda: "a processor")
    assert cpu_name() == name
    assert cpu_features() == features


def test_an_apple_cpu_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "machdep.cpu.brand_string": "Apple M2",
        "hw.optional.AdvSIMD": "1",
        "hw.optional.arm.FEAT_DotProd": "1",
        "hw.optional.arm.FEAT_I8MM": "0",
    }
    monkeypatch.setattr(machine.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(machine, "_sysctl", lambda key: said.get(key, ""))
    assert cpu_name() == "Apple M2"
    assert cpu_features() == {"asimd", "asimddp"}


@pytest.mark.parametrize(
    ("said", "name"),
    [("x86_64", "x86-64"), ("AMD64", "x86-64"), ("arm64", "aarch64"), ("aarch64", "aarch64"), ("s390x",) * 2],
)
def test_an_architecture_has_one_name(monkeypatch: pytest.MonkeyPatch, said: str, name: str) -> None:
    monkeypatch.setattr(machine.platform, "machine", lambda: said)
    assert architecture() == name
