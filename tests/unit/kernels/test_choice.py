"""Which kernels run where, and what is said when the native ones cannot be had."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from specinfer.errors import ConfigError, KernelBuildError
from specinfer.kernels import build, choice
from specinfer.kernels.attention import NativeAttention
from specinfer.kernels.choice import TORCH, choose_kernels, streaming_kernels
from specinfer.kernels.machine import VARIABLE, levels_here
from specinfer.kernels.native_ops import NativeOps
from specinfer.kernels.quantized import NativeProducts
from specinfer.kernels.sampling import NativeScan
from tests.kernels import kernels

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def no_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No compiler, no wheel's libraries, nothing in the cache."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_PACKAGED", tmp_path / "lib")


def test_native_kernels_run_on_a_cpu() -> None:
    native = kernels("native")
    chosen, lacking = choose_kernels("auto", CPU)
    assert lacking is None
    for found in (native, chosen):
        assert isinstance(found.ops, NativeOps)
        assert isinstance(found.attention, NativeAttention)
        assert isinstance(found.scan, NativeScan)
        assert isinstance(found.products, NativeProducts)
    assert chosen.library is native.library, "one library, with one pool of threads, for all engines"


@pytest.mark.usefixtures("no_libraries")
def test_without_a_compiler_the_twins_run_and_the_reason_is_told(caplog: pytest.LogCaptureFixture) -> None:
    if not levels_here():
        pytest.skip("this CPU has no native kernels")
    with caplog.at_level(logging.WARNING):
        chosen, lacking = choose_kernels("auto", CPU)
    assert chosen == TORCH
    assert lacking == (
        "no C++ compiler: no-such-compiler not found; install one, or set CXX (a program with options), "
        "or install a wheel that contains the kernels"
    )
    assert not caplog.messages, "and no message for each level"
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler: no-such-compiler not found"):
        choose_kernels("native", CPU)


@pytest.mark.usefixtures("no_libraries")
def test_nothing_is_built_where_it_is_not_wanted(tmp_path: Path) -> None:
    assert choose_kernels("torch", CPU) == (TORCH, None)
    assert choose_kernels("auto", CUDA) == (TORCH, None)
    with pytest.raises(ConfigError, match="kernels is 'native' on device cuda; allowed there: auto, torch"):
        choose_kernels("native", CUDA)
    assert not list(tmp_path.iterdir())


def test_a_cpu_that_cannot_be_is_refused_whatever_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "avx10")
    for wanted in ("auto", "native"):
        with pytest.raises(ConfigError, match="SPECINFER_CPU is 'avx10'; allowed here: "):
            choose_kernels(wanted, CPU)
    assert choose_kernels("torch", CPU) == (TORCH, None)


def test_only_amds_cpus_read_large_weights_past_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    for vendor, weights, past in (
        *(("AuthenticAMD", 2, True), ("AuthenticAMD", 1, False)),
        *(("GenuineIntel", 2, False), (None, 2, False)),
    ):
        monkeypatch.setattr(choice, "cache_bytes", lambda: 1)
        monkeypatch.setattr(choice, "cpu_info", {"vendor_id": vendor}.get)
        chosen = streaming_kernels(kernels("native"), weights)
        assert chosen.products.use.nontemporal is past, (vendor, weights)
