"""Code edits: files and the changes that are asked for, from code_edits.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Edit:
    """A file and the requested change."""

    file: str
    source: str
    ask: str

    @property
    def prompt(self) -> str:
        """The question with the file."""
        return (
            f"{self.ask}\n\nThis is {self.file}:\n\n```\n{self.source}```\n\n"
            "Answer with the whole changed file and nothing else."
        )


def read_edits() -> list[Edit]:
    """Return all edits, in file order."""
    text = Path(__file__).with_name("code_edits.toml").read_text(encoding="utf-8")
    return [Edit(**item) for item in tomllib.loads(text)["edit"]]
