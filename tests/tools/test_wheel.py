"""The wheel of `pip wheel .`, installed without compiler and repository."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest

from specinfer.errors import KernelBuildError
from specinfer.kernels.build import _FLAGS, find_compiler
from specinfer.kernels.machine import LEVELS, architecture
from tests.tools.sources import REPOSITORY, bare_environment, copy_sources, copying_compiler

pytestmark = pytest.mark.slow  # pip builds and installs

HERE: Final = [level.name for level in LEVELS if level.architecture == architecture()]
# A compiler that makes empty files, and does not know how to make the best of them.
OLD: Final = f"""#!/bin/sh
case " $* " in *" {next(level for level in LEVELS if level.name == HERE[-1]).flags[-1]} "*)
  echo "c++: error: unrecognized option"; echo "compilation terminated"; exit 1;; esac
while [ "$1" != -o ]; do shift; done
: > "$2"
"""
# In the environment of the wheel.
USE: Final = """
import json
from pathlib import Path

import torch

import specinfer
from specinfer.kernels.choice import choose_kernels
from specinfer.kernels.quantized import Products
from specinfer.kernels.layout import quantize_int8

kernels, _ = choose_kernels("native", torch.device("cpu"))
weight, x = torch.randn(80, 800), torch.randn(17, 800)
quantized = quantize_int8(weight)
got, want = (products.laid_out(quantized, None, 800, 80)(x) for products in (kernels.products, Products()))
print(json.dumps({
    "package": str(Path(specinfer.__file__).parent),
    "library": str(kernels.library.path),
    "level": kernels.library.level.name,
    "equal": torch.equal(got, want),
}))
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Copy the files of a wheel into a separate folder."""
    return copy_sources(tmp_path / "sources")


def pip(*arguments: str, **changed: str | None) -> str:
    """Run pip and return its output."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    files: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=bare_environment(**changed), check=False, **files)
    assert done.returncode == 0, done.stdout
    return str(done.stdout)


def build(sources: Path, **changed: str | None) -> tuple[Path, list[str]]:
    """The wheel, and what was said of the kernels."""
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", str(sources / "dist"))
    said = pip("wheel", "--verbose", *options, str(sources), **changed)
    [wheel] = (sources / "dist").iterdir()
    return wheel, [line.strip() for line in said.splitlines() if "native kernels" in line]


def libraries(wheel: Path) -> list[str]:
    names = map(Path, zipfile.ZipFile(wheel).namelist())
    return sorted(name.stem for name in names if name.parent == Path("specinfer/kernels/lib"))


def test_a_level_that_the_compiler_is_too_old_for_is_left_out(sources: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(OLD)
    compiler.chmod(0o755)
    (sources / "build" / "lib" / "specinfer").mkdir(parents=True)
    (sources / "build" / "lib" / "specinfer" / "of_yesterday.py").touch()
    wheel, said = build(sources, CXX=str(compiler), SPECINFER_WHEEL_LEVELS="all")
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    assert libraries(wheel) == sorted(HERE[:-1])
    assert len(said) == len(HERE)
    assert [line for line in said if HERE[-1] in line] == [said[-1]]
    assert said[-1].endswith("is left out: c++: error: unrecognized option")
    names = zipfile.ZipFile(wheel).namelist()
    assert "specinfer/kernels/cpu/library.cpp" in names, "for levels that are left out, and other machines"
    assert "specinfer/of_yesterday.py" not in names


def test_it_compiles_where_nothing_is_installed() -> None:
    """setup.py imports it in an environment that has setuptools alone."""
    code = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); import specinfer.kernels.build"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_its_kernels_run_where_there_is_no_compiler(sources: Path, tmp_path: Path) -> None:
    try:
        find_compiler()
    except KernelBuildError as error:
        pytest.skip(f"the wheel cannot be built with kernels: {error}")
    compiler = tmp_path / "c++"
    best = copying_compiler(compiler)
    level, log = best.level.name, compiler.with_suffix(".log")
    wheel, said = build(sources, SPECINFER_WHEEL_LEVELS=level, CXX=str(compiler))
    *calls, link = (call.rpartition(" -o ")[0] for call in log.read_text().splitlines())
    flags = " ".join([*_FLAGS, *best.level.flags])
    cpu = REPOSITORY / "specinfer" / "kernels" / "cpu"
    units = sorted(path.stem for path in cpu.glob("*.cpp"))
    assert all(call.startswith(f"{flags} -c ") and call.endswith(".cpp") for call in calls)
    assert sorted(Path(call.removeprefix(f"{flags} -c ")).stem for call in calls) == units
    assert sorted(Path(made).stem for made in link.split() if made.endswith(".o")) == units
    assert (libraries(wheel), len(said)) == ([level], 1)

    venv, elsewhere, cache = tmp_path / "venv", tmp_path / "elsewhere", tmp_path / "cache"
    elsewhere.mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip("--python", str(venv / "bin" / "python"), "install", "--no-deps", str(wheel))
    [site] = venv.glob("lib/python*/site-packages")
    # Other packages are this environment's. Paths in such a file are not searched for further ones, so an
    # editable install of the repository is not found.
    shared = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site / "shared.pth").write_text("\n".join(shared))

    answer = run_script(venv / "bin" / "python", elsewhere, cache)
    package = site / "specinfer"
    places = {"package": str(package), "library": str(package / "kernels" / "lib" / f"{level}.so")}
    assert answer == {**places, "level": level, "equal": True}
    kept = [path.name for path in (cache / "kernels").iterdir()]
    assert [name.startswith("survived-") for name in kept] == [True], "nothing was compiled"


def run_script(python: Path, folder: Path, cache: Path) -> dict[str, Any]:
    """Run USE in `folder` with an empty PATH and return its output."""
    env = bare_environment(PATH=str(folder), SPECINFER_CACHE=str(cache))
    command = [str(python), "-c", USE]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout))
