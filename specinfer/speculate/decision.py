"""The decisions about one request's guesses in a step, and the reasons: for people who want to see them.

Nothing here is made unless somebody asks (`Ensemble.explain`), and nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from specinfer.plan import PlanEntry, StepPlan
from specinfer.tree import TokenTree

# Reasons why a speculator has guessed or has not, as they are shown.
GUESSED: Final = "guessed"
NO_GUESS: Final = "no guess"  # it was asked, and had none
COST: Final = "not worth its cost"  # a draft's first level
GUARD: Final = "off by the guard"  # guesses have lost time
PLAIN: Final = "plain step"  # kept without guesses: others are compared with it
HELD: Final = "held back by the policy"  # which gives no reason
REQUEST: Final = "not for this request"  # by its parameters, or as there is nothing to guess from
ROOM: Final = "no room"  # the text is about to end, or the request may have no nodes
FAILED: Final = "failed before"


@dataclass(frozen=True, slots=True)
class Appraisal:
    """The expectations of a policy for a step with the trees it has chosen."""

    probabilities: Sequence[Sequence[float]]  # of each tree's nodes to become text; the root's is 1
    guess_seconds: float  # of the guesses of all requests: drafts' passes, and rows of the target's
    seconds: float  # of the step
    held: str | None = None  # why nobody may guess, but for requests with a size of their own


@dataclass(frozen=True, slots=True)
class Contribution:
    """One speculator's part in one request's step."""

    speculator: str
    reason: str
    drawn: int = 0  # nodes it has guessed
    verified: int = 0  # of these, by the target
    levels: int = 0  # below the root, of its guesses


@dataclass(frozen=True, slots=True)
class Decision:
    """The speculators that guessed for one request in one step, those that did not, and the expectations."""

    contributions: tuple[Contribution, ...]  # in the order in which they are asked
    probabilities: tuple[float, ...] = ()  # of the nodes verified, as in Appraisal; (): not weighed
    guess_seconds: float | None = None  # as in Appraisal, of all requests of the step
    seconds: float | None = None
    requests: int = 1  # in the step

    @property
    def expected_tokens(self) -> float | None:
        """The tokens that the step is expected to bring the request."""
        return sum(self.probabilities) if self.probabilities else None

    def to_json(self) -> dict[str, Any]:
        """The decision as plain JSON values; null where the policy does not weigh."""
        speculators = [
            {
                "name": one.speculator,
                "reason": one.reason,
                "drawn": one.drawn,
                "verified": one.verified,
                "levels": one.levels,
            }
            for one in self.contributions
        ]
        tokens, guesses, seconds = self.expected_tokens, self.guess_seconds, self.seconds
        return {
            "speculators": speculators,
            "expected_tokens": None if tokens is None else round(tokens, 4),
            "probabilities": [round(likely, 4) for likely in self.probabilities],
            "guess_seconds": None if guesses is None else round(guesses, 6),
            "expected_seconds": None if seconds is None else round(seconds, 6),
            "requests": self.requests,
        }


@dataclass(slots=True)
class Proposed:
    """The guesses of a step, kept for `Ensemble.explain`; written by the ensemble as it goes."""

    plan: StepPlan
    shown: StepPlan  # as the policy lets speculators see it
    guessed: Sequence[TokenTree] = ()  # of each of its tree entries, before anything was dropped
    chosen: Sequence[TokenTree] = ()
    refused: dict[str, list[PlanEntry]] = field(default_factory=dict)  # first levels not worth their cost

    def decisions(
        self, names: Sequence[str], failed: Collection[str], appraisal: Appraisal | None
    ) -> list[Decision]:
        """A decision for each of the plan's tree entries; `names` are of all speculators in their order."""
        refused = {
            name: {entry.request.request_id for entry in entries} for name, entries in self.refused.items()
        }
        held = None if appraisal is None else appraisal.held
        return [
            Decision(
                tuple(
                    self._contribution(i, name, refused.get(name, ()), failed, held or HELD) for name in names
                ),
                () if appraisal is None else tuple(appraisal.probabilities[i]),
                None if appraisal is None else appraisal.guess_seconds,
                None if appraisal is None else appraisal.seconds,
                len(self.plan.entries),
            )
            for i in range(len(self.plan.tree_entries))
        ]

    def _contribution(
        self, i: int, name: str, refused: Collection[str], failed: Collection[str], held: str
    ) -> Contribution:
        entry, shown, tree = self.plan.tree_entries[i], self.shown.tree_entries[i], self.guessed[i]
        nodes = {draw.node for draw in tree.draws if draw.speculator == name}
        if nodes:
            verified = {draw.node for draw in self.chosen[i].draws if draw.speculator == name}
            depths = tree.depths()
            return Contribution(name, GUESSED, len(nodes), len(verified), max(depths[node] for node in nodes))
        if name in failed:
            return Contribution(name, FAILED)
        if not entry.lets_guess(name):
            return Contribution(name, REQUEST)
        if not shown.lets_guess(name):
            return Contribution(name, held)
        if entry.max_nodes < 2 or entry.max_depth < 1:
            return Contribution(name, ROOM)
        return Contribution(name, COST if entry.request.request_id in refused else NO_GUESS)
