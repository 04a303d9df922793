"""What a speculator owes: trees for a step, at once or level by level (docs/add_a_speculator.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from specinfer.plan import PlanEntry, StepPlan
from specinfer.request import Request
from specinfer.tree import TokenTree

if TYPE_CHECKING:  # who only asks what a speculator may do loads no models
    from specinfer.runtime.features import TextFeatures


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request in one step."""

    request_id: str
    committed: tuple[int, ...]  # the tokens this step added, accepted then bonus; empty on abort
    finished: bool  # no further step will come: forget the request


class LevelOutcome(NamedTuple):
    """What became of a request's guesses at one level of a tree, the root's children being level 0."""

    request_id: str
    level: int
    choice: int | None  # which of the draws below the node of the text became text: 0 the first; None: none


class Observer(Protocol):
    """What every speculator is: named, and told what became text.

    It learns of every commit, whoever proposed it, of the requests it may guess for and of others. It may
    keep state by request id; `Outcome.finished` ends it. One that raises is not asked again (ensemble.py).
    """

    @property
    def name(self) -> str:
        """A short name, unique in the engine; draws and figures carry it."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what was committed, and which requests ended."""
        ...


class Speculator(Observer, Protocol):
    """Something that guesses continuations.

    A speculator that also has `most_nodes(request) -> int`, the nodes it may propose below a root, 0 where it
    has nothing to guess from, is given no more room than that (`KnowsItsSize`).
    """

    def propose(self, plan: StepPlan) -> list[TokenTree]:
        """One tree for each of `plan.tree_entries`, of at most `entry.max_nodes` nodes.

        A tree is rooted at the entry's last token. The plan holds the requests it may guess for, those whose
        prompts are being read among them: they want no tree, and show what is to come.
        """
        ...


@runtime_checkable
class LevelSpeculator(Observer, Protocol):
    """A speculator that grows the trees of a step level by level, and is asked before each level.

    So that whoever decides (policy/) knows what was drawn so far when it says who goes on, and where: a
    level costs a pass of a model, and each node in it a row. `begin` opens a step, `deepen` draws, `tree`
    shows.
    """

    def begin(self, plan: StepPlan) -> list[int]:
        """Open a step; for each of `plan.entries` the tokens of its text this speculator has not read."""
        ...

    def deepen(self, below: Mapping[int, Sequence[int]]) -> Mapping[int, Sequence[int]]:
        """Draw children below these nodes of the trees of these of the plan's entries.

        At first each entry comes with node 0, and its text is read, as far as this step computes it. An entry
        without a tree is only read; so is one whose text is too long to be read in one step. Later they are
        nodes of those returned before: the nodes of each entry's tree below which it can go on, likely ones
        or not; none of an entry that has no room for more. Who can only go on with all of them may.
        """
        ...

    def tree(self, entry: int) -> TokenTree:
        """The tree of the plan's entry of that number, as it has grown so far."""
        ...


@runtime_checkable
class ReadsTarget(Observer, Protocol):
    """A speculator that reads the target's hidden states of the texts it may guess for."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose inputs it reads, as LanguageModel.run_layers counts them."""
        ...

    def hear(self, texts: Sequence[TextFeatures]) -> None:
        """Take in what a pass has left of texts, each of which goes on where it ended, or begins anew.

        Told before the step's outcomes; of requests that ended nothing is told.
        """
        ...


@runtime_checkable
class KnowsItsSize(Protocol):
    """A speculator that says how many nodes it may propose."""

    def most_nodes(self, request: Request) -> int:
        """The nodes below the root that it may propose for a request; 0: it has nothing to guess from."""
        ...


@runtime_checkable
class SeesChoices(Protocol):
    """A speculator that guesses about as much as is verified: more is grown and weighed in vain."""

    def see_choices(self, guessed: Sequence[TokenTree], chosen: Sequence[TokenTree]) -> None:
        """Take note of what all have guessed in a step, of each request, and what will be verified of it."""
        ...


@runtime_checkable
class HasHindsight(Protocol):
    """A level speculator that finds out what it would have guessed where it was not asked."""

    def hindsight(self) -> Sequence[LevelOutcome]:
        """What the last pass has shown of such places, in the order of their texts."""
        ...


@runtime_checkable
class ExtendsGuesses(Protocol):
    """A speculator that can go on from what another guessed: point masses, in microseconds."""

    def extend(self, entry: PlanEntry, path: Sequence[int], most: int) -> TokenTree:
        """What follows if the entry's text goes on with `path`: a tree rooted at its last token.

        Args:
            entry: one it was asked about in this step.
            path: tokens guessed behind `entry.end`, at least one.
            most: nodes at most, the root included, 2 or more; none lies deeper than that below the root.
        """
        ...
