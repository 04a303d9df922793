"""How sure a guess is that followed earlier, by how long the match before it is."""

from __future__ import annotations

from typing import Final

SUREST_MATCH: Final = 16  # tokens; more make a guess no surer


def match_confidence(tokens: int) -> float:
    """How sure to be of a token that followed before, where the last `tokens` tokens were the same."""
    return 1 - 0.5 ** min(tokens, SUREST_MATCH)
