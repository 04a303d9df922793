"""Control groups of both versions, in made-up systems: a folder stands for the root of the file system."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from specinfer.kernels import machine
from specinfer.kernels.machine import cgroup_cpus, cgroup_free_memory

# The files of groups, by their path below /sys/fs/cgroup.
Groups = dict[str, str]

V2 = "30 29 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
HIDDEN = V2.replace("/ /sys", "/docker/4f1a /sys")  # the mount's top is the container's own group


def v1(controllers: str, top: str = "/") -> str:
    """A hierarchy of version 1, as mountinfo shows it."""
    place = f"/sys/fs/cgroup/{controllers}"
    return f"31 29 0:27 {top} {place} rw,relatime shared:9 master:1 - cgroup cgroup rw,{controllers}"


def make(root: Path, own: str | None, mounts: str | None, files: Groups) -> None:
    """The process is in the groups `own` says; None: the system does not say."""
    (root / "proc/self").mkdir(parents=True)
    for name, text in (("cgroup", own), ("mountinfo", mounts)):
        if text is not None:
            (root / "proc/self" / name).write_text(f"{text}\n")
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def quota(folder: str, quota: int, period: int = 100000) -> Groups:
    """A group's share of CPU time under version 1."""
    return {f"{folder}/cpu.cfs_quota_us": f"{quota}", f"{folder}/cpu.cfs_period_us": f"{period}"}


OTHERS = v1("cpuacct") + "\n" + v1("cpuset")
BOTH = v1("cpu") + "\n" + V2
CPUS: list[tuple[str, str | None, str | None, Groups, float | None]] = [
    ("no quota", "0::/", V2, {}, None),
    ("as much as there is", "0::/", V2, {"cpu.max": "max 100000"}, None),
    ("two CPUs", "0::/", V2, {"cpu.max": "200000 100000"}, 2.0),
    ("half a CPU", "0::/", V2, {"cpu.max": "25000 50000"}, 0.5),
    ("its own group", "0::/a", V2, {"a/cpu.max": "300000 100000"}, 3.0),
    ("the group around", "0::/a/b", V2, {"a/cpu.max": "100000 100000", "a/b/cpu.max": "max 100000"}, 1.0),
    ("nested", "0::/a/b", V2, {"a/cpu.max": "400000 100000", "a/b/cpu.max": "150000 100000"}, 1.5),
    ("nested, outside", "0::/a/b", V2, {"a/cpu.max": "150000 100000", "a/b/cpu.max": "4000 1000"}, 1.5),
    ("another group", "0::/a", V2, {"b/cpu.max": "100000 100000"}, None),
    ("a group that is gone", "0::/docker/4f1a/init.scope", V2, {"cpu.max": "200000 100000"}, 2.0),
    ("a container's top", "0::/docker/4f1a", HIDDEN, {"cpu.max": "200000 100000"}, 2.0),
    ("below a container's top", "0::/docker/4f1a/b", HIDDEN, {"b/cpu.max": "100000 100000"}, 1.0),
    ("a name that begins alike", "0::/docker/4f1ab", HIDDEN, {"b/cpu.max": "100000 100000"}, None),
    ("a container seen from a sibling", "0::/../other", V2, {"cpu.max": "200000 100000"}, 2.0),
    ("a damaged file", "0::/", V2, {"cpu.max": "lots"}, None),
    ("a period of nothing", "0::/", V2, {"cpu.max": "100000 0"}, None),
    ("version 1, no quota", "3:cpu:/", v1("cpu"), quota("cpu", -1), None),
    ("1, two CPUs", "4:memory:/\n3:cpu:/\n1:name=systemd:/", v1("cpu"), quota("cpu", 200000), 2.0),
    ("1, half a CPU", "3:cpu:/", v1("cpu"), quota("cpu", 25000, 50000), 0.5),
    ("side by side", "3:cpu,cpuacct:/a", v1("cpu,cpuacct"), quota("cpu,cpuacct/a", 300000), 3.0),
    ("1, nested", "3:cpu:/a/b", v1("cpu"), {**quota("cpu/a", 150000), **quota("cpu/a/b", 400000)}, 1.5),
    ("1, a container's top", "3:cpu:/docker/4f1a", v1("cpu", "/docker/4f1a"), quota("cpu", 200000), 2.0),
    ("another controller", "3:cpuacct:/\n2:cpuset:/", OTHERS, quota("cpuacct", 1) | quota("cpuset", 1), None),
    ("both", "3:cpu:/\n0::/a", BOTH, quota("cpu", 200000) | {"a/cpu.max": "100000 100000"}, 1.0),
    ("no groups", None, V2, {"cpu.max": "100000 100000"}, None),
    ("no mounts", "0::/", None, {"cpu.max": "100000 100000"}, None),
    ("not mounted", "0::/", "22 1 8:1 / / rw - ext4 /dev/sda1 rw", {"cpu.max": "100000 100000"}, None),
]


