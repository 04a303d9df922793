"""Builds of libraries: caching, retries, and messages."""

from __future__ import annotations

import grp
import logging
import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest
import torch

from specinfer.errors import KernelBuildError
from specinfer.kernels import build, library
from specinfer.kernels.build import build_library, fault, find_compiler, find_library, kernels_folder
from specinfer.kernels.choice import TORCH, choose_kernels
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


def test_a_compiler_or_flag_makes_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = tmp_path / "one cache"
    files = []
    for version in (1, 2):
        install(monkeypatch, tmp_path / str(version), WORKING, version)
        monkeypatch.setenv("SPECINFER_CACHE", str(cache))
        files.append(build_library(AVX2))
    files += [build_library(AMX), build_library(AVX2, extra=("-DSOME",))]
    assert len(set(files)) == 4
    assert sorted(cache.glob("kernels/*.so")) == sorted(files)


def test_a_compiler_with_its_options(monkeypatch: pytest.MonkeyPatch, log: Path, tmp_path: Path) -> None:
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


def test_a_failed_build_shows_the_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_a_library_that_another_user_may_have_written_is_built_anew(log: Path, tmp_path: Path) -> None:
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


# Folders that other users cannot write to.


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    """Files get the modes they are made with."""
    before = os.umask(0)
    yield
    os.umask(before)


def place(folder: Path, parent: int = 0o755, own: int = 0o755, file: int = 0o755) -> Path:
    """Create a library in nested folders with these modes."""
    library = folder / "parent" / "own" / "library.so"
    library.parent.mkdir(parents=True)
    library.touch()
    for path, mode in ((library, file), (library.parent, own), (library.parent.parent, parent)):
        path.chmod(mode)
    return library


def named(library: Path, name: str) -> Path:
    return next(path for path in (library, *library.parents) if path.name == name)


def test_what_others_may_write_to_is_refused(tmp_path: Path) -> None:
    for number, (modes, refused) in enumerate(
        (
            ({}, None),
            ({"own": 0o700, "file": 0o600}, None),
            ({"file": 0o757}, "library.so"),
            ({"own": 0o757}, "own"),
            ({"own": 0o1777}, "own"),  # others can put a file there before we do
            ({"parent": 0o757}, "parent"),  # another user could replace the folder
            ({"parent": 0o1777}, None),  # like /tmp: only the owner of a folder can move it
        )
    ):
        (tmp_path / f"{number}").mkdir(mode=0o755)
        library = place(tmp_path / f"{number}", **modes)
        found = fault(library.parent) or fault(library)
        assert found == (refused and f"{named(library, refused)} can be written by others"), modes


@pytest.mark.parametrize("whose", ["library.so", "own", "parent"])
def test_what_is_of_others_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, whose: str) -> None:
    library = place(tmp_path)
    path = named(library, whose)
    stat, me = Path.stat, os.geteuid()

    def of_another(self: Path) -> object:
        found = stat(self)
        uid = me + 7 if self == path else found.st_uid
        return SimpleNamespace(st_uid=uid, st_gid=found.st_gid, st_mode=found.st_mode)

    monkeypatch.setattr(Path, "stat", of_another)
    assert fault(library) == f"{path} belongs to another user ({me + 7})"
    monkeypatch.setattr(os, "geteuid", lambda: me + 7)
    if me == 0:
        assert fault(library) is None, "its owner may load it: what lies around it is root's"


GROUPS = [  # members, groups of users, whether it is refused
    ([], {}, False),  # many systems give each user a private group with write access
    (["me", "root"], {"me": 7, "root": 7}, False),
    (["me", "you"], {"me": 7}, True),
    ([], {"me": 7, "you": 7}, True),
    (["who left"], {"me": 7}, True),
]


def test_a_group_of_ones_own_is_nobody_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ids = {"me": os.geteuid(), "root": 0, "you": 12345}
    library = place(tmp_path, own=0o775)
    stat = Path.stat

    def in_the_group(self: Path) -> object:
        found = stat(self)
        return SimpleNamespace(st_uid=found.st_uid, st_gid=7, st_mode=found.st_mode)

    monkeypatch.setattr(Path, "stat", in_the_group)
    for members, primary, refused in GROUPS:
        users = {
            name: SimpleNamespace(pw_name=name, pw_uid=uid, pw_gid=primary.get(name, 1))
            for name, uid in ids.items()
        }
        monkeypatch.setattr(grp, "getgrgid", lambda gid, members=members: SimpleNamespace(gr_mem=members))
        monkeypatch.setattr(pwd, "getpwnam", users.__getitem__)
        monkeypatch.setattr(pwd, "getpwall", lambda users=users: list(users.values()))
        assert (fault(library.parent) is not None) == refused, (members, primary)


