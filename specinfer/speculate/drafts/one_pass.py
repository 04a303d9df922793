"""Trees whose levels are all guessed by one pass of a head.

What each level guesses depends on the token before it by the Markov term alone, if there is one. So point
masses and coupled draws are grown best first, where there are native kernels. Without these all trees are
drawn level by level as a draft model's. So are samples, requests with a shape of their own, and those whose
processors or filters look at whole rows, everywhere.

Best first: as all guesses are known before a tree grows, the likeliest path that is not in the tree yet can
always be found, and the tree's n nodes are the n likeliest of all: one at a time from a heap. The library
grows the trees of all requests in one call (cpu/best_first.cpp; tests/oracles/best_first.py says the same
slowly). A level's candidates are the likeliest tokens behind the mean of the tokens that may stand before it;
behind each of these the candidates have logits of their own.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Self, cast

import numpy as np
import torch
from torch import Tensor

from specinfer.heads.kinds import AnyHeadModel
from specinfer.heads.runner import HeadPass, HeadRunner
from specinfer.kernels.library import Library
from specinfer.kernels.product import FLOATS, NativeProduct, check_rows
from specinfer.kernels.structures import TREE_ASK, TYPES, GrownArgs, GuesserArgs
from specinfer.plan import PlanEntry
from specinfer.request import Request
from specinfer.runtime.flight import HostFlight, inference
from specinfer.speculate.drafts.draft import Draft
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.growth import Growth, GuessedTree, Shape, trees_first
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.draw import Run, Runs, as_runs

MOST_NODES: Final = 32  # of a tree, the root left out: more are hardly ever worth their rows
WIDTH: Final = 8  # children of a node at most
MIN_PATH: Final = 0.002  # probability of a path that is added
_FEWEST_NODES: Final = 8  # of a tree that are grown, whatever is wanted of them


# Grows trees of so many nodes, MOST_NODES at most, and as many as there is room for, of the logits of all
# rows that guess, which are contiguous.
GrowTrees = Callable[[Sequence[GuessedTree], Tensor, int], None]
# Adds the children of every site, site i by row rows[i] of all logits, behind the token before[i].
DrawLevel = Callable[[Sequence[Site], Sequence[int], Sequence[int], Tensor], None]


def grow_best_first(name: str, model: AnyHeadModel, vocabulary: DraftVocabulary | None) -> GrowTrees | None:
    """How a head's best-first trees are grown: by the library; None where its kernels are not native."""
    library = model.kernels.library
    return None if library is None else NativeTrees(name, model, vocabulary, library).grow


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


class NativeTrees:
    """Best-first trees by the library."""

    def __init__(
        self,
        name: str,
        model: AnyHeadModel,
        vocabulary: DraftVocabulary | None,
        library: Library,
    ) -> None:
        """The model computes on a CPU, with this library."""
        self._name = name
        self._library = library
        self._named = len(model.ids)
        self._ids = None if vocabulary is None else np.ascontiguousarray(vocabulary.ids, dtype=np.int64)
        self._kept = model  # whose memory the arguments point to
        args = GuesserArgs(type=TYPES[FLOATS[model.dtype]], tokens=model.config.vocab_size)
        args.ids = None if self._ids is None else self._ids.ctypes.data
        if model.markov is not None:
            args.markov = cast(NativeProduct, model.markov.product).args
            args.before, args.named = model.markov.before_VM.data_ptr(), model.markov.named_UM.data_ptr()
        self._args = args
        self._make_room(1)

    def grow(self, guessed: Sequence[GuessedTree], logits_TU: Tensor, most: int) -> None:
        """Grow these trees; see `GrowTrees`."""
        code, count, rows = check_rows(logits_TU, self._named), len(guessed), logits_TU.size(0)
        if count > self._room:
            self._make_room(count)
        asks = b"".join([_ask(one, min(most, MOST_NODES)) for one in guessed])
        there = self._library.grow_trees(
            *(ctypes.byref(self._args), code, logits_TU.data_ptr(), rows, self._named),
            *(asks, count, ctypes.byref(self._grown)),
        )
        if not there:
            raise IndexError(f"trees of {count} requests in {rows} rows of logits")
        whole, chances, name = self._room * MOST_NODES, self._chances, self._name
        for i, one in enumerate(guessed):
            first = i * MOST_NODES
            end = first + self._nodes[i]
            parents = self._nodes[self._room + first : self._room + end].tolist()
            tokens = self._nodes[self._room + whole + first : self._room + whole + end].tolist()
            confidences = chances[first:end].tolist()
            evidence = chances[whole + 2 * first : whole + 2 * end].tolist()
            run = Run(name, one.site.draws_by, parents, range(1, len(parents) + 1), confidences, evidence, 2)
            one.growth.grown = TokenTree((one.growth.builder.root, *tokens), (-1, *parents), Runs((run,)))

    def _make_room(self, count: int) -> None:
        """Memory for the trees of so many requests, which is used again in each step."""
        self._room, nodes = count, count * MOST_NODES
        self._nodes = array("q", bytes(8 * (count + 2 * nodes)))  # counts, parents, tokens
        self._chances = array("d", bytes(8 * 3 * nodes))  # confidences, evidence
        at, chance = self._nodes.buffer_info()[0], self._chances.buffer_info()[0]
        parents = at + 8 * count
        self._grown = GrownArgs(
            *(MOST_NODES, at, parents, parents + 8 * nodes),
            *(chance, chance + 8 * nodes),
        )


def _ask(one: GuessedTree, most: int) -> bytes:
    """One request's tree, as cpu/best_first.h has it."""
    site, builder = one.site, one.growth.builder
    return TREE_ASK.pack(
        *(one.first, one.levels, builder.root, min(most, builder.max_nodes - 1)),
        *(site.temperature, MIN_PATH, site.seed, site.position, site.draws_by is DrawRule.COUPLED),
    )
