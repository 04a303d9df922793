"""Trees whose levels are all guessed by one pass of a head.

What each level guesses depends on the token before it by the Markov term alone, if there is one. So point
masses and coupled draws are grown best first (best_first.py). Samples, requests with a shape of their own and
those whose processors or filters look at whole rows are drawn level by level as a draft model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from specinfer.heads.block_model import BlockModel
from specinfer.heads.load import HeadModel
from specinfer.request import Request
from specinfer.runtime.flight import HostFlight
from specinfer.runtime.inference import inference
from specinfer.speculate.drafts.best_first import MOST_NODES
from specinfer.speculate.drafts.draft_vocabulary import DraftVocabulary
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.growth import Growth, Guessed, Shape
from specinfer.speculate.drafts.native_trees import NativeTrees
from specinfer.speculate.drafts.plain_trees import PlainTrees
from specinfer.tree import TokenTree
from specinfer.tree.draw import as_runs

_FEWEST_NODES: Final = 8  # that are grown, whatever is wanted of them


class BestFirstTrees(Protocol):
    """How best-first trees are grown: by native_trees.py with native kernels, else by plain_trees.py."""

    def grow(self, guessed: Sequence[Guessed], read_TD: Tensor, logits_TU: Tensor, most: int) -> None:
        """Grow these trees, of `most` nodes, MOST_NODES at most, and as many as there is room for.

        `read_TD` is what the output layer read of all rows that guess, `logits_TU` what it made of it; both
        are contiguous.
        """
        ...


class LevelDraws(Protocol):
    """How trees that are not grown best first get their levels."""

    def draw(
        self, sites: Sequence[Site], rows: Sequence[int], before: Sequence[int], logits_TU: Tensor
    ) -> None:
        """Add the children of every site, site i by row rows[i] of the logits, behind the token before[i]."""
        ...


class PassLevels:
    """A `LevelDraws` of a head's own logits."""

    def __init__(self, name: str, model: HeadModel, vocabulary: DraftVocabulary | None) -> None:
        self._name = name
        self._scan = model.kernels.scan
        self._block = model if isinstance(model, BlockModel) else None
        self._vocabulary = vocabulary

    def draw(
        self, sites: Sequence[Site], rows: Sequence[int], before: Sequence[int], logits_TU: Tensor
    ) -> None:
        """As LevelDraws says."""
        made_RU = logits_TU.index_select(0, torch.tensor(rows, device=logits_TU.device)).float()
        if self._block is not None and self._block.markov_UM is not None:
            made_RU += self._block.pair_logits(self._block.before(before))
        flight = HostFlight(made_RU, lambda logits: logits, made_RU.shape[1], self._scan)
        draw_children(flight, sites, self._name, self._vocabulary)


def best_first_trees(name: str, model: HeadModel, vocabulary: DraftVocabulary | None) -> BestFirstTrees:
    """The quickest there are for a head on this machine."""
    return NativeTrees.of(name, model, vocabulary) or PlainTrees(name, model, vocabulary)


class OnePassTrees:
    """Grows trees from what the output layer of a head reads of all their levels."""

    def __init__(self, name: str, shape: Shape, best_first: BestFirstTrees, by_level: LevelDraws) -> None:
        """`shape` is of trees not grown best first."""
        self._name = name
        self._shape = shape._replace(learned=False)  # what is drawn by levels has a shape
        self._most = MOST_NODES  # of a tree grown best first, as many as somebody may want
        self._best_first = best_first
        self._by_level = by_level

    @classmethod
    def of(
        cls, name: str, model: HeadModel, shape: Shape, vocabulary: DraftVocabulary | None
    ) -> OnePassTrees:
        """Those of a head; `vocabulary` is that of its logits (None: all)."""
        best_first = best_first_trees(name, model, vocabulary)
        return cls(name, shape, best_first, PassLevels(name, model, vocabulary))

    def most_nodes(self, request: Request) -> int:
        """A full tree of the request's expansion, or the most that is grown of any."""
        own = request.params.speculation.expansion
        return max(MOST_NODES, self._shape.expansion.num_nodes - 1) if own is None else own.num_nodes - 1

    def guessed(self, growth: Growth, first: int, levels: int) -> Guessed:
        """A tree that is about to grow out of the pass's rows first..first+levels-1 of all that guess."""
        growth.limit = min(growth.limit, levels)
        (root,) = growth.sites(self._shape)
        return Guessed(growth, first, growth.limit, root)

    def see_choices(self, guessed: Sequence[TokenTree], chosen: Sequence[TokenTree]) -> None:
        """Grow as many nodes as before, twice as many, or a half, by how many of them are verified.

        Of the trees of all: twice as many where one of that size is kept whole, a half where none needs more
        than a third.
        """
        kept = grown = 0
        whole = False
        for tree, part in zip(guessed, chosen, strict=True):
            there, here = (as_runs(t.draws).drawn_by(self._name) for t in (tree, part))
            grown, kept = max(grown, there), max(kept, here)
            whole = whole or there == here >= self._most
        if whole:
            self._most = min(MOST_NODES, 2 * self._most)
        elif grown and 3 * kept < self._most:
            self._most = max(_FEWEST_NODES, self._most // 2)

    @inference
    def grow(self, guessed: Sequence[Guessed], read_TD: Tensor, logits_TU: Tensor) -> None:
        """Grow all trees, each to its end, from what the output layer reads of levels, and its logits."""
        by_level: list[Guessed] = []
        best_first: list[Guessed] = []
        for one in guessed:
            if _is_best_first(one.growth, one.site):
                best_first.append(one)
            else:
                one.growth.limit = min(one.growth.limit, self._shape.depth(one.growth.entry.request))
                by_level.append(one)
        if best_first:
            self._best_first.grow(best_first, read_TD, logits_TU, self._most)
        while by_level:
            by_level = self._grow_a_level(by_level, logits_TU)

    def _grow_a_level(self, guessed: Sequence[Guessed], logits_TU: Tensor) -> list[Guessed]:
        """Draw one more level of these trees; those that have room for another."""
        rows: list[int] = []
        before: list[int] = []
        sites: list[Site] = []
        for one in guessed:
            growth = one.growth
            rows.extend([one.first + growth.depth] * len(growth.frontier))
            before.extend(growth.builder.token_ids[node] for node in growth.frontier)
            sites.extend(growth.sites(self._shape))
        self._by_level.draw(sites, rows, before, logits_TU)
        goes_on = list[Guessed]()
        for one in guessed:
            one.growth.descend()
            if ends := one.growth.ends:
                one.growth.choose(ends)
                goes_on.append(one)
        return goes_on


def _is_best_first(growth: Growth, root: Site) -> bool:
    """Whether a tree is grown best first; else it is drawn level by level."""
    return bool(root.candidates) and growth.entry.request.params.speculation.expansion is None
