"""Our files: found where the environment says, written whole or not at all, read whole or refused."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import filelock
import pytest

from specinfer import files
from specinfer.errors import ConfigError, ModelFileError
from specinfer.files import NewFile, cache_dir, check_writable, locked, read_exactly, write_json, write_whole


def test_the_cache_lies_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPECINFER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "specinfer"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "specinfer"
    monkeypatch.setenv("SPECINFER_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_new_file_has_its_name_when_it_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("older")
    with NewFile(path) as new:
        new.seek(3)
        new.write(b"def")
        new.seek(0)
        new.write(memoryview(b"abc"))
        assert path.read_text() == "older"
        new.keep()
        assert path.read_text() == "abcdef"
    assert names(tmp_path) == ["out"]


def test_what_is_not_kept_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("older")
    with suppress(KeyboardInterrupt), NewFile(path) as new:
        new.write(b"half")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["out"]
    assert path.read_text() == "older"


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    left = [tmp_path / name for name in ("[a] b.old.partial", "[a] b.fresh.partial", "a.old.partial")]
    for file in left:
        file.write_bytes(b"half")
    for file in (left[0], left[2]):
        os.utime(file, (0, 0))
    with NewFile(tmp_path / "[a] b") as new:
        new.keep()
    assert names(tmp_path) == ["[a] b", "[a] b.fresh.partial", "a.old.partial"]


def test_a_file_is_private_unless_asked_otherwise(tmp_path: Path) -> None:
    for mode, path in ((0o600, tmp_path / "own"), (0o644, tmp_path / "shared")):
        with NewFile(path, mode) as new:
            new.keep()
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_text_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "folder" / "out"
    assert write_whole(path, "\u00e9")
    assert path.read_bytes() == b"\xc3\xa9"

    def full(old: object, new: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    assert not write_whole(path, "more")
    assert not write_whole(path / "below a file", "more")
    assert names(path.parent) == ["out"]
    assert path.read_bytes() == b"\xc3\xa9"


def test_a_part_of_a_file_is_read_whole_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"0123456789")
    into = bytearray(4)
    read_exactly(path, 6, memoryview(into))
    assert into == b"6789"
    read_exactly(path, 10, memoryview(bytearray()))
    with pytest.raises(ModelFileError, match="became shorter while it was read; download it again"):
        read_exactly(path, 7, memoryview(into))


def test_a_lock_lets_one_process_in_at_a_time(tmp_path: Path) -> None:
    lock, log = tmp_path / "lock", tmp_path / "log"
    code = (
        "import sys; from pathlib import Path; from specinfer.files import locked\n"
        "print('waits', flush=True)\n"
        f"with locked(Path({str(lock)!r})):\n"
        f"    Path({str(log)!r}).open('a').write('second')\n"
    )
    with locked(lock):
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "waits\n"
        log.write_text("first ")
    process.communicate(timeout=60)
    assert log.read_text() == "first second"


def test_on_a_disk_without_locks_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, blocking: bool) -> None:
        raise errors.pop()

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    errors = [NotImplementedError(), OSError(errno.ENOLCK, "no locks")]
    while errors:
        with locked(tmp_path / "lock"):
            pass


def test_a_json_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"speedup": 2})
    with pytest.raises(TypeError):
        write_json(path, {"speedup": 3, "bad": object()})
    assert json.loads(path.read_text()) == {"speedup": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere; make it first"):
        check_writable(tmp_path / "nowhere" / "out.json")
    with pytest.raises(ConfigError, match="it is a folder; give a file"):
        check_writable(tmp_path)
    check_writable(tmp_path / "out.json")
