"""Ledger of open works: their output so far and their replicas, without any process.

Under the coupled rule a text is a function of target, prompt and seed. An engine with the same fingerprint
can therefore continue a work behind the tokens that another engine produced: the text is the same, and no
token is lost or sent twice. Under multi-step sampling only the distribution would be the same, so an answer
that has started ends with an error if its engine dies.

An engine reports the works of each step before the step runs, so a crash may be due to one of them. A work
that was in two crashes, and did not progress between them, becomes a suspect: an engine's first token comes
with the prompt, and only the next one is progress. A suspect goes to an engine without other works, if one
runs or is being started. An engine with a suspect gets its works one by one, each after the previous one has
progressed. The third crash then identifies the work at fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from specinfer.request import Delta
from specinfer.serve.backend.work import BackendError, UnavailableError, Work

_MAX_DEATHS: Final = 3  # engines that die while busy with a work, without progress, before the work fails
_MAX_DEATHS_IN_ALL: Final = 10  # the same, with progress between them


@dataclass(eq=False)
class Waiter:
    """Consumer of some works, with the deltas that it has not read yet."""

    pending: dict[str, list[Delta]] = field(default_factory=dict)  # by work id
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BackendError | None = None
    started: bool = False  # True after the first step of one of its works has started

    def fail(self, failure: BackendError) -> None:
        """End all its works with `failure`."""
        self.failure = failure
        self.arrived.set()


@dataclass(eq=False)
class OpenWork:
    """Work that has not ended."""

    work: Work
    waiter: Waiter
    session: str = ""  # its works go to one replica
    output_ids: list[int] = field(default_factory=list)  # output tokens so far
    maker: str | None = None  # fingerprint of the engines that produced them
    deaths: int = 0  # engines that died while busy with it, since it progressed
    deaths_in_all: int = 0
    deltas: int = 0  # with tokens, from this replica's engine; the first is of the prefill
    replica: int | None = None  # None while it waits for one
    sent: bool = False  # whether this replica's engine has it

    @property
    def progressed(self) -> bool:
        """True if this engine has sent a token after the first, which comes with the prompt."""
        return self.deltas > 1

    @property
    def is_suspect(self) -> bool:
        """True if one more crash ends it."""
        return self.deaths == _MAX_DEATHS - 1


class Ledger:
    """All open works; `verifier` is the default verification rule. Belongs to one event loop."""

    def __init__(self, verifier: str) -> None:
        self._verifier = verifier
        self._works: dict[str, OpenWork] = {}  # by work id, in the order of arrival
        self.handed_on = 0  # times that a work moved from one engine to another

    def add(self, one: OpenWork) -> None:
        """Add a new work, without a replica."""
        self._works[one.work.id] = one

    def end(self, names: Iterable[str]) -> dict[int, list[str]]:
        """Remove these works; returns the names that engines have to abort, by replica."""
        sent: dict[int, list[str]] = {}
        for name in names:
            if (one := self._works.pop(name, None)) is not None and one.replica is not None:
                sent.setdefault(one.replica, []).extend([name] * one.sent)
        return sent

    def load(self, replica: int) -> int:
        """Number of a replica's works."""
        return sum(one.replica == replica for one in self._works.values())

    def of(self, replica: int | None) -> list[OpenWork]:
        """The works of a replica; for None, the works that wait for one."""
        return [one for one in self._works.values() if one.replica == replica]

    def assign(self, one: OpenWork, replica: int) -> None:
        """Assign a work to a replica; `take_sendable` returns it when the engine may have it."""
        self.handed_on += one.sent
        one.replica, one.sent, one.deltas = replica, False, 0

    def take_sendable(self, replica: int) -> list[Work]:
        """Works to send to a replica's engine now; marks them as sent."""
        works = self.of(replica)
        due = [one for one in works if not one.sent]
        if due and any(one.is_suspect for one in works):
            # While a work has not progressed, it may be the cause of a crash: send no other.
            due = [] if any(one.sent and not one.progressed for one in works) else due[:1]
        for one in due:
            one.sent = True
        # With its output so far, for another engine to continue.
        return [replace(one.work, prior_output=tuple(one.output_ids)) for one in due]

    def receive(self, replica: int, fingerprint: str, deltas: Iterable[Delta]) -> None:
        """Take deltas of a replica's engine, which has this fingerprint."""
        for delta in deltas:
            one = self._works.get(delta.id)
            if one is None or one.replica != replica:
                continue  # it was aborted, or another replica has it now
            if delta.finish_reason is not None:
                del self._works[delta.id]
            elif delta.token_ids:
                one.output_ids.extend(delta.token_ids)
                one.maker, one.deltas = fingerprint, one.deltas + 1
                if one.progressed:
                    one.deaths = 0
                if delta.prompt_logprobs is not None:  # sent now; another engine does not compute them again
                    one.work = replace(one.work, params=replace(one.work.params, prompt_logprobs=None))
            waiter = one.waiter
            waiter.pending.setdefault(delta.id, []).append(delta)
            waiter.started = waiter.started or delta.started or not delta.is_empty
            waiter.arrived.set()

    def engine_died(self, replica: int, busy: frozenset[str] | None) -> None:
        """Record that a replica's engine died while `busy` with works; None if it had not reported any.

        Its works wait for a replica again, except those that fail.
        """
        for one in self.of(replica):
            died = one.sent and (busy is None or one.work.id in busy)
            one.deaths, one.deaths_in_all = one.deaths + died, one.deaths_in_all + died
            one.replica = None
            if one.deaths_in_all >= _MAX_DEATHS_IN_ALL:
                self.give_up(one, f"the engine died {one.deaths_in_all} times while it had this request")
            elif one.deaths >= _MAX_DEATHS:
                self.give_up(one, f"the engine died {one.deaths} times in a row while it had this request")
            elif not self.may_move(one):
                self.give_up(one, "the engine died; under mss no other can continue a text that has started")

    def may_move(self, one: OpenWork) -> bool:
        """True if another engine with the same fingerprint continues the work with the same text."""
        params = one.work.params
        verifier = params.speculation.verifier or self._verifier
        return not one.output_ids or params.greedy or verifier == "coupled"

    def give_up(self, one: OpenWork, reason: str) -> None:
        """End a work with a BackendError that has this reason."""
        self.end([one.work.id])
        one.waiter.fail(BackendError(reason))

    def fail_all(self, reason: str) -> int:
        """Fail all works with an UnavailableError that has this reason; returns their number.

        They stay in the ledger until their consumers call `end`.
        """
        for one in self._works.values():
            one.waiter.fail(UnavailableError(reason))
        return len(self._works)
