"""Builds of libraries: caching, retries, and messages."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

import pytest

from specinfer.errors import KernelBuildError
from specinfer.kernels import build
from specinfer.kernels.build import build_library, find_compiler, find_library
from specinfer.kernels.machine import LEVELS

AVX2, AMX = (next(level for level in LEVELS if level.name == name) for name in ("avx2", "amx"))
SOURCES: Final = len(list((Path(build.__file__).parent / "cpu").glob("*.cpp")))
# A compiler that prints its version, records its arguments, and creates empty files.
WORKING = """#!/bin/sh
case "$*" in *--version*) echo compiler {version}; exit;; esac
echo "$*" >> {log}
while [ "$1" != -o ]; do shift; done
: > "$2"
"""
FAILING = """#!/bin/sh
case "$*" in *--version*) echo compiler; exit;; esac
for i in $(seq 100); do echo "line $i"; done
echo "kernel.cpp:7: error: no such register" >&2
exit 3
"""
WRAPPER = '#!/bin/sh\nexec "$@"\n'  # as ccache is one


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wheel without libraries."""
    monkeypatch.setattr(build, "_PACKAGED", tmp_path / "lib")


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str, version: int = 1) -> Path:
    """Make a script the compiler, and the folder the user's cache; returns the file it writes calls to."""
    folder.mkdir(exist_ok=True)
    compiler, log = folder / "c++", folder / "calls"
    compiler.write_text(script.format(version=version, log=log) if script is WORKING else script)
    compiler.chmod(0o755)
    log.touch()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SPECINFER_CACHE", str(folder / "cache"))
    return log


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file to which a working compiler writes its calls."""
    return install(monkeypatch, tmp_path, WORKING)


def test_it_is_built_once(log: Path, tmp_path: Path) -> None:
    library = find_library(AVX2)
    calls = log.read_text().splitlines()
    assert len(calls) == SOURCES + 1
    assert calls[-1].startswith("-shared ")
    assert library.parent == tmp_path / "cache" / "kernels"
    assert library.name.startswith("specinfer-avx2-")
    assert build_library(AVX2) == find_library(AVX2) == library
    assert log.read_text().splitlines() == calls
    assert sorted(p.name for p in library.parent.iterdir()) == ["build.lock", library.name]


def test_another_compiler_level_or_flag_makes_another_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = tmp_path / "one cache"
    files = []
    for version in (1, 2):
        install(monkeypatch, tmp_path / str(version), WORKING, version)
        monkeypatch.setenv("SPECINFER_CACHE", str(cache))
        files.append(build_library(AVX2))
    files += [build_library(AMX), build_library(AVX2, extra=("-DSOME",))]
    assert len(set(files)) == 4
    assert sorted(cache.glob("kernels/*.so")) == sorted(files)


def test_a_compiler_may_be_named_with_its_options_and_behind_another_program(
    monkeypatch: pytest.MonkeyPatch, log: Path, tmp_path: Path
) -> None:
    alone = build_library(AVX2)
    log.write_text("")
    wrapper = tmp_path / "cache of objects"
    wrapper.write_text(WRAPPER)
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{wrapper}' {tmp_path / 'c++'} -m64 '-DA=a b'")
    assert find_compiler() == (str(wrapper), str(tmp_path / "c++"), "-m64", "-DA=a b")
    assert build_library(AVX2) != alone, "its options may make another library"
    calls = log.read_text().splitlines()
    assert len(calls) == SOURCES + 1
    for call in calls:
        assert call.startswith("-m64 -DA=a b -"), "options of ours come later, and last those of one's own"


def test_a_compiler_that_is_not_there_or_not_named_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for named, reason in (
        ("no-such-compiler -m64", r"no C\+\+ compiler: no-such-compiler not found; install one, or set CXX"),
        ("g++ '-m64", r"CXX is \"g\+\+ '-m64\", which cannot be parsed \(No closing quotation\); allowed: "),
    ):
        monkeypatch.setenv("CXX", named)
        with pytest.raises(KernelBuildError, match=reason):
            find_compiler()


def test_a_packaged_library_is_taken_and_no_compiler_runs(log: Path, tmp_path: Path) -> None:
    packaged = tmp_path / "lib" / "avx2.so"
    packaged.parent.mkdir()
    packaged.touch()
    assert find_library(AVX2) == packaged
    assert log.read_text() == ""
    assert find_library(AMX) != packaged, "a level that the wheel lacks is compiled"
    assert log.read_text() != ""


def test_a_failed_build_shows_the_compilers_last_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, FAILING)
    with pytest.raises(KernelBuildError) as failed:
        build_library(AVX2)
    first, *words = str(failed.value).splitlines()
    assert first == f"{tmp_path / 'c++'} failed (3):"
    assert words[-2:] == ["line 100", "kernel.cpp:7: error: no such register"]
    assert len(words) < 20
    kept = [path.name for path in (tmp_path / "cache" / "kernels").iterdir()]
    assert kept == ["build.lock"], "nothing is left that could be loaded"


@pytest.mark.usefixtures("log")
def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    monkeypatch.setenv("SPECINFER_CACHE", str(taken))
    monkeypatch.setattr(tempfile, "tempdir", str(taken))
    with pytest.raises(KernelBuildError, match=f"native kernels cannot be kept in {taken}/kernels: "):
        build_library(AVX2)


@pytest.mark.skipif(os.name != "posix", reason="there are no modes of files here")
def test_a_library_that_another_user_may_have_written_is_built_anew(log: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        library = find_library(AVX2)
        assert library.stat().st_mode & 0o777 == 0o755, "whatever the umask"
        library.write_text("planted")
        library.chmod(0o777)
        log.write_text("")
        assert find_library(AVX2) == library
        assert (library.read_text(), len(log.read_text().splitlines())) == ("", SOURCES + 1)
        elsewhere = tmp_path / "planted"
        library.rename(elsewhere)
        library.symlink_to(elsewhere)
        find_library(AVX2)
        assert not library.is_symlink()
    finally:
        os.umask(before)