def test_folders_are_made_for_this_user_alone(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o755)
    made = build.make_private(tmp_path / "there" / "cache" / "kernels")
    assert made.is_dir()
    modes = [path.stat().st_mode & 0o777 for path in (made, made.parent, made.parent.parent)]
    assert modes == [0o700, 0o700, 0o755]
    assert build.make_private(made) == made


def test_a_link_is_followed_once_so_that_nobody_can_turn_it_elsewhere(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir(mode=0o700)
    everybody = tmp_path / "everybody"
    everybody.mkdir(mode=0o777)
    (everybody / "link").symlink_to(kept)
    assert build.make_private(everybody / "link" / "kernels") == kept / "kernels"
    assert fault(kept / "kernels") is None


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder for temporary files, as open as it is everywhere."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_where_others_may_write_to_the_cache_a_private_folder_is_taken_and_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o777)
    with caplog.at_level(logging.WARNING):
        folders = {kernels_folder() for _ in range(3)}
    assert folders == {temporary / f"specinfer-kernels-{os.geteuid()}"}
    assert caplog.messages == [
        f"native kernels are kept in {folders.pop()}, not in {tmp_path / 'cache' / 'kernels'}: "
        f"{tmp_path / 'cache'} can be written by others; set SPECINFER_CACHE to a folder that you can write "
        "to, and others cannot (chmod go-w)"
    ]
    (tmp_path / "cache").chmod(0o755)
    assert kernels_folder() == tmp_path / "cache" / "kernels"


def test_a_cache_that_cannot_be_written_keeps_its_libraries_and_new_ones_go_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "cache"))
    compiled: list[Path] = []

    def compile_library(compiler: object, flags: object, library: Path, progress: object) -> None:
        compiled.append(library)
        library.touch(0o755)

    monkeypatch.setattr(build, "compile_library", compile_library)
    monkeypatch.setattr(build, "find_compiler", lambda: ("cc",))
    monkeypatch.setattr(build, "_fingerprint", lambda *_: "0")
    there = build.build_library(LEVELS[0])
    writable = os.access
    monkeypatch.setattr(os, "access", lambda p, mode: p.parent != tmp_path / "cache" and writable(p, mode))
    with caplog.at_level(logging.WARNING):
        assert build.build_library(LEVELS[0]) == there
        elsewhere = [build.build_library(LEVELS[1]) for _ in range(2)]
        (tmp_path / "file").touch()
        monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "file" / "cache"))
        elsewhere += [build.build_library(LEVELS[1])]
    private = temporary / f"specinfer-kernels-{os.geteuid()}"
    assert {one.parent for one in elsewhere} == {private}
    assert compiled == [there, elsewhere[0]]
    assert "cache/kernels cannot be written; set SPECINFER_CACHE to a folder" in caplog.messages[0]
    assert "Not a directory" in caplog.messages[1]


def test_folders_may_all_be_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, temporary: Path) -> None:
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir(mode=0o777)
    taken = temporary / f"specinfer-kernels-{os.geteuid()}"
    taken.mkdir(mode=0o777)
    compiled: list[object] = []
    monkeypatch.setattr(build, "compile_library", lambda *given: compiled.append(given))
    monkeypatch.setattr(build, "find_compiler", lambda: ("cc",))
    monkeypatch.setattr(build, "_fingerprint", lambda *_: "0")
    with pytest.raises(KernelBuildError, match=r"cache can be written by others, and \S+ can be written"):
        kernels_folder()
    monkeypatch.setattr(library, "levels_here", lambda: LEVELS[:1])
    chosen, lacking = choose_kernels("auto", torch.device("cpu"))
    assert (chosen, compiled) == (TORCH, [])
    assert "native kernels cannot be kept safely: " in str(lacking)


def test_without_modes_of_files_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = place(tmp_path, own=0o777)
    monkeypatch.setattr(build, "_HAS_MODES", False)
    assert fault(library.parent) is None
