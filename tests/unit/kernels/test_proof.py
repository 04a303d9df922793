"""Proof of kernels: any fault of a library costs a log line and selects the next level."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from specinfer.errors import KernelBuildError
from specinfer.kernels import native
from specinfer.kernels.build import find_compiler
from specinfer.kernels.library import Library
from specinfer.kernels.machine import LEVELS, VARIABLE, Level
from specinfer.kernels.native import find_best, load_library, prove

pytestmark = pytest.mark.thorough

# A fake library: all functions are empty except those of the fault.
FAKE: Final = """
#include <cstdint>
#include <cstdlib>
#if defined(__x86_64__)
#define ILLEGAL asm volatile("ud2")
#else
#define ILLEGAL asm volatile(".inst 0")
#endif
struct Product {
  int32_t kind;
  const void *weight, *scales, *zeros, *bias;
  int64_t channels, inner;
  float largest;
  int32_t loose, nontemporal;
};
extern "C" {
int32_t specinfer_ready() { %(ready)s; return 1; }
void specinfer_multiply(const Product* product, int32_t type, const void* x, int64_t rows, char* out) {
  %(multiply)s;
}
int32_t specinfer_int4_is_exact() { return 1; }
int32_t specinfer_threads() { return 1; }
int32_t specinfer_fault_of_paths() { return 0; }
%(others)s
}
"""
DECLARED: Final = Path(native.__file__).with_name("library.py").read_text("ascii")
OTHERS: Final = {*re.findall(r"library\.(specinfer_\w+)", DECLARED)} - {*re.findall(r"specinfer_\w+", FAKE)}
ZEROS: Final = "for (int64_t i = 0; i < rows * product->channels * (type == 0 ? 4 : 2); ++i) out[i] = 0"
FAKES: Final = {  # fault -> (functions, reason of the refusal)
    "an instruction the CPU lacks": ({"multiply": "ILLEGAL"}, "the trial ended with SIGILL"),
    "a wrong address": ({"multiply": "*(volatile char*)8 = 1"}, "the trial ended with SIGSEGV"),
    "a wrong result": ({"multiply": ZEROS}, r"float32 33 x 96: results are off by \d+(\.\d+)?"),
    "a system that says no": (
        {"ready": "return 0"},
        "the system does not let this process use the CPU's matrix unit",
    ),
    "a crash at the first question": ({"ready": "ILLEGAL"}, "the trial ended with SIGILL"),
}
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def real(real: Library, tmp_path_factory: pytest.TempPathFactory) -> Library:
    """The real library, in a folder without the result of an earlier trial."""
    return Library(Path(shutil.copy(real.path, tmp_path_factory.mktemp("real"))), real.level)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, real: Library) -> Path:
    """A cache that knows the real library."""
    folder = tmp_path_factory.mktemp("cache")
    assert prove(real.path, real.level, folder / "kernels") is None
    return folder


@pytest.fixture(scope="module")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fakes")


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that run from now on."""
    commands: list[list[str]] = []
    run: Run = subprocess.run

    def counted(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", counted)
    return commands


@pytest.fixture(autouse=True)
def _new_process() -> None:
    """No level was refused yet, as far as the log knows."""
    native._warn_once.cache_clear()
    native._tried.cache_clear()


def compiled(folder: Path, fake: str) -> Path:
    library = folder / f"{list(FAKES).index(fake)}.so"
    if not library.exists():
        try:
            compiler = find_compiler()
        except KernelBuildError as error:
            pytest.skip(str(error))
        source = library.with_suffix(".cpp")
        empty = " ".join(f"void {name}() {{}}" for name in sorted(OTHERS))
        functions = {"ready": "", "multiply": "", "others": empty, **FAKES[fake][0]}
        source.write_text(FAKE % functions)
        subprocess.run([*compiler, "-shared", "-fPIC", "-w", str(source), "-o", str(library)], check=True)
    return library


def better_than(level: Level) -> Level:
    """Another level, as if this CPU had it."""
    return next(other for other in reversed(LEVELS) if other != level)


def offer(monkeypatch: pytest.MonkeyPatch, folder: Path, libraries: dict[Level, Path]) -> None:
    """Let this machine have these levels, the best first, and these libraries; its cache is `folder`."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("SPECINFER_CACHE", str(folder))
    monkeypatch.setattr(native, "levels_here", lambda: tuple(libraries))
    monkeypatch.setattr(native, "find_library", lambda level, progress=None: libraries[level])


# ---- stored results ----


# About 4 s: the real library is tried in a process.
def test_an_honest_library_passes_and_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, real: Library
) -> None:
    assert prove(real.path, real.level, tmp_path / "new") is None

    def no_child(*args: Any, **options: Any) -> None:
        raise AssertionError("it was tried a second time")

    monkeypatch.setattr(subprocess, "run", no_child)
    assert prove(real.path, real.level, tmp_path / "new") is None
    (file,) = (tmp_path / "new").iterdir()
    assert file.name.startswith(f"proof-{real.level.name}-")
    assert json.loads(file.read_text())["fault"] is None


@pytest.mark.parametrize("what", ["another CPU", "other features", "another library", "a damaged memory"])
def test_what_is_another_machine_or_library_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, real: Library, children: list[list[str]], what: str
) -> None:
    monkeypatch.setattr(native, "_try_in_child", lambda *_: (children.append(["tried"]), True))
    prove(real.path, real.level, tmp_path)
    library = real.path
    if what == "another CPU":
        monkeypatch.setattr(native, "cpu_name", lambda: "Z80")
    elif what == "other features":
        monkeypatch.setattr(native, "cpu_features", lambda: frozenset({"sse2"}))
    elif what == "another library":
        library = tmp_path / "other.so"
        library.write_bytes(real.path.read_bytes() + b"\0")
    else:
        (file,) = tmp_path.iterdir()
        file.write_text(file.read_text()[:40])
    native._tried.cache_clear()  # as in another process
    prove(library, real.level, tmp_path)
    prove(library, real.level, tmp_path)
    assert len(children) == 2


@pytest.mark.thorough
def test_a_library_that_lies_elsewhere_is_the_same(
    tmp_path: Path, folder: Path, real: Library, children: list[list[str]]
) -> None:
    elsewhere = tmp_path / "lib.so"
    elsewhere.write_bytes(real.path.read_bytes())
    assert prove(elsewhere, real.level, folder / "kernels") is None
    assert not children


def test_a_fault_is_remembered(tmp_path: Path, fakes: Path, real: Library, children: list[list[str]]) -> None:
    library = compiled(fakes, "an instruction the CPU lacks")
    children.clear()
    assert prove(library, real.level, tmp_path / "cache") == "the trial ended with SIGILL"
    (file,) = (tmp_path / "cache").iterdir()
    again = prove(library, real.level, tmp_path / "cache")
    assert again == f"the trial ended with SIGILL (found before; see {file})"
    assert len(children) == 1


def test_a_trial_that_does_not_end_changes_no_level(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, real: Library
) -> None:
    """Its level has other bits than the next one; it is tried once in each process."""
    tried: list[list[str]] = []
    ends: dict[str, subprocess.CompletedProcess[str] | Exception] = {
        "it took more than 60 seconds": subprocess.TimeoutExpired("trial", 60),
        "it ended with SIGKILL": subprocess.CompletedProcess((), -9, "", ""),
        "MemoryError": subprocess.CompletedProcess((), 1, "", "Traceback\nMemoryError"),
        "no process": BlockingIOError("no process"),
    }
    for reason, end in ends.items():

        def run(command: list[str], end: Any = end, **options: Any) -> subprocess.CompletedProcess[str]:
            tried.append(command)
            if isinstance(end, Exception):
                raise end
            return end

        monkeypatch.setattr(subprocess, "run", run)
        for process in (1, 2):
            tried.clear(), caplog.clear()
            native._tried.cache_clear()
            assert [prove(real.path, real.level, tmp_path / "cache") for _ in range(2)] == [None, None]
            assert len(tried) == 1, (reason, process)
            [line] = caplog.messages
            assert line.endswith(f"repeated at the next start: {reason}")
    assert not (tmp_path / "cache").exists()


def test_a_refusal_by_the_system_is_not_cached(tmp_path: Path, fakes: Path, real: Library) -> None:
    assert prove(compiled(fakes, "a system that says no"), real.level, tmp_path / "cache") is not None
    assert not (tmp_path / "cache").exists()


@pytest.mark.thorough
def test_a_cache_that_cannot_be_written_costs_the_memory_alone(
    tmp_path: Path, real: Library, children: list[list[str]]
) -> None:
    taken = tmp_path / "file"
    taken.touch()
    for _ in range(2):
        assert prove(real.path, real.level, taken / "kernels") is None
    assert len(children) == 1


# ---- consequences of a fault ----


def names_fault(message: str, level: Level, reason: str) -> bool:
    """Whether a line of the log says that a level is not used, and why."""
    start = f"native kernels for {level.words} are not used: "
    again = r"( \(found before; see .*\))?"
    return message.startswith(start) and re.fullmatch(reason + again, message[len(start) :]) is not None


@pytest.mark.thorough
@pytest.mark.parametrize("fake", FAKES)
def test_a_fault_costs_a_line_and_the_next_lesser_level_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    folder: Path,
    fakes: Path,
    real: Library,
    fake: str,
) -> None:
    better = better_than(real.level)
    offer(monkeypatch, folder, {better: compiled(fakes, fake), real.level: real.path})
    with caplog.at_level(logging.WARNING):
        library = load_library()
    assert (library.path, library.level) == (real.path, real.level)
    (line,) = caplog.messages
    assert names_fault(line, better, FAKES[fake][1]), line


@pytest.mark.thorough
def test_a_file_that_is_no_library_or_is_gone_costs_a_line_too(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    folder: Path,
    real: Library,
) -> None:
    first, second = [level for level in LEVELS if level != real.level][:2]
    text, gone = tmp_path / "text.so", tmp_path / "gone.so"
    text.write_text("no library")
    offer(monkeypatch, folder, {first: text, second: gone, real.level: real.path})
    with caplog.at_level(logging.WARNING):
        assert load_library().path == real.path
    of_text, of_gone = caplog.messages
    assert names_fault(of_text, first, f"{text} cannot be loaded .*; delete it, or set SPECINFER_CACHE to .*")
    assert names_fault(of_gone, second, f".*No such file or directory: '{gone}'")


def test_what_the_system_forbids_this_process_alone_costs_a_line_too(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    folder: Path,
    fakes: Path,
    real: Library,
) -> None:
    """The child was allowed, or what was remembered is of another container."""
    better = better_than(real.level)
    offer(monkeypatch, folder, {better: compiled(fakes, "a system that says no"), real.level: real.path})
    monkeypatch.setattr(native, "prove", lambda path, level: None)
    with caplog.at_level(logging.WARNING):
        assert load_library().path == real.path
    (line,) = caplog.messages
    assert names_fault(line, better, "the system does not let this process use the CPU's matrix unit")


@pytest.mark.thorough
def test_a_refused_level_is_told_once_though_its_reason_is_put_in_other_words(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fakes: Path,
    tmp_path: Path,
    real: Library,
) -> None:
    first, second = [level for level in LEVELS if level != real.level][:2]
    crash, wrong = compiled(fakes, "an instruction the CPU lacks"), compiled(fakes, "a wrong result")
    offer(monkeypatch, tmp_path, {first: crash, real.level: real.path})
    with caplog.at_level(logging.WARNING):
        load_library()
        load_library()  # "(found before; see ...)"
        (line,) = caplog.messages
        assert names_fault(line, first, "the trial ended with SIGILL")
        assert find_best()[1][0].reason != "the trial ended with SIGILL"
        offer(monkeypatch, tmp_path, {first: crash, second: wrong, real.level: real.path})
        load_library()
    assert len(caplog.messages) == 2, "another level is another refusal"
    assert names_fault(caplog.messages[1], second, r"float32 33 x 96: results are off by .*")


@pytest.mark.thorough
def test_find_best_tells_the_refused_levels_from_the_best_on(
    monkeypatch: pytest.MonkeyPatch, folder: Path, fakes: Path, real: Library
) -> None:
    first, second, unused = [level for level in LEVELS if level != real.level][:3]
    crash = compiled(fakes, "an instruction the CPU lacks")
    wrong = compiled(fakes, "a wrong result")
    offer(monkeypatch, folder, {first: crash, second: wrong, real.level: real.path, unused: crash})
    library, refused = find_best()
    assert library is not None
    assert library.level == real.level
    assert [one.level for one in refused] == [first, second]
    assert refused[0].reason.startswith("the trial ended with SIGILL")
    assert refused[1].reason.startswith("float32 33 x 96: results are off by")


@pytest.mark.thorough
def test_where_every_level_has_a_fault_the_last_is_raised_and_the_others_are_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, fakes: Path
) -> None:
    first, second = LEVELS[:2]
    offer(
        monkeypatch,
        tmp_path,
        {first: compiled(fakes, "a wrong address"), second: compiled(fakes, "a crash at the first question")},
    )
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(KernelBuildError, match=r"^the trial ended with SIGILL$"),
    ):
        load_library()
    (line,) = caplog.messages
    assert names_fault(line, first, "the trial ended with SIGSEGV")
