"""Trees whose levels are all guessed by one pass of a head.

What each level guesses depends on the token before it by the Markov term alone, if there is one. So point
masses and coupled draws are grown best first, where there are native kernels (best_first.py). Without these
all trees are drawn level by level as a draft model's. So are samples, requests with a shape of their own, and
those whose processors or filters look at whole rows, everywhere.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self

import torch
from torch import Tensor

from specinfer.heads.kinds import AnyHeadModel
from specinfer.heads.runner import HeadPass, HeadRunner
from specinfer.plan import PlanEntry
from specinfer.request import Request
from specinfer.runtime.flight import HostFlight, inference
from specinfer.speculate.drafts.best_first import MOST_NODES, NativeTrees
from specinfer.speculate.drafts.draft import Draft
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.growth import Growth, GuessedTree, Shape, trees_first
from specinfer.tree import TokenTree
from specinfer.tree.draw import as_runs

_FEWEST_NODES: Final = 8  # that are grown, whatever is wanted of them


# Grows trees of so many nodes, MOST_NODES at most, and as many as there is room for, of the logits of all
# rows that guess, which are contiguous.
GrowTrees = Callable[[Sequence[GuessedTree], Tensor, int], None]
# Adds the children of every site, site i by row rows[i] of all logits, behind the token before[i].
DrawLevel = Callable[[Sequence[Site], Sequence[int], Sequence[int], Tensor], None]


def grow_best_first(name: str, model: AnyHeadModel, vocabulary: DraftVocabulary | None) -> GrowTrees | None:
    """How a head's best-first trees are grown: by the library; None where its kernels are not native."""
    native = NativeTrees.of(name, model, vocabulary)
    return None if native is None else native.grow


def level_drawer(name: str, model: AnyHeadModel, vocabulary: DraftVocabulary | None) -> DrawLevel:
    """How a level is drawn from a head's logits."""

    def draw_level(
        sites: Sequence[Site], rows: Sequence[int], before: Sequence[int], logits_TU: Tensor
    ) -> None:
        made_RU = logits_TU.index_select(0, torch.tensor(rows, device=logits_TU.device)).float()
        if model.markov is not None:
            made_RU += model.markov.logits(model.markov.before(before))
        flight = HostFlight(made_RU, lambda logits: logits, made_RU.shape[1], model.kernels.scan)
        draw_children(flight, sites, name, vocabulary)

    return draw_level


class OnePassTrees:
    """Grows trees from the logits of all their levels."""

    def __init__(
        self, name: str, shape: Shape, grow_best_first: GrowTrees | None, draw_level: DrawLevel
    ) -> None:
        """`shape` is of trees not grown best first, which are all of them where `grow_best_first` is None."""
        self._name = name
        self.shape = shape._replace(learned=False)  # what is drawn by levels has a shape
        self._most = MOST_NODES  # of a tree grown best first, as many as somebody may want
        self._grow_best_first = grow_best_first
        self._draw_level = draw_level

    @classmethod
    def of(
        cls, name: str, model: AnyHeadModel, shape: Shape, vocabulary: DraftVocabulary | None
    ) -> OnePassTrees:
        """Those of a head; `vocabulary` is that of its logits (None: all)."""
        return cls(
            name, shape, grow_best_first(name, model, vocabulary), level_drawer(name, model, vocabulary)
        )

    def most_nodes(self, request: Request) -> int:
        """A full tree of the request's expansion, or the most that is grown of any."""
        own = request.params.speculation.expansion
        least = 0 if self._grow_best_first is None else MOST_NODES
        return max(least, self.shape.expansion.num_nodes - 1) if own is None else own.num_nodes - 1

    def open(self, growth: Growth, first: int, levels: int) -> GuessedTree:
        """A tree that is about to grow out of the pass's rows first..first+levels-1 of all that guess."""
        growth.limit = min(growth.limit, levels)
        (root,) = growth.sites(self.shape)
        return GuessedTree(growth, first, growth.limit, root)

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
    def grow(self, guessed: Sequence[GuessedTree], logits_TU: Tensor) -> None:
        """Grow all trees, each to its end, from the logits of their levels."""
        by_level: list[GuessedTree] = []
        best_first: list[GuessedTree] = []
        for one in guessed:
            if self._grow_best_first is not None and _is_best_first(one.growth, one.site):
                best_first.append(one)
            else:
                one.growth.limit = min(one.growth.limit, self.shape.depth(one.growth.entry.request))
                by_level.append(one)
        if best_first and self._grow_best_first is not None:
            self._grow_best_first(best_first, logits_TU, self._most)
        while by_level:
            by_level = self._grow_a_level(by_level, logits_TU)

    def _grow_a_level(self, guessed: Sequence[GuessedTree], logits_TU: Tensor) -> list[GuessedTree]:
        """Draw one more level of these trees; those that have room for another."""
        rows: list[int] = []
        before: list[int] = []
        sites: list[Site] = []
        for one in guessed:
            growth = one.growth
            rows.extend([one.first + growth.depth] * len(growth.frontier))
            before.extend(growth.builder.token_ids[node] for node in growth.frontier)
            sites.extend(growth.sites(self.shape))
        self._draw_level(sites, rows, before, logits_TU)
        goes_on = list[GuessedTree]()
        for one in guessed:
            one.growth.descend()
            if ends := one.growth.ends:
                one.growth.choose(ends)
                goes_on.append(one)
        return goes_on


