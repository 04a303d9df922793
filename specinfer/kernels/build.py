"""cpu/*.cpp -> one shared library of PyTorch custom ops, compiled for this CPU and this torch, once.

The library's name is a hash of all it was made from: sources, flags, compiler, CPU and torch. Whatever
changes, another file is looked for, so nothing stale is ever loaded; a file gets its name only when whole.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from specinfer.errors import KernelBuildError
from specinfer.hub.resolution import cache_dir
from specinfer.progress import Progress, Silence

_SOURCES = Path(__file__).parent / "cpu"
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-ffp-contract=off", "-w")
_NATIVE = "-march=native"
_TIMEOUT = 300  # seconds for one file
_SHOWN_LINES = 12  # of the compiler's last words


def load_library(progress: Progress | None = None) -> None:
    """Make torch.ops.specinfer.* callable; compiles them first where that has not been done yet.

    Raises KernelBuildError with the compiler's last lines when there is no compiler or it fails, and when
    what it made cannot be loaded.
    """
    load: Callable[[str], None] = torch.ops.load_library
    library = build_library(progress)
    try:
        load(str(library))
    except OSError as error:
        raise KernelBuildError(
            f"{library} cannot be loaded ({error}); delete it, or set SPECINFER_CACHE to a folder from which "
            "libraries may be loaded"
        ) from error


def build_library(progress: Progress | None = None, cache: Path | None = None) -> Path:
    """The compiled library in `cache` (default: the user's), built there if it is not; raises as above."""
    compiler = _compiler()
    sources = sorted(_SOURCES.glob("*.cpp"))
    folder = cache or cache_dir() / "kernels"
    library = folder / f"specinfer-kernels-{_fingerprint(compiler)}.so"
    if library.is_file():
        return library
    show = progress or Silence()
    show.start(len(sources) + 1, "building native kernels (once per machine)", "files")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "build.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes one builds, the others wait for it
            if not library.is_file():
                _build(compiler, sources, library, show)
    except OSError as error:
        raise KernelBuildError(f"native kernels cannot be kept in {folder}: {error}") from error
    finally:
        show.finish()
    return library


def _build(compiler: str, sources: Sequence[Path], library: Path, show: Progress) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]

        def compile_one(pair: tuple[Path, Path]) -> None:
            source, target = pair
            _run([compiler, *_compile_flags(), "-c", str(source), "-o", str(target)])
            show.advance(1)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, zip(sources, objects, strict=True)))
        whole = Path(scratch) / library.name
        _run([compiler, "-shared", *map(str, objects), "-o", str(whole), *_link_flags()])
        whole.replace(library)
        show.advance(1)


def _compiler() -> str:
    named = os.environ.get("CXX")
    for name in [named] if named else ["g++", "clang++", "c++"]:
        path = shutil.which(name)
        if path is not None:
            return path
    raise KernelBuildError(
        f"no C++ compiler: {named or 'g++, clang++ and c++'} not found; install one or set CXX"
    )


def _run(command: Sequence[str]) -> str:
    """The command's output; raises KernelBuildError with its last lines when it fails."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"{command[0]} was stopped after {_TIMEOUT} s on {command[-3]}") from error
    if done.returncode != 0:
        words = "\n".join(done.stdout.strip().splitlines()[-_SHOWN_LINES:])
        raise KernelBuildError(f"{command[0]} failed ({done.returncode}):\n{words}")
    return done.stdout


def _compile_flags() -> list[str]:
    root = Path(torch.__file__).parent / "include"
    abi = int(torch.compiled_with_cxx11_abi())
    includes = [f"-I{root}", f"-I{root / 'torch' / 'csrc' / 'api' / 'include'}"]
    return [*_FLAGS, *_machine_flags(), f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *includes]


def _machine_flags() -> list[str]:
    return [_NATIVE] if platform.machine() in ("x86_64", "AMD64") else ["-mcpu=native"]


def _link_flags() -> list[str]:
    """Torch's own OpenMP runtime: a second one would spin on the same cores as the first."""
    folder = Path(torch.__file__).parent / "lib"
    runtimes = sorted(folder.glob("libgomp*.so*"))
    openmp = str(runtimes[0]) if runtimes else "-lgomp"
    return [f"-L{folder}", "-ltorch_cpu", "-lc10", openmp]


@functools.cache
def _fingerprint(compiler: str) -> str:
    """A hash of everything the library depends on."""
    digest = hashlib.sha256()
    for source in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    binary = [torch.__version__, str(torch.compiled_with_cxx11_abi()), Path(_link_flags()[-1]).name]
    digest.update(" ".join([*binary, *_FLAGS, *_machine_flags()]).encode())
    digest.update(_run([compiler, "--version"]).encode())
    digest.update(_run([compiler, *_machine_flags(), "-dM", "-E", "-x", "c++", os.devnull]).encode())
    return digest.hexdigest()[:16]
