"""Decisions about one request's guesses in a step, with their reasons, for display.

They are made only when `Ensemble.explain` is called, and no code depends on them.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from specinfer.plan import PlanEntry, StepPlan
from specinfer.tree import TokenTree

# Displayed reasons why a speculator guessed or did not.
GUESSED: Final = "guessed"
NO_GUESS: Final = "no guess"  # it ran and returned none
COST: Final = "not worth its cost"  # a draft's first level
GUARD: Final = "off by the guard"  # speculation has lost time
PLAIN: Final = "plain step"  # a step without guesses, timed for comparison
HELD: Final = "held back by the policy"  # without a further reason
REQUEST: Final = "not for this request"  # excluded by its parameters, or nothing to guess from
ROOM: Final = "no room"  # the text is about to end, or the request has no node budget
FAILED: Final = "failed before"


@dataclass(frozen=True, slots=True)
class Appraisal:
    """A policy's estimates for a step with the trees it has chosen."""

    probabilities: Sequence[Sequence[float]]  # acceptance probabilities of each tree's nodes; the root's is 1
    guess_seconds: float  # seconds for all guesses: drafts' passes, and additional rows of the target's pass
    seconds: float  # seconds of the step
    held: str | None = None  # why no speculator runs, except for requests with their own size


@dataclass(frozen=True, slots=True)
class Contribution:
    """One speculator's part in one request's step."""

    name: str  # of the speculator
    reason: str
    drawn: int = 0  # nodes that it drew
    verified: int = 0  # drawn nodes that the target verifies
    levels: int = 0  # levels of its guesses below the root


@dataclass(frozen=True, slots=True)
class Decision:
    """Each speculator's part in one request's step, and the policy's estimates."""

    contributions: tuple[Contribution, ...]  # in the order in which speculators run
    probabilities: tuple[float, ...] = ()  # acceptance probabilities of the verified nodes; (): no estimate
    guess_seconds: float | None = None  # as in Appraisal, for all requests of the step
    seconds: float | None = None
    requests: int = 1  # requests in the step

    @property
    def expected_tokens(self) -> float | None:
        """Expected tokens of the request in this step, or None without an estimate."""
        return sum(self.probabilities) if self.probabilities else None

    def to_json(self) -> dict[str, Any]:
        """Return the decision as JSON values; null without an estimate."""
        tokens, guesses, seconds = self.expected_tokens, self.guess_seconds, self.seconds
        return {
            "speculators": [asdict(one) for one in self.contributions],
            "expected_tokens": None if tokens is None else round(tokens, 4),
            "probabilities": [round(likely, 4) for likely in self.probabilities],
            "guess_seconds": None if guesses is None else round(guesses, 6),
            "expected_seconds": None if seconds is None else round(seconds, 6),
            "requests": self.requests,
        }


@dataclass(slots=True)
class Proposed:
    """The guesses of a step, for `Ensemble.explain`; the ensemble fills it."""

    plan: StepPlan
    shown: StepPlan  # the plan that the policy passes to speculators
    guessed: Sequence[TokenTree] = ()  # one per tree entry, before nodes are dropped
    chosen: Sequence[TokenTree] = ()
    refused: dict[str, list[PlanEntry]] = field(default_factory=dict)  # first levels not worth their cost

    def decisions(
        self, names: Sequence[str], failed: Collection[str], appraisal: Appraisal | None
    ) -> list[Decision]:
        """Return a decision for each of the plan's tree entries; `names` are all speculators in order."""
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
