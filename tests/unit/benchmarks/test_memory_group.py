"""Commands in a memory cgroup: limit, reported peaks and cleanup."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.machines import memory_group as module
from benchmarks.machines.memory_group import MemoryGroup, NoGroupError, memory_group

MIB = 1 << 20


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    try:
        with memory_group(64 * MIB) as made:
            yield made
    except NoGroupError as error:
        pytest.skip(str(error))


def python(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program]


def test_what_stays_within_the_limit_runs_and_its_peak_is_told(group: MemoryGroup) -> None:
    ran = group.run(python("import time; kept = b'x' * (40 << 20); time.sleep(.1); print(len(kept))"))
    assert (ran.returncode, ran.stdout, ran.stderr, ran.oom_kills) == (0, f"{40 * MIB}\n", "", 0)
    assert 40 * MIB <= ran.peak_resident <= ran.peak_usage + MIB
    assert ran.peak_usage <= group.limit


def test_what_takes_more_is_killed_and_the_next_command_runs(group: MemoryGroup) -> None:
    ran = group.run(python("kept = b'x' * (100 << 20); print('done')"))
    assert (ran.returncode, ran.stdout, ran.oom_kills) == (-9, "", 1)
    ran = group.run(python("import sys; sys.exit('bad')"))
    assert (ran.returncode, ran.stderr, ran.oom_kills) == (1, "bad\n", 0)
    assert ran.peak_resident < 40 * MIB, "the peak of the command before is forgotten"


def test_the_page_cache_counts_as_usage_alone(group: MemoryGroup, tmp_path: Path) -> None:
    path = tmp_path / "file"
    ran = group.run(python(f"open({str(path)!r}, 'wb').write(b'x' * (20 << 20))"))
    assert ran.returncode == 0
    assert ran.peak_usage >= 40 * MIB  # its bytes, and the file's pages
    assert ran.peak_resident < 35 * MIB


def test_a_command_that_takes_too_long_ends_with_those_it_started(group: MemoryGroup) -> None:
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        group.run(["/bin/sh", "-c", "sleep 60 & sleep 60"], timeout=0.2)
    assert time.monotonic() - began < 10
    assert (group.folder / "cgroup.procs").read_text() == ""


def test_the_group_is_gone_at_the_end_even_if_something_fails() -> None:
    folders = []

    def fail() -> None:
        with memory_group(64 * MIB) as made:
            folders.append(made.folder)
            raise RuntimeError

    try:
        with pytest.raises(RuntimeError):
            fail()
    except NoGroupError as error:
        pytest.skip(str(error))
    assert [folder.exists() for folder in folders] == [False]


def test_environment_and_folder_are_the_commands(group: MemoryGroup, tmp_path: Path) -> None:
    ran = group.run(["/bin/sh", "-c", "echo $WORD; pwd"], env={**os.environ, "WORD": "tree"}, cwd=tmp_path)
    assert ran.stdout == f"tree\n{tmp_path.resolve()}\n"


V1 = "31 29 0:27 {top} {place} rw,relatime shared:9 - cgroup cgroup rw,memory"
V2 = "30 29 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
CPU = "31 29 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"


@pytest.mark.parametrize(
    ("own", "mount", "folders", "found"),
    [
        ("4:memory:/a/b", V1.format(top="/", place="/sys/fs/cgroup/memory"), ["memory/a/b"], "memory/a/b"),
        ("4:memory:/a/b", V1.format(top="/a", place="/sys/fs/cgroup/memory"), ["memory/b"], "memory/b"),
        ("4:memory:/gone", V1.format(top="/", place="/sys/fs/cgroup/memory"), ["memory"], "memory"),
        ("0::/a", V2, ["a"], "a"),
        ("0::/", V2, ["."], "."),
    ],
)
def test_the_group_is_made_in_the_process_s_own(
    tmp_path: Path, own: str, mount: str, folders: list[str], found: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"2:cpu:/other\n{own}\n")
    (tmp_path / "proc/self/mountinfo").write_text(f"{CPU}\n{mount}\n")
    for folder in folders:
        (tmp_path / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
    parents = [parent for parent, _ in module._parents(tmp_path)]
    assert parents[0] == tmp_path / "sys/fs/cgroup" / found


def test_where_no_group_can_be_made_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_parents", list)
    with pytest.raises(NoGroupError, match="no memory cgroup is mounted"), memory_group(MIB):
        pass
    monkeypatch.setattr(module, "_parents", lambda: [(Path("/proc/self"), module._V1)])
    with pytest.raises(NoGroupError, match="/proc/self: "), memory_group(MIB):
        pass
