"""Where code may be loaded from: a folder that nobody else can put anything in."""

from __future__ import annotations

import functools
import logging
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from specinfer.errors import KernelBuildError
from specinfer.files import cache_dir

_LOG: Final = logging.getLogger(__name__)
_HAS_MODES: Final = os.name == "posix"  # owners and modes of files; elsewhere nothing is known of either
_ROOT: Final = 0


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
