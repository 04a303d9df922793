"""A copy of the files that a wheel is made of, and the compiler and the variables of a build."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from specinfer.kernels.library import Library, find_best

REPOSITORY: Final = Path(__file__).parents[2]
_COMPILER: Final = """#!/bin/sh
echo "$*" >> {log}
case " $* " in *" -shared "*) made={library};; *) made=/dev/null;; esac
while [ "$1" != -o ]; do shift; done
cp "$made" "$2"
"""


def copy_sources(folder: Path) -> Path:
    """The files of this checkout that a wheel is made of, in `folder`."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "specinfer", folder / "specinfer", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


def copying_compiler(path: Path) -> Library:
    """Write a compiler that copies the library in use, and return that library.

    The sources are the same, so compiling them with its level's flags would make it again. The compiler
    appends its arguments to `path` with the suffix .log.
    """
    best, refused = find_best()
    assert best is not None, refused
    path.write_text(_COMPILER.format(log=path.with_suffix(".log"), library=best.path))
    path.chmod(0o755)
    return best


def bare_environment(**changed: str | None) -> dict[str, str]:
    """This process's variables without those that a build reads, then changed; None removes one."""
    removed = {"CXX", "SPECINFER_CPU", "SPECINFER_WHEEL_LEVELS", "PYTHONPATH"} - set(changed)
    kept: Mapping[str, str | None] = {**{k: v for k, v in os.environ.items() if k not in removed}, **changed}
    return {name: value for name, value in kept.items() if value is not None}
