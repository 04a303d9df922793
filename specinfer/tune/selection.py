"""Which members of a pool pay: tokens a second of their merged trees along held-out answers.

A step verifies one tree in which those of the members are merged, and costs a pass of the target over its
nodes and the members' passes, as this machine runs them (runtime/cost_curve.py). Each member's tree has a few
guesses a level, and the shapes are chosen with the members: what a policy can do in each step is done here
once for all of them. Members are added one by one, that which makes the most of it first, and those behind
the best size are dropped.

A guess is right where it is the token that came. Guesses that are right are one node, whoever made them; of
wrong ones it is not known whether they are the same, and they count apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specinfer.runtime.cost_curve import CostCurve
from specinfer.tune.held_out import Along

Widths = tuple[int, ...]  # guesses a node gets, level by level
_FIRST: Final = ((1, 1), (2, 1), (3, 1), (2, 2))  # of the first two levels; those below have one each
_READ: Final = 2  # tokens that a draft has to read in a step, mostly
_ROUNDS: Final = 3  # of choosing each member's shape anew


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A member, along held-out answers, and what its passes cost."""

    name: str
    along: Along
    curve: CostCurve
    one_pass: bool  # it guesses all levels in one; else a pass a level

    def shapes(self) -> list[Widths]:
        """The trees it may be asked for."""
        depth = self.along.ranks_PL.shape[1]
        return list(
            dict.fromkeys(
                (*first, *[1] * (levels - 2))[:levels] for levels in range(1, depth + 1) for first in _FIRST
            )
        )

    def seconds(self, widths: Widths) -> float:
        """Of its passes in a step, of one text."""
        rows = [_READ] if self.one_pass else [_READ, *level_sizes(widths)[:-1]]
        return float(self.curve.seconds(rows).sum())


@dataclass(frozen=True, slots=True, eq=False)
class Speed:
    """What some members make of held-out answers, each with its shape."""

    members: tuple[int, ...]  # in the order they were chosen
    widths: tuple[Widths, ...]
    tokens_P: NDArray[np.float64]  # of a step, at each place
    seconds_P: NDArray[np.float64]

    @property
    def tokens_per_step(self) -> float:
        """The mean."""
        return float(self.tokens_P.mean())

    @property
    def step_seconds(self) -> float:
        """The mean."""
        return float(self.seconds_P.mean())

    @property
    def tokens_per_second(self) -> float:
        """Over all places."""
        return self.tokens_per_step / self.step_seconds

    def of_texts(self, texts_P: NDArray[np.int64]) -> NDArray[np.float64]:
        """Tokens a second of each text that has a place."""
        count = int(texts_P.max()) + 1
        tokens = np.bincount(texts_P, self.tokens_P, count)
        seconds = np.bincount(texts_P, self.seconds_P, count)
        there = seconds > 0
        found: NDArray[np.float64] = tokens[there] / seconds[there]
        return found


def level_sizes(widths: Widths) -> list[int]:
    """The nodes of each level of such a tree."""
    return [int(size) for size in np.cumprod(widths)]


def speed_of(candidates: Sequence[Candidate], target: CostCurve, shapes: Mapping[int, Widths]) -> Speed:
    """What members make, by their places in `candidates`, with trees of these shapes."""
    places = len(candidates[0].along.texts_P)
    accepted = [_accepted(candidates[member], widths) for member, widths in shapes.items()]
    tokens_P = np.ones(places) + (np.max(accepted, axis=0) if accepted else 0.0)
    nodes_P = np.ones(places, dtype=np.int64)
    for widths in shapes.values():
        nodes_P += sum(level_sizes(widths))
    for level in range(1, 1 + max((len(widths) for widths in shapes.values()), default=0)):
        together_P = np.sum([accepted_P >= level for accepted_P in accepted], axis=0)
        nodes_P -= np.maximum(together_P - 1, 0)
    asked = sum(candidates[member].seconds(widths) for member, widths in shapes.items())
    return Speed(tuple(shapes), tuple(shapes.values()), tokens_P, target.seconds(nodes_P) + asked)


def best_shapes(candidates: Sequence[Candidate], target: CostCurve, members: Sequence[int]) -> Speed:
    """The quickest shapes of these members, found one member at a time, round after round."""
    shapes: dict[int, Widths] = {}
    best: Speed | None = None
    for _ in range(_ROUNDS):
        before = best
        for member in members:
            for widths in candidates[member].shapes():
                now = {**shapes, member: widths}
                tried = {one: now[one] for one in members if one in now}
                speed = speed_of(candidates, target, tried)
                if member not in shapes or best is None or speed.tokens_per_second > best.tokens_per_second:
                    shapes, best = tried, speed
        if best is before:
            break
    assert best is not None
    return best


def selected(candidates: Sequence[Candidate], target: CostCurve) -> list[Speed]:
    """The quickest pools of one member, of two, and so on: each is the one before it and one member more."""
    chosen: list[int] = []
    found: list[Speed] = []
    while len(chosen) < len(candidates):
        left = [number for number in range(len(candidates)) if number not in chosen]
        tried = [best_shapes(candidates, target, [*chosen, number]) for number in left]
        best = max(range(len(left)), key=lambda i: (tried[i].tokens_per_second, -left[i]))
        chosen.append(left[best])
        found.append(tried[best])
    return found


def quickest(pools: Sequence[Speed]) -> Speed:
    """The pool that makes the most tokens a second; of equal ones the smaller."""
    return max(pools, key=lambda pool: pool.tokens_per_second)


def _accepted(candidate: Candidate, widths: Widths) -> NDArray[np.int64]:
    found: NDArray[np.int64] = candidate.along.accepted(widths).numpy()
    return found
