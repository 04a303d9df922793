"""Prompts to measure with: JSON lines, one conversation each.

    {"prompt": "..."}                          one question
    {"turns": ["...", "..."]}                  Spec-Bench: each turn follows the model's own answer

`category`, `question_id` (or `id`) and `reference`, an answer that is known, may stand beside them; other
keys are not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from specinfer.errors import DatasetError

Row = TypeVar("Row")
_ROW = 'each line must be an object with "prompt" (a string) or "turns" (a list of strings)'


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a user says, turn by turn."""

    turns: tuple[str, ...]
    category: str = ""
    name: str = ""  # question_id, or the line number
    reference: str | None = None  # an answer that is known; a list of them is not read


@dataclass(frozen=True, slots=True)
class Dataset:
    """Distinct conversations, in the order of the file."""

    name: str
    conversations: tuple[Conversation, ...]
    duplicates: int  # rows dropped because an earlier one asks the same

    @property
    def num_turns(self) -> int:
        """All turns of all conversations: the requests a run consists of."""
        return sum(len(c.turns) for c in self.conversations)

    def head(self, limit: int | None) -> Dataset:
        """The first `limit` conversations; None for all. Raises DatasetError unless it is at least 1."""
        if limit is not None and limit < 1:
            raise DatasetError(f"limit is {limit}; allowed: an integer >= 1")
        return Dataset(self.name, self.conversations[:limit], self.duplicates)


def built_in() -> Dataset:
    """The prompts that come with specinfer: questions, code, mathematics, rewriting, summaries, lists."""
    source = files("specinfer") / "data" / "prompts.jsonl"
    return _parse("built-in", source.read_bytes())


def read_dataset(path: Path) -> Dataset:
    """The conversations in a file of JSON lines; blank lines and repeated conversations are left out.

    Raises DatasetError, with file and line, for a row that cannot be read, and for a file without any.
    """
    return _parse(str(path), _bytes(path))


def read_rows(path: Path, row: Callable[[bytes, int, str], Row]) -> tuple[list[Row], list[str]]:
    """What `row` makes of each line of a file that is not blank, and what is wrong with the others.

    `row` is given a line, its number, and where that is, for its errors. Raises DatasetError where the file
    cannot be read; those that `row` raises are collected.
    """
    rows: list[Row] = []
    faults: list[str] = []
    for number, line in _lines(_bytes(path)):
        try:
            rows.append(row(line, number, f"{path} line {number}"))
        except DatasetError as error:
            faults.append(str(error))
    return rows, faults


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DatasetError(f"cannot read the data set {path}: {error.strerror}") from None


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The lines that are not blank, each with its number."""
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            yield number, line


def _parse(name: str, data: bytes) -> Dataset:
    conversations: dict[tuple[str, ...], Conversation] = {}
    rows = 0
    for number, line in _lines(data):
        rows += 1
        conversation = conversation_of(line, number, f"{name} line {number}")
        conversations.setdefault(conversation.turns, conversation)
    if not rows:
        raise DatasetError(f"{name} holds no prompts; {_ROW}")
    return Dataset(name, tuple(conversations.values()), rows - len(conversations))


def json_object(line: bytes, where: str, expected: str) -> dict[str, Any]:
    """The JSON object that a line holds; raises DatasetError, saying what was `expected`."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{where}: not UTF-8 at byte {error.start + 1}; save the file as UTF-8") from None
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: not JSON ({error.msg} at column {error.colno}); {expected}") from None
    if not isinstance(row, dict):
        raise DatasetError(f"{where}: got {_kind(row)}; {expected}")
    return row


def conversation_of(line: bytes, number: int, where: str) -> Conversation:
    """The conversation that a line holds; raises DatasetError."""
    row = json_object(line, where, _ROW)
    if ("prompt" in row) == ("turns" in row):
        got = "both prompt and turns" if "prompt" in row else f"the keys {_keys(row)}"
        raise DatasetError(f"{where}: got {got}; {_ROW}")
    if "prompt" in row:
        turns = [row["prompt"]]
    elif isinstance(row["turns"], list) and row["turns"]:
        turns = row["turns"]
    else:
        raise DatasetError(f"{where}: turns is {_kind(row['turns'])}; allowed: a list of strings, not empty")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            key = "prompt" if "prompt" in row else "a turn"
            got = "empty" if isinstance(turn, str) else _kind(turn)
            raise DatasetError(f"{where}: {key} is {got}; allowed: a string that is not empty")
    identity = row.get("question_id", row.get("id", number))
    reference = row["reference"] if isinstance(row.get("reference"), str) else None
    return Conversation(tuple(turns), str(row.get("category", "")), str(identity), reference)


def _keys(row: Iterable[str]) -> str:
    return ", ".join(repr(key) for key in list(row)[:6]) or "(none)"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    if isinstance(value, list) and not value:
        return "an empty list"
    return names.get(type(value), "a number")
