"""How loud guesses should be: a norm in front of an output layer it has not learnt with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from specinfer.tune.draft import Draft

_LOUDNESSES: Final = (1.0, 0.7, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05)


def tune_loudness(draft: Draft, loss: Callable[[Draft], float]) -> float:
    """Multiply the last norm by what makes the loss least, of a few values; the loss."""
    norm = draft.last_norm
    whole_D = norm.weight.detach().clone()
    found: list[tuple[float, float]] = []
    with torch.no_grad():
        for loudness in _LOUDNESSES:
            norm.weight.copy_(whole_D * loudness)
            found.append((loss(draft), loudness))
        least, best = min(found)
        norm.weight.copy_(whole_D * best)
    return least
