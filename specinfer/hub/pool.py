"""Pool: a folder of drafts tuned together for one target, listed in its pool.json.

    pool.json   {"format": "specinfer pool", "version": 1, "target": "NAME", "fingerprint": "HEX",
                 "members": [{"folder": "member1", "kind": "ssm", "figures": {"tokens_per_pass": 1.8}}, ...],
                 "figures": {"tokens_per_step": 2.1, ...}}

Members are folders beside the file, with heads or small models, in the order of their selection. The file
is untrusted: folder names must be plain names, members must not be pools, and their number is limited.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from specinfer.errors import ModelFileError
from specinfer.files import write_text
from specinfer.hub.model_files import read_json

POOL_FILE: Final = "pool.json"
MAX_MEMBERS: Final = 16
_FORMAT: Final = "specinfer pool"
_VERSION: Final = 1
_MAX_BYTES: Final = 1 << 20
_MAX_FIGURES: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# Both versions of the fingerprint in models/fingerprint.py.
FINGERPRINT: Final = re.compile(r"[0-9a-f]{64}|2:[0-9a-f]{32}(:\w{1,16}:[0-9a-f]{32})?")


@dataclass(frozen=True, slots=True)
class Member:
    """One draft of a pool."""

    folder: str  # beside pool.json
    kind: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pool:
    """Contents of a pool.json."""

    target: str  # name for display
    fingerprint: str  # hash of the target's weights (models/fingerprint.py)
    members: tuple[Member, ...]
    figures: Mapping[str, float] = field(default_factory=dict)  # measured with all members together


def is_pool(folder: Path) -> bool:
    """Return True if a folder holds a pool."""
    return (folder / POOL_FILE).is_file()


def read_pool(folder: Path) -> Pool:
    """Read the pool of a folder; raises ModelFileError if its file is damaged or over a limit."""
    path = folder / POOL_FILE
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise ModelFileError(f"{path} has {size} bytes; allowed: {_MAX_BYTES}. Get the pool again")
    found = read_json(path)
    if found.get("format") != _FORMAT:
        raise ModelFileError(f"{path} has format {_shown(found.get('format'))}; expected {_FORMAT!r}")
    if found.get("version") != _VERSION:
        raise ModelFileError(
            f"{path} has version {_shown(found.get('version'))}; this specinfer reads {_VERSION}"
        )
    listed = found.get("members")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_MEMBERS:
        count = f"{len(listed)} members" if isinstance(listed, list) else f"members {_shown(listed)}"
        raise ModelFileError(f"{path} has {count}; allowed: a list of 1 to {MAX_MEMBERS}")
    members = tuple(_member(path, one) for one in listed)
    names = [member.folder for member in members]
    if len({*names}) < len(names):
        raise ModelFileError(f"{path} lists a folder twice; list each folder once")
    fingerprint = _text(path, found, "fingerprint")
    if not FINGERPRINT.fullmatch(fingerprint):
        raise ModelFileError(
            f"{path} has fingerprint {_shown(fingerprint)}; expected 64 hexadecimal digits, or 2: and digits"
        )
    return Pool(_text(path, found, "target"), fingerprint, members, _figures(path, found))


def write_pool(folder: Path, pool: Pool) -> None:
    """Write pool.json atomically; raises OSError."""
    described = {
        "format": _FORMAT,
        "version": _VERSION,
        "target": pool.target,
        "fingerprint": pool.fingerprint,
        "members": [
            {"folder": one.folder, "kind": one.kind, "figures": dict(one.figures)} for one in pool.members
        ],
        "figures": dict(pool.figures),
    }
    write_text(folder / POOL_FILE, json.dumps(described, indent=2))


def member_folders(folder: Path, pool: Pool) -> list[Path]:
    """Return the members' folders; raises ModelFileError if one is missing, outside the pool, or a pool."""
    inside = folder.resolve()
    found: list[Path] = []
    for member in pool.members:
        path = folder / member.folder
        if not path.is_dir():
            raise ModelFileError(f"{folder} has no folder {member.folder}, which its {POOL_FILE} names")
        if path.resolve().parent != inside:
            raise ModelFileError(
                f"{path} is a link to another place; allowed: members in the pool's own folder"
            )
        if is_pool(path):
            raise ModelFileError(f"{path} is a pool; allowed: members that are heads or small models")
        found.append(path)
    return found


def _member(path: Path, value: object) -> Member:
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} has a member {_shown(value)}; expected an object with its folder")
    folder = _text(path, value, "folder")
    if not _NAME.fullmatch(folder):
        raise ModelFileError(
            f"{path} has a member in folder {_shown(folder)}; allowed: the name of a folder beside it"
        )
    return Member(folder, _text(path, value, "kind"), _figures(path, value))


def _text(path: Path, found: Mapping[str, Any], key: str) -> str:
    value = found.get(key)
    if not isinstance(value, str) or len(value) > 256:
        raise ModelFileError(f"{path} has {key} {_shown(value)}; expected a short text")
    return value


def _figures(path: Path, found: Mapping[str, Any]) -> dict[str, float]:
    value = found.get("figures", {})
    if not isinstance(value, dict) or len(value) > _MAX_FIGURES:
        raise ModelFileError(f"{path} has figures {_shown(value)}; expected an object of a few numbers")
    for name, number in value.items():
        if type(number) not in (int, float) or not abs(number) <= sys.float_info.max:  # NaN fails both
            raise ModelFileError(f"{path} has {name[:40]!r} {_shown(number)}; expected a finite number")
    return {name: float(number) for name, number in value.items()}


def _shown(value: object) -> str:
    return repr(value)[:60]
