"""All kernels of each kind of CPU against plain loops in C++; other architectures run under an emulator."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import pytest

from specinfer.errors import KernelBuildError
from specinfer.kernels import build
from specinfer.kernels.build import build_library, find_compiler
from specinfer.kernels.machine import LEVELS, Level, architecture, levels_here
from tests.kernels import kernels, plain_tiles

SOURCES: Final = Path(build.__file__).parent / "cpu"
PROOF: Final = Path(__file__).parents[2] / "native" / "proof.cpp"
# Debian has these in g++-aarch64-linux-gnu and qemu-user.
CROSS: Final = {"aarch64": "aarch64-linux-gnu-g++"}
EMULATORS: Final = {"aarch64": ("qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu")}

_TIMEOUT: Final = 120  # seconds; under the emulator it takes five

Prove = Callable[[Path, Level], list[str]]


@pytest.fixture(scope="module")
def prove(tmp_path_factory: pytest.TempPathFactory) -> Prove:
    """Return the proof's lines for a library."""
    folder = tmp_path_factory.mktemp("proof")

    @functools.cache
    def program(kind: str, compiler: tuple[str, ...]) -> Path:
        least = next(level for level in LEVELS if level.architecture == kind)
        target = folder / f"proof-{kind}"
        flags = ("-O1", "-std=c++20", "-ffp-contract=off", "-w", *least.flags, f"-I{SOURCES}")
        subprocess.run([*compiler, *flags, str(PROOF), "-o", str(target), "-ldl"], check=True)
        return target

    def lines(library: Path, level: Level) -> list[str]:
        kind = level.architecture
        here = kind == architecture()
        before: Sequence[str] = () if here else EMULATORS[kind]
        command = [*before, str(program(kind, find_compiler())), str(library)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        said = (done.stdout + done.stderr).splitlines()
        return said if done.returncode == 0 else [*said, f"status {done.returncode}"]

    return lines


@pytest.mark.thorough
def test_the_library_in_use_is_right(prove: Prove) -> None:
    library = kernels("native").library
    need_compiler()
    assert prove(library.path, library.level) == []


@pytest.mark.slow  # each level is compiled, which takes half a minute the first time
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: f"{level.architecture}-{level.name}")
def test_every_level_is_right(monkeypatch: pytest.MonkeyPatch, prove: Prove, level: Level) -> None:
    if level.architecture != architecture():
        need_emulator(monkeypatch, level.architecture)
    elif level not in levels_here():
        pytest.skip("this CPU is of another kind")
    need_compiler(*level.flags)
    assert prove(build_library(level), level) == []


@pytest.mark.slow  # a library is compiled
def test_plain_tiles_are_right(prove: Prove) -> None:
    library = plain_tiles()
    assert prove(library.path, library.level) == []


def need_compiler(*flags: str) -> None:
    """Skip the test where there is no compiler, or none that knows these flags."""
    try:
        compiler = find_compiler()
    except KernelBuildError as error:
        pytest.skip(str(error))
    command = [*compiler, *flags, "-E", "-x", "c++", os.devnull]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{compiler[0]} does not know {' '.join(flags)}")


def need_emulator(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Make the compiler one for that architecture; skip the test where it or the emulator is not there."""
    programs = [CROSS[kind], EMULATORS[kind][0]] if kind in CROSS else []
    missing = [name for name in programs if shutil.which(name) is None]
    if missing or not programs:
        pytest.skip(f"this is no {kind}, and there is no {' and no '.join(missing) or 'emulator'}")
    monkeypatch.setenv("CXX", programs[0])
