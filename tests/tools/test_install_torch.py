"""Which PyTorch is installed where; pip, uv and the machine are played."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.thorough

TOOL = Path(__file__).parents[2] / "tools" / "install_torch.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The tool, as on a Linux x86-64 machine without GPU and without torch."""
    spec = importlib.util.spec_from_file_location("install_torch", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    monkeypatch.setattr(module, "installed", lambda: None)
    monkeypatch.setattr(module, "DRIVER", tmp_path / "no-driver")
    return module


def play(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, *failing: str) -> list[str]:
    """Commands "succeed", except those whose text contains one of `failing`; the installs asked for."""
    asked: list[str] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        text = " ".join(command)
        if " install " in text:
            program = "uv" if " -m uv " in text else "pip"
            asked.append(
                f"{program} {next(a for a in reversed(command) if a.startswith('torch==') or a == 'uv')}"
            )
        failed = any(part in text for part in failing)
        return subprocess.CompletedProcess(command, int(failed), stdout="GPU 0: a card")

    monkeypatch.setattr(tool.subprocess, "run", run)
    return asked


def test_the_cpu_build_is_taken_where_pip_finds_it(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = play(tool, monkeypatch)
    assert tool.main() == 0
    assert asked == ["pip torch==2.13.0+cpu"]


@pytest.mark.parametrize("failing", ["--torch-backend=cpu", "install --disable-pip-version-check uv"])
def test_plain_torch_is_the_last_resort_and_says_so(
    tool: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failing: str,
) -> None:
    asked = play(tool, monkeypatch, "+cpu", failing)
    assert tool.main() == 0
    assert asked[-1] == "pip torch==2.13.0"
    [line] = [line for line in capsys.readouterr().out.splitlines() if "gigabytes" in line]
    assert line.startswith("no CPU build of torch 2.13.0 was found, neither by pip nor by uv")


def test_a_gpu_gets_plain_torch(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = play(tool, monkeypatch)
    monkeypatch.setattr(tool.shutil, "which", lambda name: "/usr/bin/" + name)
    assert tool.main() == 0
    assert asked == ["pip torch==2.13.0"]


@pytest.mark.parametrize(
    ("version", "kept"), [("2.11.0+cu130", True), ("2.13.0a0+git1", True), ("3.0", True), ("2.9.1", False)]
)
def test_a_torch_in_range_is_kept(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str, kept: bool
) -> None:
    asked = play(tool, monkeypatch)
    monkeypatch.setattr(tool, "installed", lambda: version)
    assert tool.main() == 0
    assert asked == ([] if kept else ["pip torch==2.13.0+cpu"])
