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
from specinfer.verify.scan import Likeliest

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
            request = one.growth.entry.request
            if root.candidates and request.params.speculation.expansion is None:
                best_first.append((one, root))
            else:
                one.growth.limit = min(one.growth.limit, self._shape.depth(request))
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
        goes_on = list[Guessed]()
        for one in guessed:
            one.growth.descend()
            if ends := one.growth.ends:
                one.growth.choose(ends)
                goes_on.append(one)
        return goes_on

    def _grow_best_first(
        self, guessed: Sequence[tuple[Guessed, Site]], read_TD: Tensor, logits_TU: Tensor
    ) -> None:
        racing = any(site.draws_by is DrawRule.COUPLED for _, site in guessed)
        most = _RACERS if racing else _CANDIDATES
        grown = [_Levels(one, site, self._block) for one, site in guessed]
        if self._markov_UM is None:
            flight = Flight(logits_TU, lambda logits: logits, logits_TU.shape[1], self._head.kernels.scan)
            rows = [one.first + level for one, _ in guessed for level in range(one.growth.limit)]
            temperatures = [site.temperature for one, site in guessed for _ in range(one.growth.limit)]
            likeliest = flight.likeliest(rows, most, temperatures)
            levels = iter(range(len(rows)))
            for one in grown:
                for _ in range(one.wanted):
                    self._add_level(one, read_TD, likeliest, next(levels), None)
        else:
            for level in range(max(one.wanted for one in grown)):
                self._grow_level_of_pairs(
                    [one for one in grown if one.wanted > level], read_TD, logits_TU, most
                )
        for one in grown:
            site = one.site
            race = Race(site.seed, site.position) if site.draws_by is DrawRule.COUPLED else None
            if one.levels:
                grow(one.guessed.growth.builder, one.levels, MOST_NODES, self._name, race)

    def _grow_level_of_pairs(
        self, grown: Sequence[_Levels], read_TD: Tensor, logits_TU: Tensor, most: int
    ) -> None:
        """Add the next level to these, whose likeliest tokens depend on what may stand before it.

        They are found behind the mean of the tokens that may, as likely as these are: behind the anchor, and
        wherever one token is all but sure, that is the token itself.
        """
        assert self._markov_UM is not None
        rows = torch.tensor([one.row for one in grown], device=logits_TU.device)
        mean_RM = torch.stack([one.mean_M for one in grown])
        made_RU = logits_TU.index_select(0, rows).float() + mean_RM @ self._markov_UM.T
        flight = Flight(made_RU, lambda logits: logits, made_RU.shape[1], self._head.kernels.scan)
        temperatures = [one.site.temperature for one in grown]
        likeliest = flight.likeliest(range(len(grown)), most, temperatures)
        for row, one in enumerate(grown):
            self._add_level(one, read_TD, likeliest, row, self._markov_UM)

    def _add_level(
        self, one: _Levels, read_TD: Tensor, likeliest: Likeliest, row: int, markov_UM: Tensor | None
    ) -> None:
        """What the next level guesses behind each token that may stand before it, of a row of `likeliest`."""
        raced = one.site.draws_by is DrawRule.COUPLED
        count = min(_RACERS if raced else _CANDIDATES, int(likeliest.found[row]))
        if not count:
            one.wanted = len(one.levels)
            return
        block, temperature = self._block, one.site.temperature
        entries_C, values_C = likeliest.ids[row, :count], likeliest.values[row, :count]
        tokens_C = entries_C if self._vocabulary is None else self._vocabulary.ids[entries_C]
        # Logits and masses count from the largest logit of their row.
        scaled_C = (values_C.astype(np.float64) - values_C[0]) / temperature
        rest = max(0.0, float(likeliest.masses[row]) - float(np.exp(scaled_C).sum()))
        logits_AC = np.repeat(scaled_C[None], len(one.before_A), axis=0)
        known_AM: Tensor | None = None
        right_A = None
        if block is not None and markov_UM is not None:
            known_AM = block.before(one.before_A.tolist())
            named_CM = markov_UM[torch.from_numpy(entries_C).to(markov_UM.device)]
            apart_AC = (known_AM - one.mean_M) @ named_CM.T
            logits_AC += apart_AC.double().cpu().numpy() / temperature
            chances_C = np.exp(scaled_C)
            weights_C = torch.from_numpy(chances_C / chances_C.sum()).to(markov_UM)
            one.mean_M = weights_C @ block.before(tokens_C.tolist())
        if block is not None and block.head.confidence:
            read_AD = read_TD[one.row].expand(len(one.before_A), -1)
            right_A = block.confidence(read_AD, known_AM).double().cpu().numpy()
        one.levels.append(Level(tokens_C, logits_AC, rest, right_A))
        one.before_A = tokens_C


class _Levels:
    """One request's levels so far, and what may stand before the next."""

    def __init__(self, guessed: Guessed, site: Site, block: BlockModel | None) -> None:
        self.guessed = guessed
        self.site = site
        self.wanted = guessed.growth.limit
        self.levels: list[Level] = []
        self.before_A: NDArray[np.int64] = np.array([guessed.growth.builder.root])
        self.mean_M = torch.zeros(0)  # what is known of the token before, on average
        if block is not None and block.markov_UM is not None:
            self.mean_M = block.before(self.before_A.tolist())[0]

    @property
    def row(self) -> int:
        """The next level's, of all that guess."""
        return self.guessed.first + len(self.levels)
