"""Builds cpu/*.cpp into one shared library per CPU level, which depends on a C++ runtime alone.

A wheel contains the libraries of all levels of its architecture (`lib/`). Elsewhere the required one is
compiled on first use and kept in the user's cache. Its name contains a hash of its sources, flags and
compiler, so a stale library is never loaded, and a file gets its name only once it is complete. Another user
could predict the name, so libraries are kept in a folder that no other user can write to, and one that
another user may have written is not loaded. A wheel's own libraries are as safe as the Python files beside
them.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from specinfer.errors import KernelBuildError
from specinfer.files import cache_dir, locked
from specinfer.kernels.machine import Level
from specinfer.progress import NoProgress, Progress

_LOG: Final = logging.getLogger(__name__)
_HAS_MODES: Final = os.name == "posix"  # file modes and owners exist on POSIX alone
_ROOT: Final = 0
_SOURCES: Final = Path(__file__).parent / "cpu"
_PACKAGED: Final = Path(__file__).parent / "lib"
_FLAGS: Final = (
    "-O3",
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-ffp-contract=off",
    "-pthread",
    "-w",
)
_SHOWN_LINES: Final = 12  # last lines of the compiler's output that are shown
_LARGEST: Final = ("quantized_product", "float_product", "attention", "tile_product")  # compiled first


def kernels_folder() -> Path:
    """The folder of compiled libraries: in the user's cache, or a temporary one.

    The second if this user cannot write to the cache, or others can, which logs one line per process. Raises
    KernelBuildError if others can write to both, OSError if the temporary one cannot be created.
    """
    wanted = cache_dir() / "kernels"
    try:
        wanted = make_private(wanted)
        wrong = fault(wanted) or (None if os.access(wanted, os.W_OK) else f"{wanted} cannot be written")
    except OSError as error:
        wrong = str(error)
    if wrong is None:
        return wanted
    remedy = "set SPECINFER_CACHE to a folder that you can write to, and others cannot (chmod go-w)"
    private = make_private(Path(tempfile.gettempdir()) / f"specinfer-kernels-{os.geteuid()}")
    if (too := fault(private)) is not None:
        raise KernelBuildError(f"native kernels cannot be kept safely: {wrong}, and {too}; {remedy}")
    _warn_once(f"native kernels are kept in {private}, not in {wanted}: {wrong}; {remedy}")
    return private


def make_private(folder: Path) -> Path:
    """Create a folder and its missing parents for this user alone; returns the path without links.

    Links are resolved once, so a link that is changed later has no effect.
    """
    folder = folder.resolve()
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    return folder


def fault(path: Path) -> str | None:
    """Why another user may have written or could replace `path`; None if no other user can.

    All parent folders count, since write permission allows renaming their entries. In a sticky folder such as
    /tmp only the owner can rename an entry. Root can write everywhere. `path` must have no links.
    """
    if not _HAS_MODES:
        return None
    for place in (path, *path.parents):
        found = place.stat()
        if found.st_uid not in (_ROOT, os.geteuid()):
            return f"{place} belongs to another user ({found.st_uid})"
        held = place != path and found.st_mode & stat.S_ISVTX
        if not held and _others_write(found):
            return f"{place} can be written by others"
    return None


def _others_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_own(found.st_gid)


def _is_own(group: int) -> bool:
    """True if only this user and root are in a group; many systems give each user such a group."""
    import grp
    import pwd

    trusted = {_ROOT, os.geteuid()}
    try:
        members = {pwd.getpwnam(name).pw_uid for name in grp.getgrgid(group).gr_mem}
    except KeyError:  # unknown group or member
        return False
    members.update(user.pw_uid for user in pwd.getpwall() if user.pw_gid == group)
    return members <= trusted


@functools.cache
def _warn_once(message: str) -> None:
    """Log a message once per process, though every loaded model finds it again."""
    _LOG.warning("%s", message)


def find_library(level: Level, progress: Progress | None = None) -> Path:
    """The library of a level: the wheel's own, or one from the cache, compiled if necessary.

    Raises KernelBuildError with the compiler's last lines if there is no compiler or it fails.
    """
    packaged = packaged_library(level)
    return packaged if packaged.is_file() else build_library(level, progress)


def packaged_library(level: Level) -> Path:
    """Path of a level's library in a wheel."""
    return _PACKAGED / f"{level.name}.so"


