"""Best-first trees of one pass by the library: all requests' in one call (cpu/best_first.cpp)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import cast

import numpy as np
from torch import Tensor

from specinfer.heads.block_model import BlockModel
from specinfer.heads.load import HeadModel
from specinfer.kernels.library import TREE_ASK, TYPES, GrownArgs, GuesserArgs, Library
from specinfer.kernels.product import FLOATS, NativeProduct, check_rows
from specinfer.speculate.drafts.best_first import LEAST_HOPE, MOST_NODES
from specinfer.speculate.drafts.draft_vocabulary import DraftVocabulary
from specinfer.speculate.drafts.growth import Guessed
from specinfer.tree import DrawRule, TokenTree
from specinfer.tree.draw import Run, Runs


class NativeTrees:
    """A `BestFirstTrees` that computes in a library."""

    def __init__(
        self,
        name: str,
        model: HeadModel,
        vocabulary: DraftVocabulary | None,
        library: Library,
    ) -> None:
        """The model computes on a CPU, with this library."""
        self._name = name
        self._library = library
        self._named = len(model.ids)
        self._width = model.config.hidden_size
        self._ids = None if vocabulary is None else np.ascontiguousarray(vocabulary.ids, dtype=np.int64)
        block = model if isinstance(model, BlockModel) else None
        self._kept = block  # whose memory the arguments point to
        args = GuesserArgs(type=TYPES[FLOATS[model.dtype]], width=self._width, tokens=model.config.vocab_size)
        args.ids = None if self._ids is None else self._ids.ctypes.data
        if block is not None and block.markov_UM is not None and block.markov_VM is not None:
            args.markov = cast(NativeProduct, block.markov).args
            args.before, args.named = block.markov_VM.data_ptr(), block.markov_UM.data_ptr()
        if block is not None and block.confidence_1W is not None:
            args.confidence, args.bias = block.confidence_1W.data_ptr(), block.confidence_bias
            args.reads_token = block.head.confidence_reads_token
        self._args = args
        self._make_room(1)

    @classmethod
    def of(cls, name: str, model: HeadModel, vocabulary: DraftVocabulary | None) -> NativeTrees | None:
        """Trees of a model whose kernels are native; else None."""
        library = model.kernels.library
        if library is None or model.device.type != "cpu" or model.dtype not in FLOATS:
            return None
        pairs = isinstance(model, BlockModel) and model.markov_UM is not None
        if pairs and not isinstance(cast(BlockModel, model).markov, NativeProduct):
            return None
        return cls(name, model, vocabulary, library)

    def grow(self, guessed: Sequence[Guessed], read_TD: Tensor, logits_TU: Tensor, most: int) -> None:
        """As BestFirstTrees says."""
        code, count, rows = check_rows(logits_TU, self._named), len(guessed), logits_TU.size(0)
        if check_rows(read_TD, self._width) != self._args.type or read_TD.size(0) != rows:
            raise ValueError(f"{rows} rows of logits for {read_TD.size(0)} of {read_TD.dtype}")
        if count > self._room:
            self._make_room(count)
        asks = b"".join([_ask(one, min(most, MOST_NODES)) for one in guessed])
        there = self._library.grow_trees(
            *(ctypes.byref(self._args), code, logits_TU.data_ptr(), rows, self._named),
            *(read_TD.data_ptr(), asks, count, ctypes.byref(self._grown)),
        )
        if not there:
            raise IndexError(f"trees of {count} requests in {rows} rows of logits")
        whole, chances, name = self._room * MOST_NODES, self._chances, self._name
        for i, one in enumerate(guessed):
            first = i * MOST_NODES
            end = first + self._nodes[i]
            parents = self._nodes[self._room + first : self._room + end].tolist()
            tokens = self._nodes[self._room + whole + first : self._room + whole + end].tolist()
            hopes = chances[first:end].tolist()
            evidence = chances[whole + 2 * first : whole + 2 * end].tolist()
            run = Run(name, one.site.draws_by, parents, range(1, len(parents) + 1), hopes, evidence, 2)
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


def _ask(one: Guessed, most: int) -> bytes:
    """One request's tree, as cpu/best_first.h has it."""
    site, builder = one.site, one.growth.builder
    return TREE_ASK.pack(
        *(one.first, one.levels, builder.root, min(most, builder.max_nodes - 1)),
        *(site.temperature, LEAST_HOPE, site.seed, site.position, site.draws_by is DrawRule.COUPLED),
    )
