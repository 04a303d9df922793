"""Sdist and wheel, built without kernels: their files, their metadata, and the release notes."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest
from packaging.metadata import Metadata

from specinfer.version import VERSION
from tests.tools.sources import REPOSITORY, bare_environment, copy_sources
from tools.release import package_version, release_notes

pytestmark = pytest.mark.thorough

BUILD: Final = "import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
SUFFIXES: Final = {
    *(".py", ".typed", ".cpp", ".h"),  # code
    *(".js", ".css", ".html", ".svg", ".txt"),  # the server's page, and licences of its libraries
    *(".csv", ".jsonl", ".json", ".md", ".safetensors"),  # data
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("distribution")
    sources = copy_sources(folder / "sources")
    for stray in ("tests/test_stray.py", "specinfer/notes.txt", "specinfer/kernels/stray.so"):
        (sources / stray).parent.mkdir(exist_ok=True)
        (sources / stray).touch()
    for kind in ("sdist", "wheel"):
        command = [sys.executable, "-c", BUILD.format(kind=kind), str(folder / "dist")]
        given: Any = {"cwd": sources, "env": bare_environment(PATH=str(folder))}  # without a compiler
        done = subprocess.run(command, **given, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout + done.stderr
    assert "native kernels: none: no C++ compiler was found; they will be compiled on" in said
    return folder / "dist"


def names_in_sdist(dist: Path) -> set[str]:
    [path] = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = [member.name for member in archive.getmembers() if member.isfile()]
    return {name.removeprefix(f"specinfer-{VERSION}/") for name in files}


def wheel_of(dist: Path) -> zipfile.ZipFile:
    [path] = dist.glob("*-py3-none-any.whl")
    return zipfile.ZipFile(path)


def package_files() -> set[str]:
    found = (REPOSITORY / "specinfer").rglob("*")
    files = {str(path.relative_to(REPOSITORY)) for path in found if path.is_file()}
    return {name for name in files if "__pycache__" not in name}


def test_both_have_every_file_of_the_package_and_no_others(dist: Path) -> None:
    expected = package_files()
    assert {Path(name).suffix or Path(name).name for name in expected} <= SUFFIXES
    of_wheel = {name for name in wheel_of(dist).namelist() if ".dist-info/" not in name}
    assert of_wheel == expected
    of_sdist = {name for name in names_in_sdist(dist) if not name.startswith("specinfer.egg-info/")}
    around = {"CHANGELOG.md", "LICENSE", "README.md"}
    build = {"MANIFEST.in", "PKG-INFO", "pyproject.toml", "setup.cfg", "setup.py"}
    assert of_sdist == expected | around | build


def test_the_metadata_is_valid_and_has_the_readme(dist: Path) -> None:
    wheel = wheel_of(dist)
    metadata = Metadata.from_email(wheel.read(f"specinfer-{VERSION}.dist-info/METADATA"), validate=True)
    named = metadata.name, str(metadata.version), metadata.license_expression
    assert named == ("specinfer", VERSION, "Apache-2.0")
    assert metadata.description_content_type == "text/markdown"
    assert (metadata.description or "").strip() == (REPOSITORY / "README.md").read_text().strip()
    assert str(metadata.requires_python) == ">=3.11"
    assert {"serve", "cluster", "otel", "transformers"} <= set(metadata.provides_extra or ())
    scripts = wheel.read(f"specinfer-{VERSION}.dist-info/entry_points.txt").decode()
    assert "specinfer = specinfer.cli:main" in scripts


def test_the_newest_version_of_the_changelog_is_the_packages() -> None:
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    version = package_version(REPOSITORY / "specinfer" / "version.py")
    assert version == VERSION
    notes = release_notes(changelog, version)
    assert notes.startswith(f"# specinfer {version} - ")
    assert "### Added\n" in notes
    assert "\n## " not in notes
