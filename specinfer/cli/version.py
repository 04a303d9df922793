"""The text of `specinfer --version`."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from specinfer.errors import ConfigError
from specinfer.kernels.build import packaged_library
from specinfer.kernels.machine import architecture, levels_here
from specinfer.version import VERSION


def version_text() -> str:
    """The version, and what it runs on: Python, torch and the level of the CPU kernels.

    Nothing is compiled or tried, and torch is not imported. `specinfer doctor` tries the kernels.
    """
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "not installed"
    return (
        f"specinfer {VERSION} (Python {platform.python_version()}, torch {torch}, CPU kernels: {_kernels()})"
    )


def _kernels() -> str:
    """The best level that is prebuilt, else the one that is compiled on first use."""
    try:
        levels = levels_here()
    except ConfigError as error:  # SPECINFER_CPU names a level that this CPU lacks
        return str(error)
    if not levels:
        return f"none for this {architecture()} CPU, PyTorch computes"
    best = levels[0]
    if packaged_library(best).is_file():
        return f"{best.words}, prebuilt"
    return f"{best.words}, compiled on first use"
