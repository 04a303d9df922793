"""What a check found: a verdict per promise, in words and in figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one promise held."""

    name: str
    passed: bool
    words: str  # what was seen, for a person
    details: dict[str, Any] = field(default_factory=dict)  # plain JSON values

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"name": self.name, "passed": self.passed, "words": self.words, **self.details}

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}  {self.name}: {self.words}"