def group(folder: str = "", **files: int | str) -> Groups:
    """A group's files of memory: max_=1 is memory.max."""
    return {f"{folder}memory.{name.rstrip('_')}": f"{value}" for name, value in files.items()}


def nested(outside: int, inside: int) -> Groups:
    """A group that uses `outside` of 1000, and one below it that uses `inside` of 500."""
    return group("a/", max_=1000, current=outside) | group("a/b/", max_=500, current=inside)


def group1(limit: int, usage: int, folder: str = "", **files: str) -> Groups:
    """A group's files of memory under version 1."""
    return group(f"memory/{folder}", limit_in_bytes=limit, usage_in_bytes=usage, **files)


NONE = 9223372036854771712  # version 1's value for no limit
STAT = "anon 1\nfile 50\ninactive_file {}\nactive_file 7"
SUMS = "cache 1\ninactive_file 1\ntotal_inactive_file {}\ntotal_active_file 7"
V1_TOP, V1_AND_2 = v1("memory", "/docker/4f1a"), v1("memory") + "\n" + V2
MEMORY: list[tuple[str, str, str, Groups, int | None]] = [
    ("no limit", "0::/", V2, group(max_="max", high="max", current=100), None),
    ("no files", "0::/a", V2, {}, None),
    ("a limit", "0::/", V2, group(max_=1000, current=300), 700),
    ("more is taken than may be", "0::/", V2, group(max_=1000, current=1300), 0),
    ("slowed down before", "0::/", V2, group(max_=1000, high=800, current=300), 500),
    ("only slowed down", "0::/", V2, group(max_="max", high=800, current=300), 500),
    ("files can go", "0::/", V2, group(max_=1000, current=300, stat=STAT.format(200)), 900),
    ("files of others", "0::/", V2, group(max_=1000, current=300, stat=STAT.format(400)), 1000),
    ("what is taken is unknown", "0::/", V2, group(max_=1000), 1000),
    ("damaged", "0::/", V2, group(max_=1000, current="?", high="lots", stat="\x00 inactive_file\n7"), 1000),
    ("a limit beyond all numbers", "0::/", V2, group(max_="9" * 5000, current=300), None),
    ("a damaged limit", "0::/", V2, group(max_="-5", current=300), None),
    ("none at all", "0::/", V2, group(max_=0, current=0), 0),
    ("the least is outside", "0::/a/b", V2, nested(900, 100), 100),
    ("the least is inside", "0::/a/b", V2, nested(200, 100), 400),
    ("a sibling", "0::/a", V2, group("b/", max_=100, current=0), None),
    ("a container's top", "0::/docker/4f1a", HIDDEN, group(max_=1000, current=300), 700),
    ("version 1, no limit", "4:memory:/", v1("memory"), group1(NONE, 100), None),
    ("1, a limit", "4:memory:/", v1("memory"), group1(1000, 300), 700),
    (
        *("1, files can go, below as well", "4:memory:/", v1("memory")),
        *(group1(1000, 300, stat=SUMS.format(200)), 900),
    ),
    ("1, nested", "4:memory:/docker/4f1a/b", V1_TOP, group1(1000, 950) | group1(NONE, 950, "b/"), 50),
    ("1, others of 2", "4:memory:/a\n0::/a", V1_AND_2, group1(1000, 300, "a/") | {"a/cpu.max": "max 1"}, 700),
]


def test_the_least_limit_on_the_way_up_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for found, table in ((cgroup_cpus, CPUS), (cgroup_free_memory, MEMORY)):
        for number, (name, own, mounts, files, limit) in enumerate(table):
            root = tmp_path / f"{found.__name__}{number}"
            make(root, own, mounts, files)
            monkeypatch.setattr(machine, "_ROOT", root)
            assert found() == limit, name


def test_a_mount_has_any_place_and_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "my groups"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "memory.max").write_text("77\n")
    make(tmp_path, "0::/a", "30 29 0:26 / /run/my\\040groups rw - cgroup2 none rw", {})
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    assert cgroup_free_memory() == 77


def test_garbage_is_no_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    owns = ["", "::", "0:", "0::", "memory", "4:memory", "\x00\x01", "0::/\x00a", "::\n\n:::::"]
    places = ["", "-", " - ", "a b c - cgroup2", "30 29 0:26 / - cgroup2 x rw", V2]
    for number, (own, mounts) in enumerate(product(owns, places)):
        make(tmp_path / f"{number}", own, mounts, {})
        monkeypatch.setattr(machine, "_ROOT", tmp_path / f"{number}")
        assert (cgroup_cpus(), cgroup_free_memory()) == (None, None), (own, mounts)
