"""Data sets of prompts: JSON lines, one conversation each.

    {"prompt": "..."}                          one question
    {"turns": ["...", "..."]}                  Spec-Bench: each turn follows the model's own answer

Optional keys are `question_id` (or `id`) and `reference`, a known answer. Other keys are ignored.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Self, TypeVar

from specinfer.errors import DatasetError

Row = TypeVar("Row")
_ROW = 'each line must be an object with "prompt" (a string) or "turns" (a list of strings)'


@dataclass(frozen=True, slots=True)
class Conversation:
    """The user's turns of a conversation."""

    turns: tuple[str, ...]
    name: str = ""  # question_id, or the line number
    reference: str | None = None  # a known answer; lists of answers are ignored


@dataclass(frozen=True, slots=True)
class Dataset:
    """Distinct conversations, in the order of the file."""

    name: str
    conversations: tuple[Conversation, ...]
    duplicates: int  # rows dropped because their turns equal an earlier row's

    @property
    def num_turns(self) -> int:
        """Number of turns of all conversations, which is the number of requests of a run."""
        return sum(len(c.turns) for c in self.conversations)

    def head(self, limit: int | None) -> Self:
        """Return the first `limit` conversations, or all if None. Raises DatasetError unless it is at least
        1.
        """
        if limit is not None and limit < 1:
            raise DatasetError(f"limit is {limit}; allowed: an integer >= 1")
        return replace(self, conversations=self.conversations[:limit])


def built_in() -> Dataset:
    """Return specinfer's own prompts: questions, code, mathematics, rewriting, summaries and lists."""
    return replace(read_dataset(Path(str(files("specinfer"))) / "data" / "prompts.jsonl"), name="built-in")


def read_dataset(path: Path) -> Dataset:
    """Read the conversations of a JSON lines file; skip blank lines and repeated conversations.

    Raises DatasetError, with file and line, for an invalid row and for a file without rows.
    """
    rows, faults = read_rows(path, conversation_of)
    if faults:
        raise DatasetError(faults[0])
    if not rows:
        raise DatasetError(f"{path} holds no prompts; {_ROW}")
    distinct: dict[tuple[str, ...], Conversation] = {}
    for conversation in rows:
        distinct.setdefault(conversation.turns, conversation)
    return Dataset(str(path), tuple(distinct.values()), len(rows) - len(distinct))


def read_rows(path: Path, row: Callable[[bytes, int, str], Row]) -> tuple[list[Row], list[str]]:
    """Convert each nonblank line of a file with `row`; return the results and the error messages.

    `row` gets a line, its number and its location for error messages. DatasetErrors of `row` are collected.
    Raises DatasetError if the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"cannot read the data set {path}: {error.strerror}") from None
    rows: list[Row] = []
    faults: list[str] = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            if line.strip():
                rows.append(row(line, number, f"{path} line {number}"))
        except DatasetError as error:
            faults.append(str(error))
    return rows, faults


def json_object(line: bytes, where: str, expected: str) -> dict[str, Any]:
    """Parse a line as a JSON object; raises DatasetError, with `expected` as the allowed form."""
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
    """Parse a line as a conversation; raises DatasetError."""
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
    return Conversation(tuple(turns), str(identity), reference)


def _keys(row: Iterable[str]) -> str:
    return ", ".join(repr(key) for key in list(row)[:6]) or "(none)"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    if isinstance(value, list) and not value:
        return "an empty list"
    return names.get(type(value), "a number")
