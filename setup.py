"""Wheels with compiled CPU kernels: one shared library for each level of CPU (specinfer/kernels/machine.py).

    pip install .                                       compiles the best level of this CPU
    SPECINFER_WHEEL_LEVELS=all pip wheel .              compiles every level of this architecture (make wheel)
    SPECINFER_WHEEL_LEVELS=amx,avx2 pip wheel .         compiles these levels; fails if one does not compile
    SPECINFER_WHEEL_LEVELS=none pip install .           compiles none
    pip install --editable .                            compiles the best level into the user's cache

A level that the compiler does not support is left out. Without a compiler the wheel is pure Python, and its
kernels are compiled on first use. The build needs setuptools alone; the
rest of the package is described in pyproject.toml.

The libraries link to the system's C++ runtime, as PyTorch does. With a runtime of their own they would be a
third larger, and would need a newer glibc (2.36 instead of 2.29, built on Debian 12).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.editable_wheel import editable_wheel

sys.path.insert(0, str(Path(__file__).parent))

from specinfer.errors import KernelBuildError
from specinfer.kernels.build import build_library, compile_library, find_compiler
from specinfer.kernels.machine import LEVELS, Level, architecture, levels_here

VARIABLE = "SPECINFER_WHEEL_LEVELS"
ALL, NONE = "all", "none"


class Wheel(bdist_wheel):
    """A wheel for one platform and every Python 3, or for every platform if it has no libraries."""

    def run(self) -> None:
        """Build the Python files, compile the libraries beside them, and pack both."""
        built = Path(self.get_finalized_command("build").build_lib)
        shutil.rmtree(built, ignore_errors=True)  # a file that was deleted must not stay in the wheel
        self.run_command("build")
        if compile_levels(built / "specinfer" / "kernels" / "lib"):
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """The libraries do not use Python's C API, so the wheel fits any Python 3."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


class Editable(editable_wheel):
    """An editable install, whose kernels are kept in the user's cache: their sources may change."""

    def run(self) -> None:
        """Compile the best level that the compiler supports, as the first model would."""
        super().run()
        for level in () if os.environ.get(VARIABLE) == NONE else levels_here():
            try:
                log(f"{level.name}: {build_library(level)}")
                return
            except KernelBuildError as error:
                log(f"{level.name} ({level.words}) is left out: {str(error).splitlines()[-1]}")


def compile_levels(folder: Path) -> bool:
    """Compile the requested levels into `folder`; returns True if at least one was compiled.

    Raises SystemExit if a level that was named does not compile.
    """
    names = os.environ.get(VARIABLE, "").replace(",", " ").split()
    levels = requested_levels(names)
    if names == [NONE]:
        return False
    if not levels:
        log(f"none: no level fits {architecture()}")
        return False
    required = bool(names) and names != [ALL]
    try:
        compiler = find_compiler()
    except KernelBuildError as error:
        if required:
            raise SystemExit(str(error)) from error
        log("none: no C++ compiler was found; they will be compiled on first use")
        return False
    folder.mkdir(parents=True)

    def compile_one(level: Level) -> bool:
        start, library = time.monotonic(), folder / f"{level.name}.so"
        try:
            compile_library(compiler, level.flags, library)
        except KernelBuildError as error:
            lines = str(error).splitlines()
            reason = next((line for line in lines if "error:" in line), lines[-1])
            if required:
                raise SystemExit(f"the native kernels for {level.words} do not compile: {reason}") from error
            log(f"{level.name} ({level.words}) is left out: {reason}")
            return False
        seconds, size = time.monotonic() - start, library.stat().st_size
        log(f"{level.name} ({level.words}): {size / 1000:.0f} kB, {seconds:.0f} s")
        return True

    if names:
        # The files of a library are compiled in parallel, but the largest of them takes a third of the time.
        with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
            compiled = any(list(pool.map(compile_one, levels)))
    else:
        compiled = any(map(compile_one, levels))  # best first; stops at the first one that compiles
    if not compiled:
        log("none: they will be compiled on first use")
        folder.rmdir()
    return compiled


def requested_levels(names: list[str]) -> list[Level]:
    """The levels to compile; without names those of this CPU, best first.

    Raises SystemExit if a name is not a level of this architecture.
    """
    if not names:
        return list(levels_here())
    if names == [NONE]:
        return []
    levels = [level for level in LEVELS if level.architecture == architecture()]
    allowed = [level.name for level in levels]
    for name in names:
        if name not in (*allowed, ALL):
            raise SystemExit(f"{VARIABLE} names {name!r}; allowed here: {', '.join([*allowed, ALL])}")
    return [level for level in levels if level.name in names or ALL in names]


def log(line: str) -> None:
    """Print a line about the kernels; pip shows it with -v."""
    print(f"native kernels: {line}", flush=True)


setup(cmdclass={"bdist_wheel": Wheel, "editable_wheel": Editable})
