"""The two kinds of speculators: proposing trees, or growing them by levels (docs/add_a_speculator.md)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specinfer.plan import StepPlan
from specinfer.request import Request
from specinfer.tree import TokenTree

if TYPE_CHECKING:  # who only asks what a speculator may do loads no models
    from specinfer.runtime.features import TextFeatures


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one step for one request."""

    request_id: str
    committed: tuple[int, ...]  # the tokens this step added, accepted then bonus; empty on abort
    finished: bool  # no further step will come: forget the request


class SpeculatorBase:
    """A named guesser: the members that both kinds of speculators have, with their defaults.

    It learns of every commit, whoever proposed it, of the requests it may guess for and of others. It may
    keep state by request id; `Outcome.finished` ends it. One that raises is not asked again (ensemble.py).
    """

    name: str  # short, unique in the engine; draws and figures carry it
    # Whether it guesses from answers to other requests. Such a guess may know the random numbers that
    # multi-step sampling with a seed is about to use, so it is not asked there.
    remembers_answers: bool = False
    # The target's layers whose inputs it reads, as LanguageModel.run_layers counts them.
    taps: tuple[int, ...] = ()

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn which tokens were committed, and which requests ended."""

    def most_nodes(self, request: Request) -> int | None:
        """The nodes below the root that it may propose for a request; 0: it has nothing to guess from.

        None: as many as the request may have.
        """
        return None

    def hear(self, texts: Sequence[TextFeatures]) -> None:
        """Take in the hidden states (`taps`) of texts that a pass has read or written.

        Each text goes on where it ended, or begins anew. Called before the step's outcomes are told;
        requests that ended are left out.
        """

    def see_choices(self, guessed: Sequence[TokenTree], chosen: Sequence[TokenTree]) -> None:
        """Note the merged trees of a step in which it was asked, and their parts that are verified."""


class Speculator(SpeculatorBase, ABC):
    """A speculator that proposes whole trees."""

    @abstractmethod
    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """One tree for each of `plan.tree_entries`, of at most `entry.max_nodes` nodes.

        A tree is rooted at the entry's last token. The plan holds the requests it may guess for, those whose
        prompts are being read among them: they want no tree, and show the text to come.
        """


class LevelSpeculator(SpeculatorBase, ABC):
    """A speculator that grows the trees of a step level by level, and is asked before each level.

    A level costs a pass of a model, and each node in it a row. So the policy (policy/) decides below which
    nodes the next level is drawn, knowing the draws so far.
    """

    @abstractmethod
    def begin(self, plan: StepPlan) -> list[int]:
        """Open a step; for each of `plan.entries` the tokens of its text this speculator has not read."""

    @abstractmethod
    def deepen(self, below: Mapping[int, Sequence[int]]) -> Mapping[int, Sequence[int]]:
        """Draw children below these nodes of the trees of these of the plan's entries.

        At first each entry comes with node 0, and its text is read, as far as this step computes it. An entry
        without a tree is only read; so is one whose text is too long to be read in one step. Later they are
        nodes of those returned before: the nodes of each entry's tree below which it can go on, likely ones
        or not; none of an entry that has no room for more. A speculator that can only go on with all of them
        may do so.
        """

    @abstractmethod
    def tree(self, entry: int) -> TokenTree:
        """The tree of the plan's entry of that number, as it has grown so far."""


AnySpeculator = Speculator | LevelSpeculator
