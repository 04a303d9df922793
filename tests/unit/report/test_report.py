"""Prompt files, accepted or refused with file and line; and the provenance of results."""

import json
import re
from pathlib import Path

import pytest

from specinfer.errors import DatasetError
from specinfer.report import provenance
from specinfer.report.dataset import Conversation, built_in, read_dataset
from specinfer.version import VERSION


def write(folder: Path, *lines: str | bytes) -> Path:
    path = folder / "prompts.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return path


def test_prompts_turns_names_and_other_keys(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '\ufeff{"prompt": "one", "answer": 1}',
        "",
        '{"question_id": 81, "category": "writing", "turns": ["two", "and then?"]}\r',
        '{"id": "x-3", "prompt": "three", "reference": "3"}',
        '{"prompt": "four", "reference": ["4", "IV"]}',
    )
    dataset = read_dataset(path)
    assert dataset.conversations == (
        Conversation(("one",), "1"),
        Conversation(("two", "and then?"), "81"),
        Conversation(("three",), "x-3", "3"),
        Conversation(("four",), "5"),
    )
    assert (dataset.num_turns, dataset.head(2).num_turns, dataset.head(None)) == (5, 3, dataset)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{'prompt': 1}", r"line 2: not JSON \(Expecting property name.* at column 2\)"),
        ('["a"]', "line 2: got a list; each line must be an object"),
        ("3", "line 2: got a number; each line"),
        ('{"text": "a", "id": 3}', "line 2: got the keys 'text', 'id'; each line"),
        ("{}", r"line 2: got the keys \(none\)"),
        ('{"prompt": "a", "turns": ["a"]}', "line 2: got both prompt and turns"),
        ('{"prompt": null}', "line 2: prompt is null; allowed: a string that is not empty"),
        ('{"prompt": " "}', "line 2: prompt is empty"),
        ('{"turns": "a"}', "line 2: turns is a string; allowed: a list of strings"),
        ('{"turns": []}', "line 2: turns is an empty list"),
        ('{"turns": ["a", 2]}', "line 2: a turn is a number"),
        (b'{"prompt": "caf\xe9"}', "line 2: not UTF-8 at byte 16; save the file as UTF-8"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path: Path, line: str | bytes, says: str) -> None:
    path = write(tmp_path, '{"prompt": "fine"}', line)
    with pytest.raises(DatasetError, match=f"prompts.jsonl {says}"):
        read_dataset(path)


def test_files_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="holds no prompts"):
        read_dataset(write(tmp_path, "", "  "))
    with pytest.raises(DatasetError, match=r"cannot read .*nothing\.jsonl: No such file"):
        read_dataset(tmp_path / "nothing.jsonl")
    with pytest.raises(DatasetError, match=r"cannot read .*: Is a directory"):
        read_dataset(tmp_path)
    with pytest.raises(DatasetError, match="limit is 0; allowed: an integer >= 1"):
        built_in().head(0)


def test_it_names_versions_hardware_and_date() -> None:
    facts = provenance.provenance()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["versions"]["specinfer"] == VERSION
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", facts["date"])
    assert facts["hardware"]["cpu"].strip()
    assert facts["hardware"]["cores"] >= 1
    assert facts["commit"] is None or re.fullmatch(r"[0-9a-f]{12}\+?", facts["commit"])
