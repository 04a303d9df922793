"""A copy of the files that a wheel is made of, and the environment variables of a build."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).parents[2]


def copy_sources(folder: Path) -> Path:
    """The files of this checkout that a wheel is made of, in `folder`."""
    shutil.copytree(
        REPOSITORY / "specinfer", folder / "specinfer", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


def bare_environment(**changed: str | None) -> dict[str, str]:
    """This process's variables without those that a build reads, then changed; None removes one."""
    removed = {"CXX", "SPECINFER_CPU", "SPECINFER_WHEEL_LEVELS", "PYTHONPATH"} - set(changed)
    kept: Mapping[str, str | None] = {**{k: v for k, v in os.environ.items() if k not in removed}, **changed}
    return {name: value for name, value in kept.items() if value is not None}
