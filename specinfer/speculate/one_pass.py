"""Trees whose levels are all guessed by one pass of a head.

What each level guesses depends on the token before it by the Markov term alone, if there is one. So point
masses and coupled draws are grown best first (best_first.py). Samples, requests with a shape of their own and
those whose processors or filters look at whole rows are drawn level by level as a draft model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.heads.block_model import BlockModel
from specinfer.heads.eagle_model import EagleModel
from specinfer.request import Request
from specinfer.runtime.flight import Flight
from specinfer.speculate.best_first import Level, Race, grow
from specinfer.speculate.draft_vocabulary import DraftVocabulary
from specinfer.speculate.draws import Site, draw_children
from specinfer.speculate.growth import Growth, Shape
from specinfer.tree import DrawRule

MOST_NODES: Final = 32  # of a tree grown best first, the root left out: more are hardly ever worth their rows
_CANDIDATES: Final = 16  # of a level where the likeliest are wanted
_RACERS: Final = 32  # where noise decides among them


@dataclass(slots=True)
class Guessed:
    """One request's levels of a pass: rows first..first+levels-1 of all that guess."""

    growth: Growth
    first: int
    levels: int


class OnePassTrees:
    """Grows trees from what the output layer of a head reads of all their levels."""

    def __init__(
        self, name: str, model: BlockModel | EagleModel, shape: Shape, vocabulary: DraftVocabulary | None
    ) -> None:
        """`shape` is of trees not grown best first; `vocabulary` is that of the head's logits (None: all)."""
        self._name = name
        self._head = model
        self._block = model if isinstance(model, BlockModel) else None
        self._markov_UM = None if self._block is None else self._block.markov_UM
        self._shape = shape
        self._vocabulary = vocabulary

    def most_nodes(self, request: Request) -> int:
        """A full tree of the request's expansion, or the most that is grown of any."""
        own = request.params.speculation.expansion
        return max(MOST_NODES, self._shape.expansion.num_nodes - 1) if own is None else own.num_nodes - 1

    @torch.inference_mode()
    def grow(self, guessed: Sequence[Guessed], read_TD: Tensor) -> None:
        """Grow all trees, each to its end, from what the output layer reads of their levels."""
        logits_TU = self._head.logits(read_TD)
        by_level: list[Guessed] = []
        best_first: list[tuple[Guessed, Site]] = []
        for one in guessed:
            one.growth.limit = min(one.growth.limit, one.levels)
            (root,) = one.growth.sites(self._shape)
            own_shape = one.growth.entry.request.params.speculation.expansion is not None
            if root.candidates and not own_shape:
                best_first.append((one, root))
            else:
                by_level.append(one)
        if best_first:
            self._grow_best_first(best_first, read_TD, logits_TU)
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
        made_RU = logits_TU.index_select(0, torch.tensor(rows, device=logits_TU.device)).float()
        if self._block is not None and self._markov_UM is not None:
            made_RU += self._block.before(before) @ self._markov_UM.T
        flight = Flight(made_RU, lambda logits: logits, made_RU.shape[1], self._head.kernels.scan)
        draw_children(flight, sites, self._name, self._vocabulary)
        for one in guessed:
            one.growth.descend()
        widths = {id(one): len(self._shape.expansion_for(one.growth.entry).widths) for one in guessed}
        return [one for one in guessed if one.growth.wants_more and one.growth.depth < widths[id(one)]]

    def _grow_best_first(
        self, guessed: Sequence[tuple[Guessed, Site]], read_TD: Tensor, logits_TU: Tensor
    ) -> None:
        flight = Flight(logits_TU, lambda logits: logits, logits_TU.shape[1], self._head.kernels.scan)
        rows: list[int] = []
        temperatures: list[float] = []
        for one, site in guessed:
            rows.extend(range(one.first, one.first + one.growth.limit))
            temperatures.extend([site.temperature] * one.growth.limit)
        racing = any(site.draws_by is DrawRule.COUPLED for _, site in guessed)
        likeliest = flight.likeliest(rows, _RACERS if racing else _CANDIDATES, temperatures)
        begin = 0
        for one, site in guessed:
            end = begin + one.growth.limit
            raced = site.draws_by is DrawRule.COUPLED
            count = min(_RACERS if raced else _CANDIDATES, int(likeliest.found[begin:end].min()))
            if count:
                levels = self._levels(
                    read_TD[one.first : one.first + one.growth.limit],
                    one.growth.builder.root,
                    likeliest.ids[begin:end, :count],
                    likeliest.values[begin:end, :count],
                    likeliest.masses[begin:end],
                    site.temperature,
                )
                race = Race(site.seed, site.position) if raced else None
                grow(one.growth.builder, levels, MOST_NODES, self._name, race)
            begin = end

    def _levels(
        self,
        read_LD: Tensor,
        anchor: int,
        entries_LC: NDArray[np.int64],
        values_LC: NDArray[np.float32],
        masses_L: NDArray[np.float64],
        temperature: float,
    ) -> list[Level]:
        """What each level of a block guesses behind each token that may stand before it."""
        block, markov_UM = self._block, self._markov_UM
        tokens_LC = entries_LC if self._vocabulary is None else self._vocabulary.ids[entries_LC]
        # Logits and masses count from the largest logit of their row.
        scaled_LC = (values_LC.astype(np.float64) - values_LC[:, :1]) / temperature
        rest_L = masses_L - np.exp(scaled_LC).sum(axis=1)
        levels: list[Level] = []
        before_A = np.array([anchor])
        for level, tokens_C in enumerate(tokens_LC):
            logits_AC = np.repeat(scaled_LC[level][None], len(before_A), axis=0)
            known_AM: Tensor | None = None
            right_A = None
            if block is not None and markov_UM is not None:
                known_AM = block.before(before_A.tolist())
                pairs_AC = known_AM @ markov_UM[torch.from_numpy(entries_LC[level]).to(markov_UM.device)].T
                logits_AC += pairs_AC.double().cpu().numpy() / temperature
            if block is not None and block.head.confidence:
                read_AD = read_LD[level].expand(len(before_A), -1)
                right_A = block.confidence(read_AD, known_AM).double().cpu().numpy()
            levels.append(Level(tokens_C, logits_AC, max(0.0, float(rest_L[level])), right_A))
            before_A = tokens_C
        return levels
