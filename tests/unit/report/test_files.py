"""Reports in files: refused before the work, whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specinfer.errors import ConfigError
from specinfer.report.files import check_writable, write_json


def test_a_json_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"speedup": 2})
    with pytest.raises(TypeError):
        write_json(path, {"speedup": 3, "bad": object()})
    assert json.loads(path.read_text()) == {"speedup": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_a_file_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere; make it first"):
        check_writable(tmp_path / "nowhere" / "out.json")
    with pytest.raises(ConfigError, match="it is a folder; give a file"):
        check_writable(tmp_path)
    check_writable(tmp_path / "out.json")
