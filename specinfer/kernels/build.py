"""cpu/*.cpp -> one shared library a level, that needs a C++ runtime and nothing else.

A wheel brings the libraries of all levels of its architecture (`lib/`). Elsewhere the one that is wanted is
compiled on first use and kept in the user's cache. There its name is a hash of all it was made from: sources,
flags and compiler. Whatever changes, another file is looked for, so nothing stale is ever loaded; a file gets
its name only when whole. A name that anybody can work out is safe where nobody else may write: what another
user may have written is not loaded. So libraries are kept in a folder that nobody else can put anything in. A
wheel's own libraries are as safe as the Python files beside them.
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
_HAS_MODES: Final = os.name == "posix"  # owners and modes of files; elsewhere nothing is known of either
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
_TIMEOUT: Final = 300  # seconds for one file
_SHOWN_LINES: Final = 12  # of the compiler's last words
_LARGEST: Final = ("quantized_product", "float_product", "attention", "tile_product")  # compiled first


def kernels_folder() -> Path:
    """The folder of compiled libraries: in the user's cache, or where others can write there, a private one.

    The second costs one line in the log, once a process. Raises KernelBuildError where others can write to
    both, OSError where a folder cannot be made.
    """
    wanted = make_private(cache_dir() / "kernels")
    wrong = fault(wanted)
    if wrong is None:
        return wanted
    private = make_private(Path(tempfile.gettempdir()) / f"specinfer-kernels-{os.geteuid()}")
    remedy = "take their right to write (chmod go-w), or set SPECINFER_CACHE to a folder of your own"
    if (too := fault(private)) is not None:
        raise KernelBuildError(f"native kernels cannot be kept safely: {wrong}, and {too}; {remedy}")
    _tell(f"native kernels are kept in {private}, not in {wanted}: {wrong}; {remedy}")
    return private


def make_private(folder: Path) -> Path:
    """Make a folder, and those above it that are missing, for this user alone; returns it without links.

    What a link leads to is settled here, once: whoever turns the link later changes nothing.
    """
    folder = folder.resolve()
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    return folder


def fault(path: Path) -> str | None:
    """Why another user may have written `path`, or could put something else in its place; None: nobody can.

    All folders above it count, for who can write to one can rename what is in it. Not so in a sticky one,
    as /tmp is, where only its owner moves a file. Nobody is protected from root. `path` has no links.
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
    """Whether nobody but this user and root is in a group: many systems give each user one like that."""
    import grp
    import pwd

    trusted = {_ROOT, os.geteuid()}
    try:
        members = {pwd.getpwnam(name).pw_uid for name in grp.getgrgid(group).gr_mem}
    except KeyError:  # a group or a member nobody knows
        return False
    members.update(user.pw_uid for user in pwd.getpwall() if user.pw_gid == group)
    return members <= trusted


@functools.cache
def _tell(words: str) -> None:
    """Log it; every model that is loaded finds it again, and it is told once."""
    _LOG.warning("%s", words)


def find_library(level: Level, progress: Progress | None = None) -> Path:
    """The library of a level: the wheel's own, or one that is compiled now or was before.

    Raises KernelBuildError with the compiler's last lines when there is no compiler or it fails.
    """
    packaged = packaged_library(level)
    return packaged if packaged.is_file() else build_library(level, progress)


def packaged_library(level: Level) -> Path:
    """Where a wheel has the library of a level."""
    return _PACKAGED / f"{level.name}.so"


def build_library(
    level: Level, progress: Progress | None = None, cache: Path | None = None, extra: Sequence[str] = ()
) -> Path:
    """The library compiled for a level in `cache` (default: the user's), built there if it is not.

    One that another user may have written is built anew. `extra` flags come last. Raises as above, and
    where others can write to `cache`.
    """
    compiler = find_compiler()
    flags = (*level.flags, *extra)
    folder = _private(cache)
    library = folder / f"specinfer-{level.name}-{_fingerprint(compiler, flags)}.so"
    if _is_ours(library):
        return library
    try:
        with locked(folder / "build.lock"):  # of several processes one builds, the others wait for it
            if not _is_ours(library):
                compile_library(compiler, flags, library, progress)
    except OSError as error:
        raise KernelBuildError(f"native kernels cannot be kept in {folder}: {error}") from error
    return library


def _private(cache: Path | None) -> Path:
    """Where to keep libraries; raises KernelBuildError where others can write there."""
    try:
        folder = kernels_folder() if cache is None else make_private(cache)
        wrong = fault(folder)
    except OSError as error:
        raise KernelBuildError(f"native kernels cannot be kept in {cache or 'the cache'}: {error}") from error
    if wrong is not None:
        raise KernelBuildError(f"native kernels cannot be kept safely in {folder}: {wrong}")
    return folder


def _is_ours(library: Path) -> bool:
    """Whether a library is there, and nobody else can have written it."""
    return library.is_file() and not library.is_symlink() and fault(library) is None


def compile_library(
    compiler: Sequence[str], flags: Sequence[str], library: Path, progress: Progress | None = None
) -> None:
    """Compile all sources into `library`, which gets its name when whole; raises KernelBuildError."""
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
                list(pool.map(compile_one, sources, objects))
            whole = Path(scratch) / library.name
            _run([*compiler, "-shared", "-s", "-pthread", *map(str, objects), "-o", str(whole)])
            whole.chmod(0o755)  # whatever the umask: what others may write to would not be loaded
            whole.replace(library)
            show.advance(1)
    finally:
        show.finish()


def find_compiler() -> tuple[str, ...]:
    """The command of the C++ compiler: CXX with its options, or the first of g++, clang++ and c++.

    Raises KernelBuildError where there is none.
    """
    named = os.environ.get("CXX", "").strip()
    commands = [_words(named)] if named else [["g++"], ["clang++"], ["c++"]]
    for program, *options in commands:
        path = shutil.which(program)
        if path is not None:
            return path, *options
    missing = (commands[0][0] or named) if named else "g++, clang++ and c++"
    raise KernelBuildError(
        f"no C++ compiler: {missing} not found; install one, or set CXX (a program, and options behind it), "
        "or install a wheel that brings the kernels"
    )


def _words(named: str) -> list[str]:
    """The words of CXX, as a shell reads them; a program that is there may have spaces in its path."""
    if shutil.which(named):
        return [named]
    try:
        return shlex.split(named)
    except ValueError as error:
        raise KernelBuildError(
            f"CXX is {named!r}, which cannot be read ({error}); allowed: a program, and options behind it"
        ) from error


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
    except OSError as error:
        raise KernelBuildError(f"{command[0]} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"{command[0]} was stopped after {_TIMEOUT} s on {command[-3]}") from error
    if done.returncode != 0:
        words = "\n".join(done.stdout.strip().splitlines()[-_SHOWN_LINES:])
        raise KernelBuildError(f"{command[0]} failed ({done.returncode}):\n{words}")
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
