"""Best-first trees of one pass in PyTorch and NumPy: the oracle of cpu/best_first.cpp.

Shapes: L levels, C candidates per level, A possible tokens before a level (1 at the root, then C), W children
per node.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specinfer.heads.block import BlockModel
from specinfer.heads.runner import MarkovTerm
from specinfer.runtime.flight import Flight
from specinfer.speculate.drafts.draft_tokens import DraftVocabulary
from specinfer.speculate.drafts.growth import GuessedTree, Shape
from specinfer.speculate.drafts.one_pass import MIN_PATH, WIDTH, OnePassTrees
from specinfer.tree import DrawRule, TreeBuilder
from specinfer.verify.noise import exponentials
from specinfer.verify.scan import Likeliest

Floats = NDArray[np.float64]
_CANDIDATES: Final = 16  # per level, for the likeliest tokens
_RACERS: Final = 32  # per level, if noise decides


@dataclass(frozen=True, slots=True)
class Level:
    """The proposals at one level, given each token that may precede it."""

    tokens_C: NDArray[np.int64]  # the target's ids
    logits_AC: Floats  # divided by the temperature, Markov term included
    rest: float  # the mass of all other tokens, in units of e^logit


@dataclass(frozen=True, slots=True)
class Race:
    """The target's noise: a request's seed and the position of the first level's tokens."""

    seed: int
    position: int


@dataclass(frozen=True, slots=True)
class _Ranked:
    """One level's children, best first: [A, W] each."""

    places: NDArray[np.int64]  # indices among the level's candidates
    tokens: list[list[int]]
    probabilities: list[list[float]]
    evidence: list[tuple[float, float]]  # for each A: probabilities of the two likeliest tokens; 0 for one


def grow(
    builder: TreeBuilder, levels: Sequence[Level], most: int, speculator: str, race: Race | None
) -> None:
    """Add at most `most` nodes below the builder's root, as far as it has space, likeliest paths first.

    With `race` children are ranked as the coupled rule draws, else they are point masses. A draw's confidence
    is its acceptance probability, and its evidence the probabilities of the two likeliest tokens there.
    """
    ranked = [_rank(level, number, race) for number, level in enumerate(levels)]
    rule = DrawRule.POINT_MASS if race is None else DrawRule.COUPLED

    # A queued path: its probability, and the place of its last node (parent node, level, index of the token
    # before it, rank among the children).
    waiting: list[tuple[float, int, int, int, int, int, float]] = []

    def wait(above: float, parent: int, level: int, before: int, rank: int) -> None:
        """Queue the child of that rank, if it exists and is likely enough."""
        probabilities = ranked[level].probabilities[before]
        if rank < len(probabilities) and (path := above * probabilities[rank]) >= MIN_PATH:
            heapq.heappush(waiting, (-path, len(builder.parents), parent, level, before, rank, above))

    wait(1.0, 0, 0, 0, 0)
    added = 0
    while waiting and added < most and not builder.full:
        path, _, parent, level, before, rank, above = heapq.heappop(waiting)
        at = ranked[level]
        tokens, probabilities, seen = at.tokens[before], at.probabilities[before], at.evidence[before]
        node = builder.add(
            parent, tokens[rank], speculator, rule, confidence=probabilities[rank], evidence=seen
        )
        added += 1
        wait(above, parent, level, before, rank + 1)
        if node is not None and level + 1 < len(ranked):
            wait(-path, node, level + 1, int(at.places[before][rank]), 0)


def _rank(level: Level, number: int, race: Race | None) -> _Ranked:
    """Return the children after each token that may precede, best first, with their probabilities."""
    top_A1 = level.logits_AC.max(axis=1, keepdims=True)
    weights_AC = np.exp(level.logits_AC - top_A1)
    mass_A1 = weights_AC.sum(axis=1, keepdims=True) + level.rest * np.exp(-top_A1)
    chances_AC = weights_AC / mass_A1
    keys_AC = -level.logits_AC
    if race is not None:
        keys_AC = np.log(exponentials(race.seed, race.position + number, level.tokens_C)) + keys_AC
    places_AW = np.argsort(keys_AC, axis=1, kind="stable")[:, :WIDTH]
    best_AW = -np.sort(-chances_AC, axis=1)[:, : max(2, WIDTH)]
    hopes_AW = best_AW[:, : places_AW.shape[1]]
    return _Ranked(
        places_AW,
        level.tokens_C[places_AW].tolist(),
        hopes_AW.tolist(),
        [(row[0], row[1] if len(row) > 1 else 0.0) for row in best_AW[:, :2].tolist()],
    )