def _is_best_first(growth: Growth, root: Site) -> bool:
    """Whether a tree is grown best first; else it is drawn level by level."""
    return bool(root.candidates) and growth.entry.request.params.speculation.expansion is None


class OnePassDraft(Draft):
    """A draft whose trees are whole after their first level: one pass guesses all of it."""

    def __init__(
        self,
        name: str,
        guess: Callable[[Sequence[Any]], HeadPass],
        head: Any,
        trees: OnePassTrees,
        *,
        max_rows: int,
        block_size: int,
        taps: tuple[int, ...],
    ) -> None:
        """As Draft; `guess` is a pass of the head, over a cache with blocks of `block_size` positions.

        `head` is its config, or what the kind needs of that; its `depth` are the levels of its trees at the
        most. `trees` are grown of these passes alone.
        """
        super().__init__(name, trees.shape, max_rows=max_rows, block_size=block_size, taps=taps)
        self._pass = guess
        self._head = head
        self._trees = trees

    @classmethod
    def of(
        cls,
        name: str,
        runner: HeadRunner[Any],
        shape: Shape,
        *,
        max_rows: int,
        vocabulary: DraftVocabulary | None = None,
    ) -> Self:
        """The draft of a head that `runner` runs, with logits of `vocabulary` (None: all)."""
        head, trees = runner.model.head, OnePassTrees.of(name, runner.model, shape, vocabulary)
        return cls(
            *(name, runner.guess, head, trees),
            max_rows=max_rows,
            block_size=runner.block_size,
            taps=head.taps,
        )

    def _growth(self, entry: PlanEntry) -> Growth:
        return Growth.of(entry, self.name, min(entry.max_depth, self._head.depth))

    def most_nodes(self, request: Request) -> int:
        """A full tree of the request's expansion, or the most that is grown of any."""
        return self._trees.most_nodes(request)

    def see_choices(self, guessed: Sequence[TokenTree], chosen: Sequence[TokenTree]) -> None:
        """Guess about as much as is verified."""
        self._trees.see_choices(guessed, chosen)

    def deepen(self, below: Mapping[int, Sequence[int]]) -> dict[int, Sequence[int]]:
        """Read these entries' texts, and grow the whole tree of each that has one; none has room for more."""
        asked: list[int] = []
        texts: list[Any] = []
        growing: list[GuessedTree] = []
        left, first = self._max_rows, 0
        for i in trees_first(self._growths, below):
            if (share := self._text(i, left)) is None:
                continue
            text, read, levels = share
            asked.append(i)
            texts.append(text)
            left -= read
            if levels:
                growing.append(self._trees.open(self._growths[i], first, levels))
                first += levels
        if texts:
            made = self._guess(asked, texts)
            if growing:
                assert made.logits_RU is not None
                self._trees.grow(growing, made.logits_RU)
        return {}

    @abstractmethod
    def _text(self, entry: int, most: int) -> tuple[Any, int, int] | None:
        """An entry's share of the pass, the tokens of its text that it reads, `most` at most, and the levels.

        No levels where the entry has no tree, or its text is not read to the end. None: it has no share.
        """

    def _guess(self, entries: Sequence[int], texts: Sequence[Any]) -> HeadPass:
        """The pass over these entries' shares."""
        return self._pass(texts)
