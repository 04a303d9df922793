"""The answer file of a batch, and its use by a later run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from specinfer.errors import UserError
from specinfer.serve.batch_run import BatchAnswers

GOOD = {"status_code": 200, "request_id": "r", "body": {"text": "hi"}}
RESPONSE = {"code": "c", "message": "m"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def fill(path: Path) -> None:
    with BatchAnswers(path) as answers:
        answers.add("a", line=1, response=GOOD)
        answers.add("b", line=2, response=GOOD | {"status_code": 400}, error=RESPONSE)
        answers.add(None, line=3, error=RESPONSE)


def test_answers_are_lines_in_openais_shape(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    fill(path)
    found = lines(path)
    assert all(record.pop("id").startswith("batch_req_") for record in found)
    assert found == [
        {"custom_id": "a", "response": GOOD, "error": None},
        {"custom_id": "b", "response": GOOD | {"status_code": 400}, "error": RESPONSE | {"line": 2}},
        {"custom_id": None, "response": None, "error": RESPONSE | {"line": 3}},
    ]


def test_existing_answers_are_read_and_a_line_that_broke_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    fill(path)
    with BatchAnswers(path) as answers:  # the error without a name is found again
        assert (answers.names, len(answers), answers.refused) == ({"a", "b"}, 2, 1)
    whole = path.read_bytes()
    first = whole.splitlines(keepends=True)[0]
    for kept in (0, 1, 10, 18, 40, -1):
        path.write_bytes(whole + first[:kept])
        file = path.stat().st_ino
        with BatchAnswers(path) as answers:
            assert answers.names == {"a", "b"}, kept
            assert path.stat().st_ino == file, "it is cut in place, as the disk may be full"
            assert path.read_bytes() == whole, kept
            answers.add("c", line=4, response=GOOD)
        assert path.read_bytes().startswith(whole), kept
        assert [record["custom_id"] for record in lines(path)] == ["a", "b", "c"], kept


def test_failed_requests_are_repeated(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchAnswers(path) as answers:
        answers.add("a", line=1, response=GOOD | {"status_code": 500}, error=RESPONSE)
        answers.add("b", line=2, response=GOOD)
        answers.add("c", line=3, response=GOOD | {"status_code": 429}, error=RESPONSE)
        answers.add(None, line=4, error=RESPONSE)
    os.chmod(path, 0o640)
    with BatchAnswers(path) as answers:
        assert (answers.names, answers.refused) == ({"b"}, 0)
        answers.add("a", line=1, response=GOOD)
    assert [record["custom_id"] for record in lines(path)] == ["b", "a"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_of_another_kind_is_unchanged(tmp_path: Path) -> None:
    path, number = tmp_path / "out.jsonl", '{"custom_id": 3, "response": null, "error": null}\n'
    for text in ("a poem\n", "{}\n", number, "a poem", "[" * 10_000 + "\n"):
        path.write_text(text)
        with pytest.raises(UserError, match=r"line 1 of .* is not the answer of a batch"):
            pytest.fail(f"{text[:50]!r} is read as {BatchAnswers(path)}")
        assert path.read_text() == text, text[:50]


def test_a_device_is_no_file_to_go_on_from() -> None:
    with pytest.raises(UserError, match="/dev/zero is not a regular file"):
        BatchAnswers(Path("/dev/zero"))


def test_two_runs_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with BatchAnswers(path), pytest.raises(UserError, match="another run has"):
        BatchAnswers(path)
    with BatchAnswers(path):
        pass
