"""Best-first trees of one pass by the library: all requests' in one call (cpu/best_first.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Final, cast

import numpy as np
from torch import Tensor

from specinfer.heads.block_model import BlockModel
from specinfer.heads.eagle_model import EagleModel
from specinfer.kernels.library import TREE_ASK, TYPES, GrownArgs, GuesserArgs, Library
from specinfer.kernels.product import FLOATS, NativeProduct, check_rows
from specinfer.speculate.best_first import LEAST_HOPE, MOST_NODES
from specinfer.speculate.draft_vocabulary import DraftVocabulary
from specinfer.speculate.growth import Guessed
from specinfer.tree import Draw, DrawRule, TokenTree

_draw: Final = tuple.__new__  # quicker than Draw(...)


class NativeTrees:
    """A `BestFirstTrees` that computes in a library."""

    def __init__(
        self,
        name: str,
        model: BlockModel | EagleModel,
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

    @classmethod
    def of(
        cls, name: str, model: BlockModel | EagleModel, vocabulary: DraftVocabulary | None
    ) -> NativeTrees | None:
        """Trees of a model whose kernels are native; else None."""
        library = model.kernels.library
        if library is None or model.device.type != "cpu" or model.dtype not in FLOATS:
            return None
        pairs = isinstance(model, BlockModel) and model.markov_UM is not None
        if pairs and not isinstance(cast(BlockModel, model).markov, NativeProduct):
            return None
        return cls(name, model, vocabulary, library)

    def grow(self, guessed: Sequence[Guessed], read_TD: Tensor, logits_TU: Tensor) -> None:
        """As BestFirstTrees says."""
        code, count = check_rows(logits_TU, self._named), len(guessed)
        if check_rows(read_TD, self._width) != self._args.type or len(read_TD) != len(logits_TU):
            raise ValueError(f"{len(logits_TU)} rows of logits for {len(read_TD)} of {read_TD.dtype}")
        asks = np.array([_ask(one) for one in guessed], dtype=TREE_ASK)
        nodes = np.empty((2, count, MOST_NODES), dtype=np.int64)
        chances = np.empty((3, count, MOST_NODES))
        counts = np.empty(count, dtype=np.int64)
        at, chance = nodes.ctypes.data, chances.ctypes.data
        size = 8 * count * MOST_NODES
        to = GrownArgs(MOST_NODES, counts.ctypes.data, at, at + size, chance, chance + size)
        there = self._library.grow_trees(
            *(ctypes.byref(self._args), code, logits_TU.data_ptr(), len(logits_TU), self._named),
            *(read_TD.data_ptr(), asks.ctypes.data, count, ctypes.byref(to)),
        )
        if not there:
            raise IndexError(f"trees of {asks.tolist()} of {len(logits_TU)} rows of logits")
        evidence = chances[1:].reshape(count, MOST_NODES, 2)
        for i, (one, grown) in enumerate(zip(guessed, counts.tolist(), strict=True)):
            parents, tokens = nodes[0, i, :grown].tolist(), nodes[1, i, :grown].tolist()
            rule, name = one.site.draws_by, self._name
            draws = [
                _draw(Draw, (parent, node, name, rule, None, hope, (first, second)))
                for node, (parent, hope, (first, second)) in enumerate(
                    zip(parents, chances[0, i, :grown].tolist(), evidence[i, :grown].tolist(), strict=True), 1
                )
            ]
            one.growth.grown = TokenTree((one.growth.builder.root, *tokens), (-1, *parents), tuple(draws))


def _ask(one: Guessed) -> tuple[float, ...]:
    site, builder = one.site, one.growth.builder
    races = site.draws_by is DrawRule.COUPLED
    return (
        *(one.first, one.levels, builder.root, min(MOST_NODES, builder.max_nodes - 1)),
        *(site.temperature, LEAST_HOPE, site.seed, site.position, races, 0),
    )
