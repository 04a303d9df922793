"""A speculator that guesses nothing and keeps all it hears: the target's hidden states of whole texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specinfer.plan import StepPlan
from specinfer.runtime.features import TextFeatures
from specinfer.speculate.speculator import Speculator
from specinfer.tree import TokenTree
from specinfer.tree.token_tree import single_node


class Listener(Speculator):
    """Keeps the hidden states of each text, from its first token on, until they are taken."""

    name = "listener"

    def __init__(self, taps: tuple[int, ...]) -> None:
        """`taps` are the layers whose inputs are kept."""
        self.taps = taps
        self._heard: dict[str, list[Tensor]] = {}  # by request: parts [T, N, D] of its text
        self._ends: dict[str, int] = {}  # where these end

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """Trees without guesses."""
        return [single_node(entry.token_ids[entry.end - 1]) for entry in plan.tree_entries]

    def hear(self, texts: Sequence[TextFeatures]) -> None:
        """Keep these states; where a text begins anew, its old ones are dropped."""
        for features in texts:
            name = features.entry.request.request_id
            if features.start == 0:
                self._heard[name] = []
            elif self._ends.get(name) != features.start:
                continue  # its beginning was not heard: there is nothing to be had of it
            self._heard[name].append(features.states.copied())
            self._ends[name] = features.end

    def take(self, request_id: str) -> Tensor | None:
        """What was heard of a text, [T, N, D], which is forgotten with this; None: nothing."""
        parts = self._heard.pop(request_id, None)
        self._ends.pop(request_id, None)
        return torch.cat(parts) if parts else None
