"""Kernels by name; tests are skipped if the native ones cannot be built."""

from __future__ import annotations

from typing import Final, Literal

import pytest
import torch

from specinfer.errors import KernelBuildError
from specinfer.kernels.build import build_library
from specinfer.kernels.choice import Kernels, choose_kernels
from specinfer.kernels.library import Library, load_library
from specinfer.kernels.machine import levels_here

NAMES: Final = ("torch", "native")


def library_or_skip() -> Library:
    """Return the native library, or skip the test."""
    try:
        return load_library()
    except KernelBuildError as error:
        pytest.skip(f"no native kernels on this machine: {error}")


def plain_tiles() -> Library:
    """Return a library for this CPU whose tiles are plain C++ with the bits of AMX, or skip the test."""
    level = next((level for level in levels_here() if level.name != "amx"), None)
    if level is None:
        pytest.skip("there are no native kernels for this CPU")
    try:
        library = Library(build_library(level, extra=("-DSPECINFER_PLAIN_TILES", "-O1")), level)
    except KernelBuildError as error:
        pytest.skip(f"nothing can be compiled: {error}")
    library.set_threads(2)
    return library


def kernels(name: Literal["torch", "native"]) -> Kernels:
    """Return the CPU kernels called `name` in EngineConfig."""
    try:
        found = choose_kernels(name, torch.device("cpu"))[0]
    except KernelBuildError as error:
        pytest.skip(f"no native kernels on this machine: {error}")
    assert (found.library is None) == (name == "torch"), "a twin is not compared with itself"
    return found
