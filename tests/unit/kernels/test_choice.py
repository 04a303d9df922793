"""Which kernels run where, and what is said when the native ones cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specinfer.attention.native import NativeAttention
from specinfer.config import EngineConfig
from specinfer.errors import ConfigError, KernelBuildError
from specinfer.kernels.choice import TORCH, choose_kernels
from specinfer.kernels.ops import NativeOps
from tests.kernels import kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))


def test_native_kernels_run_on_a_cpu() -> None:
    native = kernels("native")
    assert isinstance(native.ops, NativeOps)
    assert isinstance(native.attention, NativeAttention)
    chosen, lacking = choose_kernels("auto", CPU)
    assert isinstance(chosen.ops, NativeOps)
    assert lacking is None


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_twins_run_and_the_reason_is_told() -> None:
    chosen, lacking = choose_kernels("auto", CPU)
    assert chosen == TORCH
    assert lacking == "no C++ compiler: no-such-compiler not found; install one or set CXX"


@pytest.mark.usefixtures("no_compiler")
def test_native_kernels_that_are_asked_for_must_be_there() -> None:
    with pytest.raises(KernelBuildError, match="no C\\+\\+ compiler"):
        choose_kernels("native", CPU)


@pytest.mark.usefixtures("no_compiler")
def test_nothing_is_built_where_it_is_not_wanted() -> None:
    assert choose_kernels("torch", CPU) == (TORCH, None)
    assert choose_kernels("auto", CUDA) == (TORCH, None)
    with pytest.raises(ConfigError, match="kernels is 'native' on device cuda; allowed there: auto, torch"):
        choose_kernels("native", CUDA)


def test_other_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="kernels is 'fast'; allowed: auto, native, torch"):
        EngineConfig.from_options("tiny", {"kernels": "fast"})
