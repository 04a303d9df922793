"""OnePassTrees: trees whose levels are all guessed by one pass of a head.

A level's guesses depend on the previous token only by the Markov term, if there is one. So with native
kernels trees of point masses and coupled draws are grown best first. Other trees are drawn level by level, as
a draft model's: without native kernels, for samples, with a fixed shape, and for requests whose processors or
filters need whole rows.

Best first: all guesses are known before a tree grows, so a heap yields the likeliest path that is not in the
tree, and the tree's n nodes are the n likeliest of all. One native call grows the trees of all requests
(cpu/best_first.cpp; tests/oracles/best_first.py is its oracle). The candidates of a level are the likeliest
tokens after the mean of the possible previous tokens; each previous token then gives them different
logits.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor

from specinfer.heads.block import BlockModel
from specinfer.heads.runner import HeadPass
from specinfer.kernels.library import Library
from specinfer.kernels.product import FLOATS, NativeProduct, check_rows
from specinfer.kernels.structures import TREE_REQUEST, TYPES, GrownArgs, GuesserArgs
from specinfer.request import Request
from specinfer.runtime.flight import Flight, inference
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.draws import Site, draw_children
from specinfer.speculate.drafts.growth import Growth, GuessedTree, Shape
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.draw import Run, Runs, as_runs

MAX_NODES: Final = 32  # maximum nodes of a tree, without its root; more are rarely worth their rows
WIDTH: Final = 8  # maximum children of a node
MIN_PATH: Final = 0.002  # minimum probability of a path
_MIN_NODES: Final = 8  # smallest limit of a tree's nodes


# Grows trees from the contiguous logits of guessing rows, up to MAX_NODES, each tree's budget and the number.
GrowTrees = Callable[[Sequence[GuessedTree], Tensor, int], None]


class OnePassTrees:
    """Grows trees from the logits of all their levels."""

    def __init__(
        self, name: str, model: BlockModel, shape: Shape, vocabulary: DraftVocabulary | None
    ) -> None:
        """Make a grower for a head; `shape` is that of trees that are not grown best first.

        `vocabulary` are the tokens of its logits (None: all).
        """
        self._name = name
        self._model = model
        self._vocabulary = vocabulary
        self._is_fixed = not shape.learned
        self.shape = shape._replace(learned=False)  # trees drawn by levels have a fixed shape
        self._node_limit = MAX_NODES  # present limit of nodes of a best-first tree
        library = model.kernels.library
        self._grow_best_first: GrowTrees | None = None
        if library is not None and model.selector is None:
            self._grow_best_first = NativeTrees(name, model, vocabulary, library).grow

    def max_nodes(self, request: Request) -> int:
        """Return the nodes of a full tree of the expansion, or the maximum of any tree."""
        shaped = self.shape.max_nodes(request)
        return shaped if self._by_levels(request) else max(MAX_NODES, shaped)

    def open(self, growth: Growth, first: int, levels: int) -> GuessedTree:
        """Return an initial tree whose levels are the guessing rows first..first+levels-1."""
        growth.limit = min(growth.limit, levels)
        (root,) = growth.sites(self.shape)
        return GuessedTree(growth, first, growth.limit, root)

    def see_choices(self, guessed: Sequence[TokenTree], chosen: Sequence[TokenTree]) -> None:
        """Adjust the limit of nodes by the number of verified nodes.

        It doubles if a tree of that size was verified whole, and halves if none needed more than a third.
        """
        kept = grown = 0
        whole = False
        for tree, part in zip(guessed, chosen, strict=True):
            there, here = (as_runs(t.draws).drawn_by(self._name) for t in (tree, part))
            grown, kept = max(grown, there), max(kept, here)
            whole = whole or there == here >= self._node_limit
        if whole:
            self._node_limit = min(MAX_NODES, 2 * self._node_limit)
        elif grown and 3 * kept < self._node_limit:
            self._node_limit = max(_MIN_NODES, self._node_limit // 2)

    @inference
    def grow(self, guessed: Sequence[GuessedTree], made: HeadPass) -> None:
        """Grow all trees completely from the logits of their levels."""
        assert made.logits_RU is not None, "a block head makes logits with its pass"
        by_level: list[GuessedTree] = []
        best_first: list[GuessedTree] = []
        for one in guessed:
            request = one.growth.entry.request
            if one.site.candidates and not self._by_levels(request):
                best_first.append(one)
            else:
                one.growth.limit = min(one.growth.limit, self.shape.depth(request))
                by_level.append(one)
        if best_first and self._grow_best_first is not None:
            self._grow_best_first(best_first, made.logits_RU, self._node_limit)
        while by_level:
            by_level = self._grow_a_level(by_level, made.logits_RU, made.read_RD)

    def _by_levels(self, request: Request) -> bool:
        """Return whether all trees of a request have a fixed shape."""
        is_fixed = self._is_fixed or request.params.speculation.expansion is not None
        return self._grow_best_first is None or is_fixed

    def _grow_a_level(
        self, guessed: Sequence[GuessedTree], logits_TU: Tensor, read_TD: Tensor
    ) -> list[GuessedTree]:
        """Draw another level of these trees; returns those that can grow further."""
        rows: list[int] = []
        before: list[int] = []
        sites: list[Site] = []
        for one in guessed:
            growth = one.growth
            rows.extend([one.first + growth.depth] * len(growth.frontier))
            before.extend(growth.builder.token_ids[node] for node in growth.frontier)
            sites.extend(growth.sites(self.shape))
        markov = self._model.markov
        rows_R = torch.tensor(rows, device=logits_TU.device)
        made_RU = logits_TU.index_select(0, rows_R).float()
        if (selector := self._model.selector) is not None:
            made_RU = selector.logits(made_RU, read_TD.index_select(0, rows_R), before)
        if markov is not None:
            made_RU += markov.logits(markov.before(before))
        flight = Flight(made_RU, lambda logits: logits, made_RU.shape[1], self._model.kernels.scan)
        draw_children(flight, sites, self._vocabulary)
        goes_on = list[GuessedTree]()
        for one in guessed:
            one.growth.descend()
            if ends := one.growth.ends:
                one.growth.choose(ends)
                goes_on.append(one)
        return goes_on


class NativeTrees:
    """Grows best-first trees with the native library."""

    def __init__(
        self,
        name: str,
        model: BlockModel,
        vocabulary: DraftVocabulary | None,
        library: Library,
    ) -> None:
        """Make a grower for a model that computes on a CPU with this library."""
        self._name = name
        self._library = library
        self._num_tokens = len(model.ids)
        self._ids = None if vocabulary is None else np.ascontiguousarray(vocabulary.ids, dtype=np.int64)
        self._kept = model  # the arguments point to its memory
        args = GuesserArgs(type=TYPES[FLOATS[model.dtype]], tokens=model.config.vocab_size)
        args.ids = None if self._ids is None else self._ids.ctypes.data
        if model.markov is not None:
            args.markov = cast(NativeProduct, model.markov.product).args
            args.before, args.named = model.markov.before_VM.data_ptr(), model.markov.named_UM.data_ptr()
        self._args = args
        self._allocate(1)

    def grow(self, guessed: Sequence[GuessedTree], logits_TU: Tensor, max_nodes: int) -> None:
        """Grow these trees; see `GrowTrees`."""
        code, count, rows = check_rows(logits_TU, self._num_tokens), len(guessed), logits_TU.size(0)
        if count > self._capacity:
            self._allocate(count)
        requests = b"".join([_packed_request(one, min(max_nodes, MAX_NODES)) for one in guessed])
        there = self._library.grow_trees(
            *(ctypes.byref(self._args), code, logits_TU.data_ptr(), rows, self._num_tokens),
            *(requests, count, ctypes.byref(self._grown)),
        )
        if not there:
            raise IndexError(f"trees of {count} requests in {rows} rows of logits")
        whole, probs, name = self._capacity * MAX_NODES, self._probabilities, self._name
        for i, one in enumerate(guessed):
            first = i * MAX_NODES
            end = first + self._nodes[i]
            parents = self._nodes[self._capacity + first : self._capacity + end].tolist()
            tokens = self._nodes[self._capacity + whole + first : self._capacity + whole + end].tolist()
            confidences = probs[first:end].tolist()
            evidence = probs[whole + 2 * first : whole + 2 * end].tolist()
            run = Run(name, one.site.draws_by, parents, range(1, len(parents) + 1), confidences, evidence, 2)
            one.growth.grown = TokenTree((one.growth.builder.root, *tokens), (-1, *parents), Runs((run,)))

    def _allocate(self, count: int) -> None:
        """Allocate memory for the trees of `count` requests, reused in each step."""
        self._capacity, nodes = count, count * MAX_NODES
        self._nodes = array("q", bytes(8 * (count + 2 * nodes)))  # counts, parents, tokens
        self._probabilities = array("d", bytes(8 * 3 * nodes))  # confidences, evidence
        at, probs = self._nodes.buffer_info()[0], self._probabilities.buffer_info()[0]
        parents = at + 8 * count
        self._grown = GrownArgs(
            *(MAX_NODES, at, parents, parents + 8 * nodes),
            *(probs, probs + 8 * nodes),
        )


def _packed_request(one: GuessedTree, max_nodes: int) -> bytes:
    """Return one request's arguments in the layout of cpu/best_first.h."""
    site, builder = one.site, one.growth.builder
    return TREE_REQUEST.pack(
        *(one.first, one.levels, builder.root, min(max_nodes, builder.max_nodes - 1)),
        *(site.temperature, MIN_PATH, site.seed, site.position, site.draws_by is DrawRule.COUPLED),
    )
