"""Private log files with a maximum size."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from specinfer.serve.observe.traffic_log import PrivateLines

PLENTY = 1 << 20


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def append(path: Path, *lines: bytes, most: int = PLENTY) -> None:
    file = PrivateLines(str(path), most)
    for line in lines:
        file.append(line)
    file.close()


def test_only_the_owner_may_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    old.write_bytes(b"before\n")
    old.chmod(0o644)
    changed: list[int] = []
    monkeypatch.setattr(
        os, "fchmod", lambda number, mode, real=os.fchmod: (changed.append(mode), real(number, mode))
    )
    for path in (new, old):
        append(path, b"line")
        assert mode(path) == 0o600
    assert changed == [0o600]  # the new one had that mode from the start
    assert old.read_bytes() == b"before\nline\n"


def test_a_full_file_is_renamed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    append(path, b"a" * 9, b"b" * 9, b"c" * 6, b"d", most=15)
    assert (path.read_bytes(), mode(path)) == (b"cccccc\nd\n", 0o600)
    assert Path(f"{path}.1").read_bytes() == b"b" * 9 + b"\n"


@pytest.mark.parametrize("how", ["rm", "mv", "another"])
def test_a_deleted_file_is_created_again(tmp_path: Path, how: str) -> None:
    path, old = tmp_path / "log", tmp_path / "log.old"
    file = PrivateLines(str(path), PLENTY)
    file.append(b"a")
    if how == "rm":
        path.unlink()
    else:
        path.rename(old)
    if how == "another":
        path.write_bytes(b"torn")
    file.append(b"b")
    file.append(b"c")
    file.close()
    assert path.read_bytes() == (b"torn\nb\nc\n" if how == "another" else b"b\nc\n")
    assert mode(path) == 0o600
    if how != "rm":
        assert old.read_bytes() == b"a\n"


def test_a_symbolic_link_is_not_followed(tmp_path: Path) -> None:
    target, path = tmp_path / "target", tmp_path / "log"
    target.write_bytes(b"theirs\n")
    target.chmod(0o644)
    path.symlink_to(target)
    with pytest.raises(OSError, match="it is a symbolic link"):
        PrivateLines(str(path), PLENTY)
    path.unlink()
    file = PrivateLines(str(path), PLENTY)
    path.unlink()
    path.symlink_to(target)  # while it is written
    with pytest.raises(OSError, match="it is a symbolic link"):
        file.append(b"a")
    path.unlink()
    file.append(b"b")
    file.close()
    assert (target.read_bytes(), mode(target)) == (b"theirs\n", 0o644)
    assert path.read_bytes() == b"b\n"


def test_a_line_behind_a_torn_one_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    program = (
        "import os, signal, sys; from specinfer.serve.observe.traffic_log import PrivateLines\n"
        "file, write = PrivateLines(sys.argv[1], 1000), os.write\n"
        "def torn(number, data): write(number, data[:3]); os.kill(os.getpid(), signal.SIGKILL)\n"
        "file.append(b'whole'); os.write = torn; file.append(b'killed')\n"
    )
    assert subprocess.run([sys.executable, "-c", program, path], check=False).returncode == -9
    append(path, b"next", b"after")
    assert path.read_bytes() == b"whole\nkil\nnext\nafter\n"


def test_a_line_that_does_not_fit_on_the_disk_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = tmp_path / "log", os.write
    file = PrivateLines(str(path), PLENTY)

    def full(number: int, data: bytes) -> int:
        if len(data) < 4:
            raise OSError(28, "No space left on device")
        return write(number, data[:3])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            file.append(b"torn")
    file.append(b"next")
    assert path.read_bytes() == b"tor\nnext\n"
    file.close()
