"""ChangingText: finds a text that changes in every prompt, before tokens that do not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from specinfer.engine.prefix_index import common_length

_PLACES: Final = 64  # beginnings of prompts that are watched, the least recently seen leaves
_WINDOW: Final = 256  # tokens that are compared
_CHANGED: Final = 32  # maximum tokens of the changing text
_ALIKE: Final = 64  # tokens behind it that do not change
_IN_A_ROW: Final = 3


class ChangingText:
    """Watches prompts that part from an earlier one, such as those with a date in a system prompt."""

    def __init__(self) -> None:
        # Hash of the text before -> the last prompt's tokens there, and the changes in a row.
        self._seen: OrderedDict[bytes, tuple[Sequence[int], int]] = OrderedDict()

    def see(self, before: bytes, token_ids: Sequence[int]) -> bool:
        """Return whether, for the third time in a row, only a short text changed between two prompts.

        `token_ids` follow the text with hash `before`, within which the prompt does not part from others.
        """
        tokens = tuple(token_ids[:_WINDOW])
        last, changes = self._seen.pop(before, ((), 0))
        changes = changes + 1 if _changed_briefly(last, tokens) else 0
        self._seen[before] = tokens, changes
        if len(self._seen) > _PLACES:
            self._seen.popitem(last=False)
        return changes == _IN_A_ROW


def _changed_briefly(a: Sequence[int], b: Sequence[int]) -> bool:
    """Return whether two texts differ in a short part, and are alike behind it."""
    first = common_length(a, b)
    ends = {a[at : at + _ALIKE] for at in range(first, min(first + _CHANGED, len(a) - _ALIKE) + 1)}
    return first < min(len(a), len(b)) and any(
        b[at : at + _ALIKE] in ends for at in range(first, min(first + _CHANGED, len(b) - _ALIKE) + 1)
    )
