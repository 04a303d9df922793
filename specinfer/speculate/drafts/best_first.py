"""Trees grown best first, from guesses that are all known before they grow.

A block head says of each level which tokens are likely (a row of logits) and how the token before changes
that (the Markov term). So the likeliest path that is not in the tree yet can always be found, and the tree's
n nodes are the n likeliest of all: one at a time from a heap, no pass of a model between them.

The library grows the trees of all requests in one call (cpu/best_first.cpp; tests/oracles/best_first.py says
the same slowly). A level's candidates are the likeliest tokens behind the mean of the tokens that may stand
before it; behind each of these the candidates have logits of their own.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Final, cast

import numpy as np
from torch import Tensor

from specinfer.heads.kinds import AnyHeadModel
from specinfer.kernels.library import TREE_ASK, TYPES, GrownArgs, GuesserArgs, Library
from specinfer.kernels.product import FLOATS, NativeProduct, check_rows
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.growth import GuessedTree
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.draw import Run, Runs

MOST_NODES: Final = 32  # of a tree, the root left out: more are hardly ever worth their rows
WIDTH: Final = 8  # children of a node at most
MIN_PATH: Final = 0.002  # probability of a path that is added


class NativeTrees:
    """Best-first trees by the library: all requests' in one call (cpu/best_first.cpp)."""

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

    @classmethod
    def of(cls, name: str, model: AnyHeadModel, vocabulary: DraftVocabulary | None) -> NativeTrees | None:
        """Trees of a model whose kernels are native; else None."""
        library = model.kernels.library
        if library is None or model.device.type != "cpu" or model.dtype not in FLOATS:
            return None
        if model.markov is not None and not isinstance(model.markov.product, NativeProduct):
            return None
        return cls(name, model, vocabulary, library)

    def grow(self, guessed: Sequence[GuessedTree], logits_TU: Tensor, most: int) -> None:
        """Grow these trees; see `one_pass.GrowTrees`."""
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
