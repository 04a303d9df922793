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
    decided: bool = True  # False: too little was seen to say

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        known = {"name": self.name, "passed": self.passed, "decided": self.decided, "words": self.words}
        return {**known, **self.details}

    def __str__(self) -> str:
        mark = "pass" if self.passed else "FAIL" if self.decided else "open"
        return f"{mark}  {self.name}: {self.words}"
