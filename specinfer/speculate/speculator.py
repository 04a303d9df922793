"""Base classes of speculators: whole trees, or trees grown level by level (docs/add_a_speculator.md)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specinfer.plan import StepPlan
from specinfer.request import Request
from specinfer.tree import TokenTree

if TYPE_CHECKING:  # reading the limits of speculators does not load models
    from specinfer.runtime.features import TextFeatures


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one step for one request."""

    request_id: str
    committed: tuple[int, ...]  # tokens that the step added, accepted then bonus; empty after an abort
    finished: bool  # True if the request has no further step; its state can be freed


class SpeculatorBase:
    """Members of both kinds of speculators, with their defaults.

    `observe` gets every commit, of any speculator's guess and of any request. A speculator may keep state by
    request id until `Outcome.finished`. One that raises is never called again (ensemble.py).
    """

    name: str  # short, unique in the engine; draws and counters carry it
    # True if it guesses from answers to other requests. Such a guess may depend on the random numbers that
    # multi-step sampling with a seed is about to use, so the speculator does not run there.
    remembers_answers: bool = False
    # The target's layers whose inputs it reads, numbered as in LanguageModel.run_layers.
    taps: tuple[int, ...] = ()

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn which tokens were committed, and which requests ended. Does nothing by default."""

    def max_nodes(self, request: Request) -> int | None:
        """Return the maximum nodes below the root for a request; 0: no guess is possible.

        None, the default: as many as the request may have.
        """
        return None

    def receive_states(self, texts: Sequence[TextFeatures]) -> None:
        """Receive the hidden states (`taps`) of texts that a pass has computed. Does nothing by default.

        Each text continues at its former end, or starts again. Called before `observe`, without the requests
        that ended.
        """

    def see_choices(self, guessed: Sequence[TokenTree], chosen: Sequence[TokenTree]) -> None:
        """Receive the merged trees of a step in which it ran, and their verified parts."""


class Speculator(SpeculatorBase, ABC):
    """A speculator that proposes whole trees."""

    @abstractmethod
    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """Return one tree for each of `plan.tree_entries`, of at most `entry.max_nodes` nodes.

        The root of a tree is the entry's last token, and its depth is at most `entry.max_depth`. The plan has
        the requests that this speculator may guess for. Its prefill entries need no tree; they show the
        prompt. An exception, or an invalid tree, switches the speculator off.
        """


class LevelSpeculator(SpeculatorBase, ABC):
    """A speculator that grows the trees of a step level by level.

    A level costs a pass of a model, and each of its nodes a row. So before each level the policy (policy/)
    decides, from the draws so far, below which nodes it is drawn.
    """

    retired: bool = False  # True once its model can never run again, whatever a policy decides

    @abstractmethod
    def begin(self, plan: StepPlan) -> list[int]:
        """Start a step; returns the unread tokens of the text of each of `plan.entries`."""

    @abstractmethod
    def deepen(self, below: Mapping[int, Sequence[int]]) -> Mapping[int, Sequence[int]]:
        """Draw children below nodes of trees, both given by number of the plan's entry.

        In the first call each entry has node 0, and its text is read up to the end of this step's tokens. An
        entry without a tree is only read, as is one whose text is too long for one step. Later calls have
        nodes that the call before returned. A speculator that can only extend all of its nodes may do so.

        Returns:
            The nodes of each entry's tree below which it can draw further, likely or not; entries without
            room for more nodes are left out.
        """

    @abstractmethod
    def tree(self, entry: int) -> TokenTree:
        """Return the present tree of an entry, given by its number in the plan."""


AnySpeculator = Speculator | LevelSpeculator
