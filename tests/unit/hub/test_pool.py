"""pool.json: written lists are read again, and other contents are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specinfer.errors import ModelFileError
from specinfer.hub.model_files import pool_members, write_pool


def test_a_written_pool_is_read(tmp_path: Path) -> None:
    assert pool_members(tmp_path) == pool_members(tmp_path / "missing") == []
    write_pool(tmp_path, ["member2", "member1"])
    for name in ("member1", "member2"):
        (tmp_path / name).mkdir()
    assert pool_members(tmp_path) == [tmp_path / "member2", tmp_path / "member1"]


def test_what_is_no_list_of_folders_beside_it_is_refused(tmp_path: Path) -> None:
    names = ["..", "../other", "/etc", "a/b", "", ".", "a\\b", "~", "a\0b", "x" * 65]
    values = [*([name] for name in names), [], [f"m{n}" for n in range(17)], {"members": ["a"]}, 7, None]
    values += [[3], [["a"]], ["a", "a"], "member1"]
    texts = [*map(json.dumps, values), "", "[", 100_000 * "[", json.dumps(["a"]) + (1 << 16) * " " + "]"]
    for text in texts:
        (tmp_path / "pool.json").write_text(text)
        with pytest.raises(ModelFileError, match=r"is no list of drafts; allowed: 1 to 16 different names"):
            pytest.fail(f"{text[:40]!r} is read as {pool_members(tmp_path)}")


def test_folders_that_are_no_members_are_refused(tmp_path: Path) -> None:
    pool, elsewhere = tmp_path / "pool", tmp_path / "elsewhere"
    pool.mkdir()
    elsewhere.mkdir()
    write_pool(pool, ["member1"])
    with pytest.raises(ModelFileError, match=r"has no folder member1, which its pool\.json names"):
        pool_members(pool)
    for place in (elsewhere, pool):  # the second is a circle
        (pool / "member1").symlink_to(place)
        with pytest.raises(ModelFileError, match="is a link to another place"):
            pool_members(pool)
        (pool / "member1").unlink()
    (pool / "member1").mkdir()
    write_pool(pool / "member1", ["member1"])
    with pytest.raises(ModelFileError, match="is a pool; allowed: members that are heads"):
        pool_members(pool)