class PlainTrees:
    """Best-first trees without native code."""

    def __init__(self, name: str, model: BlockModel, vocabulary: DraftVocabulary | None) -> None:
        self._name = name
        self._scan = model.kernels.scan
        self._markov = model.markov
        self._vocabulary = vocabulary

    def grow(self, guessed: Sequence[GuessedTree], logits_TU: Tensor, most: int) -> None:
        """Grow these trees; see `one_pass.GrowTrees`."""
        racing = any(one.site.draws_by is DrawRule.COUPLED for one in guessed)
        candidates = _RACERS if racing else _CANDIDATES
        grown = [_Levels(one, self._markov) for one in guessed]
        if self._markov is None:
            flight = Flight(logits_TU, lambda logits: logits, logits_TU.shape[1], self._scan)
            rows = [one.first + level for one in guessed for level in range(one.levels)]
            temperatures = [one.site.temperature for one in guessed for _ in range(one.levels)]
            likeliest = flight.likeliest(rows, candidates, temperatures)
            levels = iter(range(len(rows)))
            for one in grown:
                for _ in range(one.wanted):
                    self._add_level(one, likeliest, next(levels))
        else:
            while growing := [one for one in grown if one.wanted > len(one.levels)]:
                self._grow_level_of_pairs(growing, logits_TU, candidates)
        for one in grown:
            site = one.guessed.site
            race = Race(site.seed, site.position) if site.draws_by is DrawRule.COUPLED else None
            if one.levels:
                grow(one.guessed.growth.builder, one.levels, most, self._name, race)

    def _grow_level_of_pairs(self, grown: Sequence[_Levels], logits_TU: Tensor, candidates: int) -> None:
        """Add the next level, whose likeliest tokens depend on the token before it.

        The likeliest are chosen after the probability-weighted mean of the possible tokens: at the root, and
        wherever one token is nearly certain, this is the token itself.
        """
        rows = torch.tensor([one.row for one in grown], device=logits_TU.device)
        mean_RM = torch.stack([one.mean_M for one in grown])
        made_RU = logits_TU.index_select(0, rows).float() + self._markov.logits(mean_RM)
        flight = Flight(made_RU, lambda logits: logits, made_RU.shape[1], self._scan)
        temperatures = [one.guessed.site.temperature for one in grown]
        likeliest = flight.likeliest(range(len(grown)), candidates, temperatures)
        for row, one in enumerate(grown):
            self._add_level(one, likeliest, row)

    def _add_level(self, one: _Levels, likeliest: Likeliest, row: int) -> None:
        """Return the proposals of the next level after each possible token, from a row of `likeliest`."""
        site = one.guessed.site
        raced = site.draws_by is DrawRule.COUPLED
        count = min(_RACERS if raced else _CANDIDATES, int(likeliest.found[row]))
        if not count:
            one.wanted = len(one.levels)
            return
        markov, temperature = self._markov, site.temperature
        entries_C, values_C = likeliest.ids[row, :count], likeliest.values[row, :count]
        tokens_C = entries_C if self._vocabulary is None else self._vocabulary.ids[entries_C]
        # Logits and masses are relative to the row's largest logit.
        scaled_C = (values_C.astype(np.float64) - values_C[0]) / temperature
        rest = max(0.0, float(likeliest.masses[row]) - float(np.exp(scaled_C).sum()))
        logits_AC = np.repeat(scaled_C[None], len(one.before_A), axis=0)
        if markov is not None:
            known_AM = markov.before(one.before_A.tolist())
            named_CM = markov.named_UM[torch.from_numpy(entries_C).to(markov.named_UM.device)].float()
            apart_AC = (known_AM - one.mean_M) @ named_CM.T
            logits_AC += apart_AC.double().cpu().numpy() / temperature
            chances_C = np.exp(scaled_C)
            weights_C = torch.from_numpy(chances_C / chances_C.sum()).to(named_CM)
            one.mean_M = weights_C @ markov.before(tokens_C.tolist())
        one.levels.append(Level(tokens_C, logits_AC, rest))
        one.before_A = tokens_C


class _Levels:
    """One request's levels so far, and the tokens that may precede the next."""

    def __init__(self, guessed: GuessedTree, markov: MarkovTerm | None) -> None:
        self.guessed = guessed
        self.wanted = guessed.levels
        self.levels: list[Level] = []
        self.before_A: NDArray[np.int64] = np.array([guessed.growth.builder.root])
        self.mean_M = torch.zeros(0)  # mean embedding of the token before
        if markov is not None:
            self.mean_M = markov.before(self.before_A.tolist())[0]

    @property
    def row(self) -> int:
        """The row of the next level among all requests' rows."""
        return self.guessed.first + len(self.levels)


def plain_one_pass_trees(
    name: str, model: BlockModel, shape: Shape, vocabulary: DraftVocabulary | None
) -> OnePassTrees:
    """Make OnePassTrees with the oracle's best-first trees."""
    trees = OnePassTrees(name, model, shape, vocabulary)
    trees._grow_best_first = PlainTrees(name, model, vocabulary).grow
    return trees
