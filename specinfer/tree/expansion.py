"""Expansion plans <k1,...,km>: at step i every frontier node gets k_i children (SpecInfer, section 3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specinfer.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Expansion:
    """The shape of a tree grown breadth first; raises ConfigError unless every width is an integer >= 1."""

    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        ok = self.widths and all(type(k) is int and 1 <= k <= 64 for k in self.widths)
        if not ok or len(self.widths) > 64:
            raise ConfigError(
                f"expansion is {','.join(map(str, self.widths))!r}; allowed: 1 to 64 integers from 1 to 64, "
                "for example 1,1,3,1,1"
            )

    @classmethod
    def of(cls, value: object) -> Expansion:
        """Return a plan given as a plan, as text or as widths; raises ConfigError for other values."""
        if isinstance(value, Expansion):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        if isinstance(value, Iterable):
            return cls(tuple(value))
        raise ConfigError(f"expansion is {value!r}; allowed: integers >= 1, for example 1,1,3,1,1")

    @classmethod
    def parse(cls, text: str) -> Expansion:
        """Return the plan written as '1,1,3'; raises ConfigError for other text."""
        try:
            widths = tuple(int(part) for part in text.strip("<> ").split(","))
        except ValueError:
            raise ConfigError(
                f"expansion is {text!r}; allowed: integers >= 1 with commas between, for example 1,1,3,1,1"
            ) from None
        return cls(widths)

    @property
    def depth(self) -> int:
        """The number of levels below the root."""
        return len(self.widths)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of a full tree, the root included."""
        total, level = 1, 1
        for width in self.widths:
            level *= width
            total += level
        return total

    def __str__(self) -> str:
        return ",".join(map(str, self.widths))
