"""A wheel with the native kernels inside: a library for every kind of CPU of this architecture.

    pip wheel . --no-deps                                  all levels of specinfer/kernels/machine.py
    SPECINFER_WHEEL_LEVELS=amx,avx2 pip wheel . --no-deps  these alone, and each of them must compile

A level that the compiler is too old for is left out. Where there is no compiler the wheel is a pure one, and
its kernels are compiled on first use, as those of an editable install are. It needs setuptools alone; all
else about the package is in pyproject.toml.

The libraries find the system's C++ runtime, as PyTorch does. With a runtime of their own they would be a
third larger, and would need a newer glibc (2.36 in place of 2.29, built on Debian 12).
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

sys.path.insert(0, str(Path(__file__).parent))

from specinfer.errors import KernelBuildError
from specinfer.kernels.build import compile_library, find_compiler
from specinfer.kernels.machine import LEVELS, Level, architecture

WANTED = "SPECINFER_WHEEL_LEVELS"


class Wheel(bdist_wheel):
    """A wheel for one platform and every Python 3, or for every platform where it has no libraries."""

    def run(self) -> None:
        """Build the Python files, the libraries beside them, and pack both."""
        built = Path(self.get_finalized_command("build").build_lib)
        shutil.rmtree(built, ignore_errors=True)  # what is gone from the sources must not stay in the wheel
        self.run_command("build")
        if compile_levels(built / "specinfer" / "kernels" / "lib"):
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        """No library knows of Python, so any Python 3 will do."""
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


def compile_levels(folder: Path) -> bool:
    """Compile the libraries of all wanted levels into `folder`; returns whether there is any."""
    levels, named = wanted_levels()
    if not levels:
        say(f"none: there are none for {architecture()}")
        return False
    try:
        compiler = find_compiler()
    except KernelBuildError as error:
        if named:
            raise SystemExit(str(error)) from error
        say("none: there is no C++ compiler here; they will be compiled on first use")
        return False
    folder.mkdir(parents=True)

    def compile_one(level: Level) -> bool:
        began, library = time.monotonic(), folder / f"{level.name}.so"
        try:
            compile_library(compiler, level.flags, library)
        except KernelBuildError as error:
            lines = str(error).splitlines()
            reason = next((line for line in lines if "error:" in line), lines[-1])
            if named:
                raise SystemExit(f"the native kernels for {level.words} do not compile: {reason}") from error
            say(f"{level.name} ({level.words}) is left out: {reason}")
            return False
        took, size = time.monotonic() - began, library.stat().st_size
        say(f"{level.name} ({level.words}): {size / 1000:.0f} kB, {took:.0f} s")
        return True

    # A library's files are compiled side by side, but the largest of them takes a third of the whole.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        found = list(pool.map(compile_one, levels))
    if not any(found):
        say("none: they will be compiled on first use")
        folder.rmdir()
    return any(found)


def wanted_levels() -> tuple[list[Level], bool]:
    """The levels to compile, and whether they were named; SystemExit where a name is not one of theirs."""
    levels = [level for level in LEVELS if level.architecture == architecture()]
    names = os.environ.get(WANTED, "").replace(",", " ").split()
    allowed = [level.name for level in levels]
    for name in names:
        if name not in allowed:
            raise SystemExit(f"{WANTED} names {name!r}; allowed here: {', '.join(allowed) or 'nothing'}")
    return [level for level in levels if level.name in names or not names], bool(names)


def say(line: str) -> None:
    """One line of what is done; pip shows it with -v."""
    print(f"native kernels: {line}", flush=True)


setup(cmdclass={"bdist_wheel": Wheel})
