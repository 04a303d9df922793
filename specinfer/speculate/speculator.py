"""The two-method protocol every speculator keeps (docs/add_a_speculator.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specinfer.plan import PlanEntry
from specinfer.tree import TokenTree


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request in one step."""

    request_id: str
    committed: tuple[int, ...]  # the tokens this step added, accepted then bonus; empty on abort
    finished: bool  # no further step will come: forget the request


class Speculator(Protocol):
    """Something that guesses continuations.

    A speculator may be asked about any subset of the running requests in any step, and learns of every
    commit, whoever proposed it. It may keep state by request id; `Outcome.finished` ends it.
    """

    @property
    def name(self) -> str:
        """A short name, unique in the engine; draws and credit carry it."""
        ...

    def propose(self, entries: Sequence[PlanEntry]) -> list[TokenTree]:
        """One tree per entry, rooted at the entry's last token, of at most `entry.max_nodes` nodes."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what was committed, and which requests ended."""
        ...
