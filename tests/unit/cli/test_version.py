"""`specinfer --version` names the hardware and libraries of the installation."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from specinfer.cli import version as version_module
from specinfer.kernels import machine
from specinfer.kernels.machine import LEVELS
from specinfer.version import VERSION
from tests.unit.cli.conftest import Run


def test_python_torch_and_the_best_level_of_this_cpu(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    level = next(level for level in LEVELS if level.name == "avx512")
    monkeypatch.setattr(version_module, "levels_here", lambda: (level, LEVELS[0]))
    monkeypatch.setattr(version_module, "packaged_library", lambda one: tmp_path / f"{one.name}.so")
    installed = f"specinfer {VERSION} (Python {platform.python_version()}, torch {torch.__version__}"
    for words in ("compiled on first use", "prebuilt"):
        assert run("--version")[:2] == (0, f"{installed}, CPU kernels: AVX-512 with VNNI, {words})\n")
        (tmp_path / "avx512.so").touch()


def test_a_cpu_without_kernels_and_a_level_that_it_lacks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_module, "levels_here", lambda: ())
    monkeypatch.setattr(version_module, "architecture", lambda: "riscv64")
    assert "CPU kernels: none for this riscv64 CPU, PyTorch computes" in run("--version")[1]
    monkeypatch.undo()
    monkeypatch.setenv(machine.VARIABLE, "mmx")
    out = run("--version")[1]
    assert out.startswith(f"specinfer {VERSION} (")
    assert "SPECINFER_CPU is 'mmx'; allowed here:" in out
