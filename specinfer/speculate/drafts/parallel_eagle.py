"""An EAGLE head that guesses all levels of a tree in one pass (P-EAGLE).

Behind the last row of a text, which is the root's, stand rows of mask tokens, one for each level below the
first, at the positions of the tokens that they stand for. They are overwritten in every step. For the rest it
is an EAGLE head (eagle.py), and its trees are those of one pass (one_pass.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specinfer.plan import PlanEntry
from specinfer.request import Request
from specinfer.runtime.head_runner import EagleRunner, HeadRows
from specinfer.speculate.drafts.draft_vocabulary import DraftVocabulary
from specinfer.speculate.drafts.eagle import EagleDraft
from specinfer.speculate.drafts.growth import Growth, Guessed, Shape, trees_first
from specinfer.speculate.drafts.one_pass import OnePassTrees
from specinfer.tree import TokenTree


class ParallelEagleDraft(EagleDraft):
    """A level speculator whose trees are whole after their first level."""

    def __init__(
        self,
        name: str,
        runner: EagleRunner,
        shape: Shape,
        *,
        taps: tuple[int, ...],
        max_rows: int,
        vocabulary: DraftVocabulary | None = None,
    ) -> None:
        """As EagleDraft; the head has a mask token."""
        super().__init__(name, runner, shape, taps=taps, max_rows=max_rows, vocabulary=vocabulary)
        self._model = runner.model
        self._run, self._logits = runner.run, runner.logits
        self._trees = OnePassTrees.of(name, runner.model, shape, vocabulary)

    def most_nodes(self, request: Request) -> int:
        """A full tree of the request's expansion, or the most that is grown of any."""
        return self._trees.most_nodes(request)

    def see_choices(self, guessed: Sequence[TokenTree], chosen: Sequence[TokenTree]) -> None:
        """Guess about as much as is verified."""
        self._trees.see_choices(guessed, chosen)

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Read these entries' texts, and grow the whole tree of each that has one; none has room for more."""
        parts: list[HeadRows] = []
        features: list[Tensor] = []
        guessed: list[Guessed] = []
        left, first = self._max_rows, 0
        for i in trees_first([grown.growth for grown in self._grown], below):
            read = self._read(self._grown[i], left)
            if read is None:
                continue
            rows, feature_TD = read
            left -= len(rows.rows.token_ids)
            growth = self._grown[i].growth
            if growth.started:
                levels = growth.limit
                rows = self._with_masks(rows, levels - 1)
                feature_TD = torch.cat((feature_TD, self._model.masked(levels - 1)))
                guessed.append(self._trees.guessed(growth, first, levels))
                first += levels
            parts.append(rows)
            features.append(feature_TD)
        if parts:
            read_RD, _ = self._run(parts, torch.cat(features))
            if guessed:
                self._trees.grow(guessed, read_RD, self._logits(read_RD))
        return {}

    def _with_masks(self, rows: HeadRows, count: int) -> HeadRows:
        """A text's rows, and so many of mask tokens behind them, which want logits as its last one does."""
        mask, text = self._model.head.mask_token_id, rows.rows
        assert mask is not None
        return HeadRows(replace(text, token_ids=[*text.token_ids, *[mask] * count]), rows.shift)

    def _growth(self, entry: PlanEntry) -> Growth:
        # The root's row and those of masks lie in the blocks that its tree may fill.
        return Growth.of(entry, self.name, min(entry.max_depth, self._model.head.depth, entry.max_nodes))
