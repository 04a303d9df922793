"""pool.json: written pools are read again, and other contents are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specinfer.errors import ModelFileError
from specinfer.hub.pool import Member, Pool, is_pool, member_folders, read_pool, write_pool

POOL = Pool(
    "target.gguf",
    "0" * 64,
    (Member("member2", "ssm", {"tokens_per_pass": 1.5}), Member("member1", "block")),
    {"tokens_per_step": 2.0},
)


def changed(folder: Path, **changes: Any) -> None:
    """POOL's file with other values; ... removes one."""
    write_pool(folder, POOL)
    path = folder / "pool.json"
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: one for key, one in value.items() if one != "removed"}))


def test_a_written_pool_is_read(tmp_path: Path) -> None:
    assert not is_pool(tmp_path)
    write_pool(tmp_path, POOL)
    assert is_pool(tmp_path)
    assert read_pool(tmp_path) == POOL
    for member in POOL.members:
        (tmp_path / member.folder).mkdir()
    assert member_folders(tmp_path, POOL) == [tmp_path / "member2", tmp_path / "member1"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "another"}, "has format 'another'; expected 'specinfer pool'"),
        ({"version": 2}, "has version 2; this specinfer reads 1"),
        ({"members": "removed"}, "has members None; allowed: a list of 1 to 16"),
        ({"members": []}, "has 0 members; allowed"),
        ({"members": [{"folder": f"m{n}", "kind": "ssm"} for n in range(17)]}, "has 17 members"),
        ({"members": {"folder": "a"}}, "has members {'folder': 'a'}; allowed"),
        ({"members": 1_000_000_000}, "has members 1000000000; allowed"),
        ({"members": ["member1"]}, "has a member 'member1'; expected an object"),
        ({"members": [{"folder": 3, "kind": "ssm"}]}, "has folder 3; expected a short text"),
        ({"members": [{"folder": "a"}]}, "has kind None; expected a short text"),
        ({"members": 2 * [{"folder": "a", "kind": "ssm"}]}, "lists a folder twice"),
        ({"fingerprint": "xyz"}, "has fingerprint 'xyz'; expected 64"),
        ({"fingerprint": 5}, "has fingerprint 5; expected a short text"),
        ({"target": "x" * 300}, "has target 'xxx"),
        ({"figures": [1]}, r"has figures \[1\]; expected an object"),
        ({"figures": {"a": "1"}}, "has 'a' '1'; expected a finite number"),
        ({"figures": {"a": float("nan")}}, "has 'a' nan; expected a finite number"),
        ({"figures": {"a": 10**400}}, "has 'a' 10+; expected a finite number"),
        ({"figures": {"a": -(10**400)}}, "has 'a' -10+; expected a finite number"),
        ({"figures": {"a": True}}, "has 'a' True; expected a finite number"),
    ],
)
def test_odd_values_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    changed(tmp_path, **changes)
    with pytest.raises(ModelFileError, match=words):
        read_pool(tmp_path)


@pytest.mark.parametrize("name", ["..", "../other", "/etc", "a/b", "", ".", "a\\b", "~", "a\0b", "x" * 65])
def test_members_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    changed(tmp_path, members=[{"folder": name, "kind": "ssm"}])
    with pytest.raises(ModelFileError, match=r"allowed: the name of a folder beside it"):
        read_pool(tmp_path)


def test_folders_that_are_no_members_are_refused(tmp_path: Path) -> None:
    pool, elsewhere = tmp_path / "pool", tmp_path / "elsewhere"
    pool.mkdir()
    elsewhere.mkdir()
    one = Pool("target", "0" * 64, (Member("member1", "ssm"),))
    with pytest.raises(ModelFileError, match=r"has no folder member1, which its pool\.json names"):
        member_folders(pool, one)
    (pool / "member1").symlink_to(elsewhere)
    with pytest.raises(ModelFileError, match="is a link to another place"):
        member_folders(pool, one)
    (pool / "member1").unlink()
    (pool / "member1").symlink_to(pool)  # a circle
    with pytest.raises(ModelFileError, match="is a link to another place"):
        member_folders(pool, one)
    (pool / "member1").unlink()
    (pool / "member1").mkdir()
    write_pool(pool / "member1", one)
    with pytest.raises(ModelFileError, match="is a pool; allowed: members that are heads"):
        member_folders(pool, one)
