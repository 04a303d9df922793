"""`specinfer doctor` from options to its report."""

import json
import platform
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from specinfer.check import doctor as facts
from specinfer.cli import doctor as command
from specinfer.cli.doctor import doctor
from specinfer.errors import ConfigError, ModelNotFoundError
from specinfer.kernels.disk import Bandwidth
from specinfer.kernels.machine import LEVELS, VARIABLE
from specinfer.version import VERSION
from tests.kernels import kernels
from tests.tiny_models import write_tiny_llama
from tests.unit.cli.conftest import Run


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller limits for memory and disk, without the settings of the user who runs the tests."""
    monkeypatch.setattr("specinfer.kernels.disk.Bandwidth", partial(Bandwidth, size=1 << 20))
    monkeypatch.setattr(facts, "TRIAL", 1 << 20)
    monkeypatch.setattr("specinfer.kernels.disk._SECONDS", 0.01)
    for name in facts.VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("specinfer.kernels.build._PACKAGED", tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", tokenizer=True))


def report_of(*arguments: str) -> str:
    result = CliRunner().invoke(doctor, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def found(*arguments: str) -> dict[str, Any]:
    return dict(json.loads(report_of("--json", *arguments)))


def test_the_report_has_levels_and_speeds(model: str) -> None:
    kernels("native")  # or skip
    lines = report_of("--model", model, "--quantization", "none", "--quantization", "int8").splitlines()
    report = {line.split()[0]: line for line in lines if line}
    assert f"specinfer {VERSION}" in report["versions"]
    assert "torch " in report["versions"]
    assert "native, " in report["kernels"]
    assert "usable cores: " in report["threads"]
    assert report["variables"].endswith("none set")
    assert report["memory"].endswith(" GB/s")
    disk = r"streams \S+ at [\d.]+ .B/s by \d readers? of \d+ MiB, \w+ the page cache"
    assert re.search(disk, report["disk"])
    assert sum(line.endswith("  used") for line in lines) == 1
    assert lines[-2].startswith("tiny (bfloat16): ")
    assert lines[-1].startswith("tiny (int8, bfloat16): ")
    assert " ms a pass after 200 tokens (" in lines[-1]
    end = r"\d+ MB of memory(; --kv-cache-dtype int8 would pay for texts of \d+ tokens or more)?$"
    assert re.search(r" times the floor of its bytes\), first token in \d+ ms, " + end, lines[-1])
    values = found()
    (used,) = [level["name"] for level in values["levels"] if level["standing"] == "used"]
    assert used in Path(values["library"]).name


def test_the_disk_of_a_folder_is_timed_and_nothing_is_left_there(tmp_path: Path, own_cache: Path) -> None:
    folder = tmp_path / "fast" / "disk"
    disk = found("--offload-folder", str(folder))["disk"]
    assert (disk["folder"], disk["file"], disk["fault"]) == (str(folder), None, None)
    assert disk["rate"]["bytes_per_second"] > 1e6
    assert list(tmp_path.iterdir()) == [own_cache]
    folder.mkdir(parents=True)
    for name, size in (("small", 1 << 19), ("large", 1 << 21)):
        (folder / f"{name}.safetensors").write_bytes(bytes(size))
    report = report_of("--offload-folder", str(folder))
    assert f"streams {folder} at " in report
    assert report.splitlines()[7].endswith(" (large.safetensors)")


def test_without_a_compiler_pytorch_is_timed(no_compiler: None, model: str) -> None:
    report = report_of()
    assert "PyTorch's, which are slow: no C++ compiler: no-such-compiler not found" in report
    assert "CXX=no-such-compiler" in report
    assert "refused: no C++ compiler" in report
    assert "not measured, as there are no native kernels" in report
    values = found("--model", model)
    assert values["kernels"] == "torch"
    assert values["passes"][0]["milliseconds"] > 0
    assert (values["passes"][0]["times_floor"], values["passes"][0]["attention"]) == (None, "torch")


def test_an_impossible_setting_is_reported_and_stops(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.setenv(VARIABLE, "avx9")
    assert "kernels    none: SPECINFER_CPU is 'avx9'; allowed here: " in report_of()
    assert found()["kernels"] == "nothing"
    with pytest.raises(ConfigError, match="SPECINFER_CPU is 'avx9'"):
        report_of("--model", model)


def test_slips_are_answered_at_once(monkeypatch: pytest.MonkeyPatch, model: str, tmp_path: Path) -> None:
    monkeypatch.setattr(facts, "find_kernels", lambda progress: pytest.fail("this would have taken time"))
    models = ("--model", model)
    for words, message in (
        ((*models, "--model", str(tmp_path / "nothing.gguf")), "there is no file or folder"),
        ((*models, "--quantization", "int3"), "quantization is 'int3'; allowed: auto, none, int8, int4"),
        (("--quantization", "int8"), "--quantization is for models, and none is named; add --model"),
    ):
        with pytest.raises((ConfigError, ModelNotFoundError), match=message):
            report_of(*words)


# ---- specinfer --version ----


def test_versions_and_the_best_level(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    level = next(level for level in LEVELS if level.name == "avx512")
    monkeypatch.setattr(command, "levels_here", lambda: (level, LEVELS[0]))
    monkeypatch.setattr(command, "packaged_library", lambda one: tmp_path / f"{one.name}.so")
    installed = f"specinfer {VERSION} (Python {platform.python_version()}, torch {torch.__version__}"
    for words in ("compiled on first use", "prebuilt"):
        assert run("--version")[:2] == (0, f"{installed}, CPU kernels: AVX-512 with VNNI, {words})\n")
        (tmp_path / "avx512.so").touch()


def test_a_cpu_without_kernels_and_a_level_that_it_lacks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "levels_here", lambda: ())
    monkeypatch.setattr(command, "architecture", lambda: "riscv64")
    assert "CPU kernels: none for this riscv64 CPU, PyTorch computes" in run("--version")[1]
    monkeypatch.undo()
    monkeypatch.setenv(VARIABLE, "mmx")
    out = run("--version")[1]
    assert out.startswith(f"specinfer {VERSION} (")
    assert "SPECINFER_CPU is 'mmx'; allowed here:" in out
