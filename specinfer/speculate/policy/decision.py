"""What was decided about one request's guesses in a step, and why: for people who want to see it.

Nothing here is made unless somebody asks (`Ensemble.explain`), and nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from specinfer.plan import PlanEntry, StepPlan
from specinfer.tree import TokenTree


class Why(StrEnum):
    """Why a speculator has guessed or has not; the text of each is what people are shown."""

    GUESSED = "guessed"
    NO_GUESS = "no guess"  # it was asked, and had none
    PRICE = "not worth its price"  # a draft's first level
    GUARD = "off by the guard"  # guesses have lost time
    PLAIN = "plain step"  # kept without guesses: others are compared with it
    HELD = "held back by the policy"  # which does not say why
    REQUEST = "not for this request"  # by its parameters, or as there is nothing to guess from
    ROOM = "no room"  # the text is about to end, or the request may have no nodes
    FAILED = "failed before"


@dataclass(frozen=True, slots=True)
class Appraisal:
    """What a policy expects of a step with the trees it has chosen."""

    hopes: Sequence[Sequence[float]]  # of each tree's nodes: the probability to become text; the root's is 1
    price: float  # seconds that the guesses of all requests take: drafts' passes, and rows of the target's
    seconds: float  # of the step
    nobody: Why | None = None  # why nobody was let guess, but for requests with a size of their own


@dataclass(frozen=True, slots=True)
class Turn:
    """One speculator's part in one request's step."""

    speculator: str
    why: Why
    drawn: int = 0  # nodes it has guessed
    kept: int = 0  # of these, verified by the target
    levels: int = 0  # below the root, of what it has guessed


@dataclass(frozen=True, slots=True)
class Decision:
    """Who guessed for one request in one step, who did not, and what was expected of it."""

    turns: tuple[Turn, ...]  # in the order in which they are asked
    hopes: tuple[float, ...] = ()  # of the nodes verified, as in Appraisal; (): nobody has weighed them
    price: float | None = None  # as in Appraisal, of all requests of the step
    seconds: float | None = None
    requests: int = 1  # in the step

    @property
    def hope(self) -> float | None:
        """The tokens that the step is expected to bring the request."""
        return sum(self.hopes) if self.hopes else None

    def to_json(self) -> dict[str, Any]:
        """The decision as plain JSON values; what nobody has weighed is null."""
        return {
            "speculators": [
                {
                    "name": turn.speculator,
                    "why": turn.why.value,
                    "drawn": turn.drawn,
                    "kept": turn.kept,
                    "levels": turn.levels,
                }
                for turn in self.turns
            ],
            "hope": None if self.hope is None else round(self.hope, 4),
            "hopes": [round(hope, 4) for hope in self.hopes],
            "price": None if self.price is None else round(self.price, 6),
            "expected_seconds": None if self.seconds is None else round(self.seconds, 6),
            "requests": self.requests,
        }


@dataclass(slots=True)
class Proposed:
    """What is left of a step in which all have guessed; written by the ensemble as it goes."""

    plan: StepPlan
    shown: StepPlan  # what the policy has made of it
    guessed: Sequence[TokenTree] = ()  # of each of its tree entries, before anything was dropped
    chosen: Sequence[TokenTree] = ()
    refused: dict[str, list[PlanEntry]] = field(default_factory=dict)  # first levels not worth their price

    def decisions(
        self, names: Sequence[str], failed: Collection[str], appraisal: Appraisal | None
    ) -> list[Decision]:
        """A decision for each of the plan's tree entries; `names` are of all speculators in their order."""
        refused = {
            name: {entry.request.request_id for entry in entries} for name, entries in self.refused.items()
        }
        return [
            Decision(
                tuple(self._turn(i, name, refused, failed, appraisal) for name in names),
                () if appraisal is None else tuple(appraisal.hopes[i]),
                None if appraisal is None else appraisal.price,
                None if appraisal is None else appraisal.seconds,
                len(self.plan.entries),
            )
            for i in range(len(self.plan.tree_entries))
        ]

    def _turn(
        self,
        i: int,
        name: str,
        refused: Mapping[str, Collection[str]],
        failed: Collection[str],
        appraisal: Appraisal | None,
    ) -> Turn:
        entry, shown, tree = self.plan.tree_entries[i], self.shown.tree_entries[i], self.guessed[i]
        nodes = {draw.node for draw in tree.draws if draw.speculator == name}
        if nodes:
            kept = {draw.node for draw in self.chosen[i].draws if draw.speculator == name}
            depths = tree.depths()
            return Turn(name, Why.GUESSED, len(nodes), len(kept), max(depths[node] for node in nodes))
        if name in failed:
            return Turn(name, Why.FAILED)
        if not entry.lets_guess(name):
            return Turn(name, Why.REQUEST)
        if not shown.lets_guess(name):
            nobody = None if appraisal is None else appraisal.nobody
            return Turn(name, Why.HELD if nobody is None else nobody)
        if entry.max_nodes < 2 or entry.max_depth < 1:
            return Turn(name, Why.ROOM)
        if entry.request.request_id in refused.get(name, ()):
            return Turn(name, Why.PRICE)
        return Turn(name, Why.NO_GUESS)
