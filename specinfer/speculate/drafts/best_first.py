"""A tree grown best first, from guesses that are all known before it grows.

A block head says of each level which tokens are likely (a row of logits) and how the token before changes
that (the Markov term). So the likeliest path that is not in the tree yet can always be found, and the tree's
n nodes are the n likeliest of all: one at a time from a heap, no pass of a model between them.

Shapes: L levels, C candidates a level, A tokens that may stand before a level (the anchor; then C), W
children that a node may have.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from specinfer.tree import DrawRule, TreeBuilder
from specinfer.verify.noise import exponentials

MOST_NODES: Final = 32  # of a tree, the root left out: more are hardly ever worth their rows
WIDTH: Final = 8  # children of a node at most
LEAST_HOPE: Final = 0.002  # of a path that is added
Floats = NDArray[np.float64]
_Place = TypeVar("_Place", int, tuple[int, int])  # of a node's children, for whoever knows them


@dataclass(frozen=True, slots=True)
class Level:
    """What is guessed at one level, given each token that may stand before."""

    tokens_C: NDArray[np.int64]  # the target's ids
    logits_AC: Floats  # at the temperature, the Markov term included
    rest: float  # the mass of all other tokens, in units of e^logit
    right_A: Floats | None = None  # how likely the guess is right, where the head says


@dataclass(frozen=True, slots=True)
class Race:
    """The noise that the target will use: a request's seed, and where the first level's tokens will stand."""

    seed: int
    position: int


class Children(NamedTuple, Generic[_Place]):
    """What may stand below a node, best first, and how likely each is right."""

    tokens: Sequence[int]
    hopes: Sequence[float]
    evidence: tuple[float, ...]
    below: Sequence[_Place | None]  # the places of their own children; None: there are none


@dataclass(frozen=True, slots=True)
class _Ranked:
    """One level's children, best first: [A, W] each."""

    places: NDArray[np.int64]  # among the level's candidates
    tokens: list[list[int]]
    hopes: list[list[float]]
    evidence: list[tuple[float, float]]  # of each A: how likely the two likeliest are; 0 where there is one


def grow(
    builder: TreeBuilder, levels: Sequence[Level], most: int, speculator: str, race: Race | None
) -> None:
    """Add at most `most` nodes below the builder's root, as far as it has room, the likeliest paths first.

    With `race` children are ranked as the coupled rule draws, else they are point masses. A draw's confidence
    is how likely it is right, and its evidence how likely the two likeliest tokens there are.
    """
    ranked = [_rank(level, number, race) for number, level in enumerate(levels)]
    rule = DrawRule.POINT_MASS if race is None else DrawRule.COUPLED

    def children(place: tuple[int, int]) -> Children[tuple[int, int]]:
        """Of a level, behind one of the tokens that may stand before."""
        level, before = place
        at = ranked[level]
        below = [
            (level + 1, behind) if level + 1 < len(ranked) else None for behind in at.places[before].tolist()
        ]
        return Children(at.tokens[before], at.hopes[before], at.evidence[before], below)

    add_likeliest(builder, (0, 0), children, most, speculator, rule)


def add_likeliest(
    builder: TreeBuilder,
    root: _Place,
    children: Callable[[_Place], Children[_Place]],
    most: int,
    speculator: str,
    rule: DrawRule,
) -> None:
    """Add at most `most` nodes below the builder's root, as far as it has room, the likeliest paths first.

    Of equally likely ones that one comes first that was found first, and of a node's next sibling and its
    first child the sibling. `root` is the place of the root's children.
    """
    known: dict[_Place, Children[_Place]] = {}
    # A path that waits: its hope, and where its last node would hang.
    waiting: list[tuple[float, int, int, _Place, int, float]] = []

    def wait(above: float, parent: int, place: _Place, rank: int) -> None:
        """Let the child of that rank wait, if there is one and it may be right."""
        if place not in known:
            known[place] = children(place)
        hopes = known[place].hopes
        if rank < len(hopes) and (hope := above * hopes[rank]) >= LEAST_HOPE:
            heapq.heappush(waiting, (-hope, len(builder.parents), parent, place, rank, above))

    wait(1.0, 0, root, 0)
    added = 0
    while waiting and added < most and not builder.full:
        hope, _, parent, place, rank, above = heapq.heappop(waiting)
        at = known[place]
        node = builder.add(
            parent,
            at.tokens[rank],
            speculator,
            rule,
            confidence=at.hopes[rank],
            evidence=at.evidence,
        )
        added += 1
        wait(above, parent, place, rank + 1)
        if node is not None and (under := at.below[rank]) is not None:
            wait(-hope, node, under, 0)


def _rank(level: Level, number: int, race: Race | None) -> _Ranked:
    """The children behind each token that may stand before, best first, and how likely each is right."""
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
    if race is not None and level.right_A is not None:
        # The first is right as often as the head says; the others share what it leaves in the same way.
        right_A1 = level.right_A[:, None]
        hopes_AW = right_A1 * (1 - right_A1) ** np.arange(places_AW.shape[1])
    return _Ranked(
        places_AW,
        level.tokens_C[places_AW].tolist(),
        hopes_AW.tolist(),
        [(row[0], row[1] if len(row) > 1 else 0.0) for row in best_AW[:, :2].tolist()],
    )