def build_library(level: Level, progress: Progress | None = None, extra: Sequence[str] = ()) -> Path:
    """The library of a level in the user's cache, compiled if necessary.

    A library that another user may have written is rebuilt. `extra` flags come last. Raises as
    `find_library`, and if others can write to all folders for libraries.
    """
    compiler = find_compiler()
    flags = (*level.flags, *extra)
    name = f"specinfer-{level.name}-{_fingerprint(compiler, flags)}.so"
    library = (cache_dir() / "kernels").resolve() / name  # also in a folder that only root writes
    if _is_ours(library):
        return library
    try:
        library = kernels_folder() / name
        with locked(library.parent / "build.lock"):  # one process builds, others wait
            if not _is_ours(library):
                compile_library(compiler, flags, library, progress)
    except OSError as error:
        raise KernelBuildError(f"native kernels cannot be kept in {library.parent}: {error}") from error
    return library


def _is_ours(library: Path) -> bool:
    """True if the library exists and no other user can have written it."""
    return library.is_file() and not library.is_symlink() and fault(library) is None


def compile_library(
    compiler: Sequence[str], flags: Sequence[str], library: Path, progress: Progress | None = None
) -> None:
    """Compile all sources into `library`, which gets its name once complete; raises KernelBuildError."""
    sources = sorted(_SOURCES.glob("*.cpp"), key=lambda source: (source.stem not in _LARGEST, source.stem))
    show = progress or NoProgress()
    show.start(len(sources) + 1, "building native kernels (once per machine)", "files")
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            objects = [Path(scratch) / f"{source.stem}.o" for source in sources]

            def compile_one(source: Path, target: Path) -> None:
                _run([*compiler, *_FLAGS, *flags, "-c", str(source), "-o", str(target)])
                show.advance(1)

            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(compile_one, sources, objects))  # after a failure the others do not start
            whole = Path(scratch) / library.name
            _run([*compiler, "-shared", "-s", "-pthread", *map(str, objects), "-o", str(whole)])
            whole.chmod(0o755)  # independent of the umask: a file that others may write to is not loaded
            whole.replace(library)
            show.advance(1)
    finally:
        show.finish()


def find_compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: CXX with its options, or the first of g++, clang++ and c++.

    Raises KernelBuildError if none is found.
    """
    named = os.environ.get("CXX", "").strip()
    commands = [_words(named)] if named else [["g++"], ["clang++"], ["c++"]]
    for program, *options in commands:
        path = shutil.which(program)
        if path is not None:
            return path, *options
    missing = (commands[0][0] or named) if named else "g++, clang++ and c++"
    raise KernelBuildError(
        f"no C++ compiler: {missing} not found; install one, or set CXX (a program with options), "
        "or install a wheel that contains the kernels"
    )


def _words(named: str) -> list[str]:
    """The words of CXX, split as by a shell; the path of an existing program may contain spaces."""
    if shutil.which(named):
        return [named]
    try:
        return shlex.split(named)
    except ValueError as error:
        raise KernelBuildError(
            f"CXX is {named!r}, which cannot be parsed ({error}); allowed: a program with options"
        ) from error


def _run(command: Sequence[str]) -> str:
    """The command's output; raises KernelBuildError with its last lines if it fails."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        raise KernelBuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        message = "\n".join(done.stdout.strip().splitlines()[-_SHOWN_LINES:])
        raise KernelBuildError(f"{command[0]} failed ({done.returncode}):\n{message}")
    return done.stdout


@functools.cache
def _fingerprint(compiler: tuple[str, ...], flags: tuple[str, ...]) -> str:
    """A hash of everything the library depends on."""
    digest = hashlib.sha256()
    for source in sorted([*_SOURCES.glob("*.cpp"), *_SOURCES.glob("*.h")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(" ".join([*compiler[1:], *_FLAGS, *flags]).encode())
    digest.update(_run([*compiler, "--version"]).encode())
    return digest.hexdigest()[:16]
