"""The kernels a test asks for by name; it is skipped where the native ones cannot be built."""

from __future__ import annotations

import pytest
import torch

from specinfer.errors import KernelBuildError
from specinfer.kernels.choice import TORCH, Kernels, choose_kernels

NAMES = ("torch", "native")


def kernels(name: str) -> Kernels:
    """The kernels called `name` in EngineConfig, on the CPU."""
    if name == "torch":
        return TORCH
    try:
        return choose_kernels("native", torch.device("cpu"))[0]
    except KernelBuildError as error:
        pytest.skip(f"no native kernels on this machine: {error}")
