"""Numbers from a file, each within its bounds or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def real(value: object, least: float, most: float) -> float:
    """A number between `least` and `most`; raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r:.40} stands where a number from {least:g} to {most:g} should")
    if not least <= value <= most or not math.isfinite(value):
        raise ValueError(f"{value!r:.40} stands where {least:g} to {most:g} is allowed")
    return float(value)


def whole(value: object, least: int, most: int) -> int:
    """An integer between `least` and `most`; raises ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{value!r:.40} stands where an integer from {least} to {most} should")
    return value


def name(value: object) -> str:
    """The name of a speculator; raises ValueError for anything else."""
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        raise ValueError(f"{value!r:.40} stands where a speculator's name should")
    return value


def mapping(value: object) -> Mapping[str, Any]:
    """An object of JSON; raises ValueError for anything else."""
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.40} stands where an object should")
    return value


def row(value: object, length: int) -> Sequence[Any]:
    """A list of so many values; raises ValueError for anything else."""
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{value!r:.40} stands where a list of {length} should")
    return value


def rows(value: object, most: int) -> Sequence[Any]:
    """A list of at most so many values; raises ValueError for anything else."""
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{value!r:.40} stands where a list of at most {most} should")
    return value
