"""What a policy asks of a step's guesses: what they are hoped to bring, which of them pay, what came of them.

All questions are about all requests at once. They are answered in plain Python (plain_weighing.py) or, to the
last bit alike, by a library (native_weighing.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from specinfer.plan import PlanEntry
from specinfer.speculate.policy.level_counts import LevelRate
from specinfer.speculate.speculator import Outcome
from specinfer.tree import TokenTree

# Beside drafts the odds of what none of them has guessed count as so much. Estimates of lookups are right on
# average, but those that a step is built on are the ones that came out too high (docs/log.md).
BESIDE: Final = 0.5
_MORE_ROWS: Final = 4  # over which the price of a row is taken: a curve has steps


class StepCosts(NamedTuple):
    """What a step takes, by the nodes below its roots, and what it makes in any case."""

    passes: Sequence[float]  # seconds of the target's pass by its rows
    rows: int  # of it without such nodes
    last: int  # and with all that there may be
    spent: float  # seconds of drafts' passes, less those its prompts take
    tokens: float  # one for each request

    def seconds(self, nodes: int) -> float:
        """Of the step with so many nodes, as far as it has been spent or will be."""
        return self.spent + self.passes[min(self.rows + nodes, self.last)]

    def seconds_from(self, nodes: int, more: int) -> list[float]:
        """Of the step with so many nodes, and with 1, 2, ... `more`."""
        first = self.rows + nodes
        found = [*map(self.spent.__add__, self.passes[first : min(first + more, self.last) + 1])]
        return found + [self.seconds(nodes + more)] * (more + 1 - len(found))

    def price(self, tokens: float, nodes: int) -> float:
        """The tokens that another row of the target's costs, if a step makes so many with so many nodes."""
        seconds = self.seconds(nodes)
        return tokens * (self.seconds(nodes + _MORE_ROWS) - seconds) / (_MORE_ROWS * seconds)


class Expected(NamedTuple):
    """The step as it would be with what others have guessed, for a draft that may start."""

    tokens: float
    nodes: int  # below roots
    price: float  # tokens that another row of the target's costs
    left: Sequence[float]  # of each tree, how likely nobody holds the token behind its root
    made: Sequence[float]  # and the tokens it makes


class Grown(NamedTuple):
    """A draft's tree that has grown by a level."""

    number: int  # of the entry
    tree: TokenTree
    ends: Sequence[int]  # nodes that may get children, if another pass is made
    rates: Sequence[LevelRate]  # of the level below each of these


class Weighing(Protocol):
    """Asked in this order in each step; `expect` and what comes of it once for each draft."""

    def begin(self, entries: Sequence[PlanEntry]) -> None:
        """A step of these entries begins; all have trees, and go by their numbers."""
        ...

    def expect(self, trees: Sequence[TokenTree], costs: StepCosts, doubt: float) -> Expected:
        """The step with what others have guessed so far, one tree for each entry, as a draft may start.

        `doubt` is what the odds of what no draft has drawn count as. What a draft has grown is forgotten.
        """
        ...

    def deepen(
        self, grown: Sequence[Grown], costs: StepCosts, passes: Sequence[float], rows: float
    ) -> list[bool]:
        """Which of all these ends, in order, are worth the draft's next pass.

        Args:
            grown: the trees of a draft to which it has added, of some entries, behind `expect`.
            costs: of the step.
            passes: seconds of the draft's pass for 0, 1, ... of the ends, and maybe for more.
            rows: of the target that each of them will bring.
        """
        ...

    def choose(self, trees: Sequence[TokenTree], costs: StepCosts) -> list[TokenTree]:
        """Of the trees in which all have guessed, one for each entry, the nodes that make the step faster.

        Of each as many as it may have, and of requests with a size of their own as many as there are.
        """
        ...

    def hopes(self, trees: Sequence[TokenTree]) -> list[list[float]]:
        """How likely the nodes of trees, one for each entry, are to become text, [num_nodes] each.

        May be asked at any time: it changes nothing.
        """
        ...

    def learn(self, outcomes: Sequence[tuple[int, Outcome]]) -> None:
        """Learn what became of guesses: of the trees that were chosen from, by number, verified or not.

        And let drafts that have a price learn what became of their levels.
        """
        ...
