"""Ledger: every answer in progress, what was said of it, and which replica has it. It knows no process.

Under the coupled rule a text is a function of target, prompt and seed. So what one engine has begun another
goes on with behind the tokens that were said, if its fingerprint is the same: it is the very text it would
have been; no token comes twice, none is lost. Under multi-step sampling only the law would hold, and such an
answer ends with the reason.

An engine says which works it is busy with before it is; those it was busy with when it died may be why. Once
a work was there at two deaths, with no token between, it is a suspect. A suspect goes to an engine without
other works, where one runs or is being started, and an engine with a suspect gets its works one by one, each
when those before it have a token of it: the third death tells whose fault it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from specinfer.request import Delta
from specinfer.serve.backend.work import BackendError, UnavailableError, Work

_MOST_DEATHS: Final = 3  # while the engine was busy with a work, without a token between: it is the cause


@dataclass(eq=False)
class Waiter:
    """Whoever waits for some works, and what they have not read yet."""

    pending: dict[str, list[Delta]] = field(default_factory=dict)  # by the work's id
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    failure: BackendError | None = None
    begun: bool = False  # whether the first step of one of them has begun

    def put(self, delta: Delta) -> None:
        """Hand over a delta."""
        self.pending.setdefault(delta.id, []).append(delta)
        self.begun = self.begun or delta.begun or not delta.is_empty
        self.arrived.set()

    def fail(self, failure: BackendError) -> None:
        """End all of it."""
        self.failure = failure
        self.arrived.set()


@dataclass(eq=False)
class OpenWork:
    """A work that has not ended."""

    work: Work
    waiter: Waiter
    key: int = 0  # its place on the ring of replicas
    said: list[int] = field(default_factory=list)  # the output tokens so far
    maker: str | None = None  # the fingerprint of the engines that said them
    deaths: int = 0  # of engines that were busy with it, since its last token
    replica: int | None = None  # which has it; None while it waits for one
    sent: bool = False  # to the engine of this replica
    silent: bool = True  # this engine has said nothing of it

    @property
    def rest(self) -> Work:
        """What is left of the work, for an engine that has not begun it."""
        return replace(self.work, said=tuple(self.said))

    @property
    def is_suspect(self) -> bool:
        """Whether one more death would end it."""
        return self.deaths == _MOST_DEATHS - 1


class Ledger:
    """All open works; `verifier` is the rule of those that name none. Belongs to one event loop."""

    def __init__(self, verifier: str) -> None:
        self._verifier = verifier
        self._works: dict[str, OpenWork] = {}  # by the work's id, in the order in which they came
        self._loads: dict[int, int] = {}
        self._holding: set[int] = set()  # replicas with works that are not sent
        self.handed_on = 0  # how often a work that an engine had went to another one

    def __len__(self) -> int:
        return len(self._works)

    def __contains__(self, name: str) -> bool:
        return name in self._works

    def add(self, one: OpenWork) -> None:
        """A work begins, which no replica has."""
        self._works[one.work.id] = one

    def end(self, names: Iterable[str]) -> dict[int, list[str]]:
        """Nobody waits for these any more; returns those that replicas' engines have, by replica."""
        told: dict[int, list[str]] = {}
        for name in names:
            if (one := self._works.pop(name, None)) is not None:
                if one.replica is not None:
                    told.setdefault(one.replica, []).extend([name] * one.sent)
                self._part(one)
        return told

    def load(self, replica: int) -> int:
        """How many works a replica has."""
        return self._loads.get(replica, 0)

    def suspects(self, replica: int) -> int:
        """How many of them are suspects."""
        return sum(one.is_suspect for one in self.of(replica))

    def of(self, replica: int | None) -> list[OpenWork]:
        """The works of a replica, or, of None, those that wait for one."""
        return [one for one in self._works.values() if one.replica == replica]

    def assign(self, one: OpenWork, replica: int) -> None:
        """Give a work to a replica, which is sent it when it is due."""
        self.handed_on += one.sent
        self._part(one)
        one.replica, one.sent, one.silent = replica, False, True
        self._loads[replica] = self.load(replica) + 1
        self._holding.add(replica)

    def _part(self, one: OpenWork) -> None:
        if one.replica is not None:
            self._loads[one.replica] -= 1
            one.replica = None

    def due(self, replica: int) -> list[Work]:
        """What a replica's engine is to be sent now."""
        if replica not in self._holding:
            return []
        works = self.of(replica)
        due = held = [one for one in works if not one.sent]
        if self.suspects(replica):
            # Nobody is beside a suspect who may be why its engine dies.
            due = [] if any(one.sent and one.silent for one in works) else held[:1]
        for one in due:
            one.sent = True
        if len(due) == len(held):
            self._holding.discard(replica)
        return [one.rest for one in due]

    def hear(self, replica: int, fingerprint: str, deltas: Iterable[Delta]) -> None:
        """What the engine of a replica, with this fingerprint, has said."""
        for delta in deltas:
            one = self._works.get(delta.id)
            if one is None or one.replica != replica:
                continue  # nobody waits for it any more, or another replica has it by now
            if delta.finish_reason is not None:
                del self._works[delta.id]
                self._part(one)
            elif delta.token_ids:
                one.said.extend(delta.token_ids)
                one.maker, one.deaths, one.silent = fingerprint, 0, False
                if delta.prompt_logprobs is not None:  # another engine need not compute them again
                    one.work = replace(one.work, params=replace(one.work.params, prompt_logprobs=None))
            one.waiter.put(delta)

    def lost(self, replica: int, busy: frozenset[str] | None) -> None:
        """The engine of a replica died while it was `busy` with works; None: it had not said with which.

        Its works wait for a replica again, but for those that end with it.
        """
        for one in self.of(replica):
            one.deaths += one.sent and (busy is None or one.work.id in busy)
            self._part(one)
            if one.deaths >= _MOST_DEATHS:
                self.give_up(one, f"the engine died {one.deaths} times in a row while it had this request")
            elif not self.may_move(one):
                self.give_up(one, "the engine died; under mss a text that has begun cannot go on as it was")

    def may_move(self, one: OpenWork) -> bool:
        """Whether another engine with the same fingerprint makes the very text that this work has begun."""
        params = one.work.params
        verifier = params.speculation.verifier or self._verifier
        return not one.said or params.greedy or verifier == "coupled"

    def give_up(self, one: OpenWork, reason: str) -> None:
        """End an answer with BackendError, which says why."""
        self.end([one.work.id])
        one.waiter.fail(BackendError(reason))

    def cut(self, reason: str) -> int:
        """End all answers with UnavailableError, which says why; returns how many there were.

        They stay until whoever waits for them is gone.
        """
        for one in self._works.values():
            one.waiter.fail(UnavailableError(reason))
        return len(self._works)
