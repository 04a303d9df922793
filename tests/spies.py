"""Notes of the calls of a function, which go on to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def spied(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., Any]) -> list[Any]:
    """Return a list that gets `note` of the arguments of each call, until `patch` is undone."""
    real, noted = getattr(owner, name), list[Any]()

    def spy(*given: Any, **named: Any) -> Any:
        noted.append(note(*given, **named))
        return real(*given, **named)

    patch.setattr(owner, name, spy)
    return noted
