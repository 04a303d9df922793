"""Selection of a library: code that kills a process costs a log line and selects the next level."""

from __future__ import annotations

import logging
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from specinfer.errors import KernelBuildError
from specinfer.kernels import library as native
from specinfer.kernels.build import find_compiler
from specinfer.kernels.library import Library, find_best, killer, load_library
from specinfer.kernels.machine import LEVELS, VARIABLE, Level
from tests.kernels import library_or_skip
from tests.spies import spied

# A fake library: all functions are empty except those of the fault.
FAKE: Final = """
#include <cstdint>
#if defined(__x86_64__)
#define ILLEGAL asm volatile("ud2")
#else
#define ILLEGAL asm volatile(".inst 0")
#endif
extern "C" {
int32_t specinfer_ready() { %(ready)s; return 1; }
void specinfer_multiply() { %(multiply)s; }
%(others)s
}
"""
OTHERS: Final = {f"specinfer_{name}" for name in native._FUNCTIONS} - {*re.findall(r"specinfer_\w+", FAKE)}
FAKES: Final = {  # fault -> (functions, reason of the refusal)
    "an instruction the CPU lacks": ({"multiply": "ILLEGAL"}, "a process that runs them ends with SIGILL"),
    "a wrong address": ({"multiply": "*(volatile char*)8 = 1"}, "a process that runs them ends with SIGSEGV"),
    "a crash at the first question": ({"ready": "ILLEGAL"}, "a process that runs them ends with SIGILL"),
    "a system that says no": (
        {"ready": "return 0"},
        "the system does not let this process use the CPU's matrix unit",
    ),
}


@pytest.fixture(scope="module")
def real() -> Library:
    return library_or_skip()


@pytest.fixture(autouse=True)
def _new_process() -> None:
    native._warn_once.cache_clear()
    killer.cache_clear()


def compiled(folder: Path, fake: str) -> Path:
    library = folder / f"{list(FAKES).index(fake)}.so"
    try:
        compiler = find_compiler()
    except KernelBuildError as error:
        pytest.skip(str(error))
    source = library.with_suffix(".cpp")
    empty = " ".join(f"void {name}() {{}}" for name in sorted(OTHERS))
    source.write_text(FAKE % {"ready": "", "multiply": "", "others": empty, **FAKES[fake][0]})
    subprocess.run([*compiler, "-shared", "-fPIC", "-w", str(source), "-o", str(library)], check=True)
    return library


def offer(monkeypatch: pytest.MonkeyPatch, folder: Path, libraries: dict[Level, Path]) -> None:
    """Let this machine have these levels, the best first, and these libraries; its cache is `folder`."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("SPECINFER_CACHE", str(folder))
    monkeypatch.setattr(native, "levels_here", lambda: tuple(libraries))
    monkeypatch.setattr(native, "find_library", lambda level, progress=None: libraries[level])


def test_each_fault_costs_one_line_and_the_next_level_is_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, real: Library
) -> None:
    better = [level for level in LEVELS if level != real.level]
    faulty = {level: compiled(tmp_path, fake) for level, fake in zip(better, FAKES, strict=False)}
    text, gone = tmp_path / "text.so", tmp_path / "gone.so"
    text.write_text("no library")
    for level, path, reason in (
        *((level, faulty[level], FAKES[fake][1]) for level, fake in zip(better, FAKES, strict=False)),
        (better[0], text, f"{text} cannot be loaded .*; delete it, or set SPECINFER_CACHE to .*"),
        (better[0], gone, f".*No such file or directory: '{gone}'"),
    ):
        caplog.clear(), native._warn_once.cache_clear()
        offer(monkeypatch, tmp_path, {level: path, real.level: real.path})
        with caplog.at_level(logging.WARNING):
            assert [load_library().path for _ in range(2)] == [real.path] * 2, reason
        [line] = caplog.messages
        assert re.fullmatch(f"native kernels for {re.escape(level.words)} are not used: {reason}", line), line
    offer(monkeypatch, tmp_path, {**faulty, real.level: real.path})
    found, refused = find_best()
    assert (found.level, [one.level for one in refused]) == (real.level, [*faulty])


def test_where_every_level_has_a_fault_the_last_is_raised_and_the_others_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    faulty = [compiled(tmp_path, fake) for fake in ("a wrong address", "a crash at the first question")]
    offer(monkeypatch, tmp_path, dict(zip(LEVELS[:2], faulty, strict=True)))
    with caplog.at_level(logging.WARNING), pytest.raises(KernelBuildError, match=r"them ends with SIGILL$"):
        load_library()
    [line] = caplog.messages
    assert line.endswith("ends with SIGSEGV")


def test_a_child_that_ends_otherwise(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, real: Library) -> None:
    """Its level has other bits than the next one."""
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    ran: list[list[str]] = []
    for end in (
        subprocess.TimeoutExpired("child", 60),
        subprocess.CompletedProcess((), -9),
        subprocess.CompletedProcess((), 1),
        BlockingIOError("no process"),
    ):

        def run(command: list[str], end: Any = end, **options: Any) -> subprocess.CompletedProcess[str]:
            ran.append(command)
            if isinstance(end, Exception):
                raise end
            return end

        monkeypatch.setattr(subprocess, "run", run)
        ran.clear(), killer.cache_clear()
        assert [killer(real.path, real.level) for _ in range(2)] == [None, None]
        assert len(ran) == 1, end
    assert not [*tmp_path.rglob("survived-*")]


def test_a_library_is_run_only_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, real: Library) -> None:
    ran = spied(monkeypatch, subprocess, "run", lambda command, **_: command[-2])

    def kill(path: Path) -> None:
        killer.cache_clear()  # as in another process
        assert killer(path, real.level) is None

    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    kill(real.path)
    assert len([*tmp_path.rglob("survived-*")]) == 1
    copy = tmp_path / "copy.so"
    copy.write_bytes(real.path.read_bytes())
    kill(copy)
    monkeypatch.setattr(native, "cpu_name", lambda: "Z80")
    kill(copy)
    (tmp_path / "file").touch()
    monkeypatch.setattr(native, "kernels_folder", lambda: tmp_path / "file" / "kernels")
    kill(real.path)
    kill(real.path)  # without a folder it runs again
    assert ran == [str(path) for path in (real.path, copy, real.path, real.path)]
