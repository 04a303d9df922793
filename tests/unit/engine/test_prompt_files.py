"""The files of a prompt store: their room, their queue, their rights and their ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from specinfer.engine.prompt_files import PromptFiles
from tests.unit.engine.test_prompt_store import files

# Reads and writes files in these folders as a user without rights of an administrator.
USER = """
import os, sys
from pathlib import Path
from specinfer.engine.prompt_files import PromptFiles
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
for folder in sys.argv[1:]:
    files = PromptFiles(Path(folder), 1 << 20, "f" * 64)
    there, reading = files.has("a"), files.read(["a"])
    bodies = [*reading.take(60)]
    files.write("b", bytearray(9))
    files.close()
    print(there, *map(bytes, bodies), files.counts["read"], files.counts["failed"])
"""


def test_a_folder_without_rights_is_not_read_or_not_written(tmp_path: Path) -> None:
    cases = (
        # rights of the folder and of its file; what a user sees of the file, reads, and failures
        (0o755, 0o644, "True b'text' 1 1"),
        (0o755, 0o000, "True 0 2"),
        (0o000, 0o644, "False 0 2"),
    )
    folders = [tmp_path / f"{rights:o}-{of_file:o}" for rights, of_file, _ in cases]
    tmp_path.chmod(0o755)
    for folder, (rights, of_file, _) in zip(folders, cases, strict=True):
        kept = PromptFiles(folder, 1 << 20, "f" * 64)
        kept.write("a", bytearray(b"text"))
        kept.close()
        [path] = files(folder)
        path.chmod(of_file)
        folder.chmod(0o755)
        path.parent.chmod(rights & 0o555)
    # A user may search the folder that it is in, wherever that is.
    names = [folder.name for folder in folders]
    seen = subprocess.run(
        [sys.executable, "-c", USER, *names], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    for folder in tmp_path.glob("*/*"):
        folder.chmod(0o755)
    assert seen.stdout.splitlines() == [expected for _, _, expected in cases]


def test_a_disk_smaller_than_the_store_keeps_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    others = [16_000]

    def usage(_: Path) -> SimpleNamespace:
        return SimpleNamespace(total=32_000, free=32_000 - others[0] - sum(sizes()))

    def sizes() -> list[int]:
        return [path.stat().st_size for path in files(tmp_path)]

    def write(numbers: range) -> None:
        for number in numbers:
            kept.write(f"{number:02}", bytearray(1000 - 32))
        while kept._waiting:
            time.sleep(0.001)

    monkeypatch.setattr("specinfer.engine.prompt_files.shutil.disk_usage", usage)
    kept = PromptFiles(tmp_path, 1 << 20, "f" * 64)
    write(range(40))
    assert [path.name for path in files(tmp_path)] == [f"{number}" for number in range(26, 40)]
    others[0] = 31_000  # less is free than the margin
    write(range(40, 42))
    assert (len(files(tmp_path)), kept.counts["failed"], [*kept.lost]) == (14, 2, ["40", "41"])
    others[0] = 16_000
    write(range(42, 44))
    assert [path.name for path in files(tmp_path)] == [*map(str, range(28, 40)), "42", "43"]
    kept.close()
    assert [one.message.split(":")[0] for one in caplog.records if "early" in one.message] == [
        "a file of the prompt store goes early, as prompt_store_size is not free on its disk"
    ]


def test_writes_beyond_the_queue_are_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specinfer.engine.prompt_files._MAX_WAITING", 100)
    kept = PromptFiles(tmp_path, 1 << 20, "f" * 64)
    monkeypatch.setattr("specinfer.engine.prompt_files._MAX_LOST", 1)
    assert [kept.has_room(*one) for one in (("a", 100), ("b", 101), ("c", 101))] == [True, False, False]
    kept.close()
    assert (kept.counts["lost"], [*kept.lost]) == (2, ["c"])


def test_a_file_that_is_too_long_is_not_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specinfer.engine.prompt_files._MAX_WAITING", 100)
    kept = PromptFiles(tmp_path, 1 << 20, "f" * 64)
    kept.write("a", bytearray(100))
    kept.close()
    assert kept._read("a") == bytearray(100)
    os.truncate(files(tmp_path)[0], 1 << 40)
    assert kept._read("a") is None
    assert files(tmp_path) == []


def test_threads_that_hang_have_one_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specinfer.engine.prompt_files._CLOSING", 0.2)
    kept, hung, answers = PromptFiles(tmp_path, 1 << 20, "f" * 64), threading.Semaphore(0), threading.Event()

    def hang(*_: object) -> None:
        hung.release()
        answers.wait(60)

    for method in ("has", "_read", "_write"):
        monkeypatch.setattr(kept, method, hang)
    kept.find(["a"])
    kept.read(["a"])
    kept.write("b", bytearray(9))
    for _ in range(3):
        assert hung.acquire(timeout=60)
    waited: list[float] = []

    def join(_: threading.Thread, timeout: float) -> None:
        waited.append(timeout)
        time.sleep(timeout)

    with monkeypatch.context() as joined:
        joined.setattr(threading.Thread, "join", join)
        kept.close()
    answers.set()
    assert waited[0] > 0.1
    assert waited[1:] == [0, 0]
