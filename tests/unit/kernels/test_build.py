"""Compiling on first use: what is kept, what is tried again, and what a user is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specinfer.errors import KernelBuildError
from specinfer.kernels import build
from specinfer.kernels.build import build_library, load_library
from specinfer.kernels.choice import TORCH, choose_kernels

# A compiler that answers questions about itself, writes down what it is asked for, and makes empty files.
WORKING = """#!/bin/sh
case "$*" in *--version*|*-dM*) echo compiler {version}; exit;; esac
echo "$*" >> {log}
while [ "$1" != -o ]; do shift; done
: > "$2"
"""
FAILING = """#!/bin/sh
case "$*" in *--version*|*-dM*) echo compiler; exit;; esac
for i in $(seq 100); do echo "line $i"; done
echo "kernel.cpp:7: error: no such register" >&2
exit 3
"""


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


def test_it_is_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = install(monkeypatch, tmp_path, WORKING)
    library = build_library()
    calls = log.read_text().splitlines()
    assert len(calls) == len(list(build._SOURCES.glob("*.cpp"))) + 1
    assert calls[-1].startswith("-shared ")
    assert library.parent == tmp_path / "cache" / "kernels"
    assert build_library() == library
    assert log.read_text().splitlines() == calls
    assert sorted(p.name for p in library.parent.iterdir()) == ["build.lock", library.name]


def test_another_compiler_makes_another_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = set()
    for version in (1, 2):
        install(monkeypatch, tmp_path / str(version), WORKING, version)
        files.add(build_library(cache=tmp_path / "one cache"))
    assert len(files) == 2


def test_a_failed_build_shows_the_compilers_last_words_and_the_twins_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(monkeypatch, tmp_path, FAILING)
    chosen, lacking = choose_kernels("auto", torch.device("cpu"))
    assert chosen == TORCH
    assert lacking is not None
    first, *words = lacking.splitlines()
    assert first == f"{tmp_path / 'c++'} failed (3):"
    assert words[-1] == "kernel.cpp:7: error: no such register"
    assert len(words) < 20
    assert not list((tmp_path / "cache" / "kernels").glob("*.so")), "and nothing is left that could be loaded"


def test_a_library_that_cannot_be_loaded_is_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, WORKING)
    with pytest.raises(KernelBuildError, match=r"cannot be loaded \(.*\); delete it, or set SPECINFER_CACHE"):
        load_library()  # the empty file is no library


def test_a_folder_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, WORKING)
    taken = tmp_path / "file"
    taken.touch()
    with pytest.raises(KernelBuildError, match=f"cannot be kept in {taken}"):
        build_library(cache=taken)


def test_waiting_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Shown:
        def __init__(self) -> None:
            self.steps: list[object] = []

        def start(self, total: int | None, label: str, unit: str = "B") -> None:
            self.steps.append((total, label, unit))

        def advance(self, n: int) -> None:
            self.steps.append(n)

        def finish(self) -> None:
            self.steps.append("end")

    install(monkeypatch, tmp_path, WORKING)
    shown = Shown()
    build_library(shown)
    total = len(list(build._SOURCES.glob("*.cpp"))) + 1
    expected: Sequence[object] = [
        (total, "building native kernels (once per machine)", "files"),
        *[1] * total,
        "end",
    ]
    assert shown.steps == expected
