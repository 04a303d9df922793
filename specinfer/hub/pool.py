"""Pool: a folder of drafts tuned together. Its pool.json is the list of drafts that the folder stands for.

    pool.json   ["member1", "member2"]

Members are folders beside the file, with heads or small models. The file is untrusted: its names must be
plain, members must not be pools, and their number is limited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from specinfer.errors import ModelFileError
from specinfer.files import write_text

POOL_FILE: Final = "pool.json"
MAX_MEMBERS: Final = 16
_MAX_BYTES: Final = 1 << 16
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def pool_members(folder: Path) -> list[Path]:
    """Return the folders of a pool's members; none if `folder` holds no pool.

    Raises ModelFileError if the list is damaged, or a member is missing, a link to elsewhere, or a pool.
    """
    path = folder / POOL_FILE
    if not path.is_file():
        return []
    names: Any = None
    with path.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) <= _MAX_BYTES:
        with suppress(ValueError, RecursionError):
            names = json.loads(data)
    plain = isinstance(names, list) and all(isinstance(one, str) and _NAME.fullmatch(one) for one in names)
    if not plain or not 1 <= len(names) <= MAX_MEMBERS or len({*names}) < len(names):
        raise ModelFileError(
            f"{path} is no list of drafts; allowed: 1 to {MAX_MEMBERS} different names of folders beside it"
        )
    members = [folder / name for name in names]
    for member in members:
        if not member.is_dir():
            raise ModelFileError(f"{folder} has no folder {member.name}, which its {POOL_FILE} names")
        if member.resolve().parent != folder.resolve():
            raise ModelFileError(
                f"{member} is a link to another place; allowed: members in the pool's own folder"
            )
        if (member / POOL_FILE).exists():
            raise ModelFileError(f"{member} is a pool; allowed: members that are heads or small models")
    return members


def write_pool(folder: Path, members: Sequence[str]) -> None:
    """Write pool.json atomically; raises OSError."""
    write_text(folder / POOL_FILE, json.dumps([*members]))
