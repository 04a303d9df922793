"""ReplicaBackend: makes tokens for the server with engines in processes of their own, one or several.

a work comes       -> the replica of its session, or of what its prompt begins like (routing.py)
its engine dies    -> another replica with the same fingerprint goes on with it at once, else the next
                      engine that is started (ledger.py)
an engine is old   -> its works go to other replicas, or end where they are, and another one is started
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from specinfer.config import EngineConfig
from specinfer.engine.steps import together
from specinfer.kernels.machine import usable_cores
from specinfer.request import Delta
from specinfer.serve.backend.engine_child import EngineChild
from specinfer.serve.backend.ledger import Ledger, OpenWork, Waiter
from specinfer.serve.backend.replica import Replica
from specinfer.serve.backend.routing import Ring, key_of
from specinfer.serve.backend.work import BackendError, EngineInfo, Health, UnavailableError, Work

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 0.05  # between two looks at whether a replica has come so far


class ReplicaBackend:
    """Makes tokens with `count` engines of this config, in processes of this host or on `child`'s cluster.

    All methods belong to one event loop. `start` returns when the first engine takes work, and the others are
    started one after another; `close` ends all. The first engine is that of `child`, where one is given;
    `log` is the level and the form of engines' logs. Requests of which nothing has been computed after
    `max_wait` seconds fail, and an engine that gives no sign of life for `timeout` seconds is killed; 0 is
    never, of both.
    """

    def __init__(
        self,
        config: EngineConfig,
        count: int = 1,
        log: tuple[str, str] = ("info", "text"),
        child: EngineChild | None = None,
        *,
        max_wait: float = 0.0,
        timeout: float = 0.0,
    ) -> None:
        cluster = None if child is None else child.cluster
        self._max_wait = max_wait
        self._ledger = Ledger(config.speculation.verifier)
        self._ring = Ring(count)
        self._tasks: set[asyncio.Task[None]] = set()  # those that have not ended
        self._rolling: asyncio.Task[None] | None = None
        self._closed = False
        self._replicas = [
            Replica(
                config if cluster is not None else _share_of(config, number, count),
                number,
                count,
                log,
                on_deltas=self._hear,
                on_lost=self._lost,
                on_change=self._changed,
                child=None if number else child,
                cluster=cluster,
                timeout=timeout,
            )
            for number in range(count)
        ]

    async def start(self) -> EngineInfo:
        """Start the first engine, and begin with the others.

        Raises UserError with the engine's own words where it cannot start, BackendError where it dies.
        """
        first, *others = self._replicas
        facts = await first.start()
        self._begin(self._start(others))
        return facts

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self, replicas: Sequence[Replica]) -> None:
        """One after another: what the first prepares and measures is there for the next."""
        for one in replicas:
            one.begin()
            await self._settled(one)

    async def close(self) -> None:
        """End the engine processes; answers in progress fail."""
        self._closed = True
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ledger.cut("the server is closing")
        await asyncio.gather(*(one.close() for one in self._replicas))

    def cut(self, reason: str) -> int:
        """End all answers with UnavailableError, which says why; returns how many there were."""
        return self._ledger.cut(reason)

    @property
    def pids(self) -> list[int | None]:
        """The process ids of the replicas' engines; None while one starts."""
        return [one.pid for one in self._replicas]

    async def generate(self, works: Sequence[Work], session: str = "") -> AsyncGenerator[Delta]:
        """The deltas of these works as they come, each one's last with a finish reason.

        Works of one session go to one replica. Some deltas say nothing: the first, when the work is admitted,
        and one when its first step begins. Of a waiter that is slow, deltas of one work are put together. A
        generator that is closed aborts what is left. Raises BackendError when an answer cannot go on.
        """
        if self._closed:
            raise BackendError("the server is closing")
        waiter = Waiter()
        left = {work.id for work in works}
        for work in works:
            salt = work.params.cache_salt
            if work.adapter is not None:  # whose prefixes are its own
                salt = f"{work.adapter} {salt or ''}"
            key = key_of(session, work.prompt_token_ids, salt)
            self._ledger.add(OpenWork(work, waiter, key))
        self._place_waiting()
        timer = None
        if self._max_wait:
            timer = asyncio.get_running_loop().call_later(self._max_wait, self._expire, waiter)
        try:
            while left:
                await waiter.arrived.wait()
                if waiter.failure and not waiter.pending:
                    raise waiter.failure
                pending, waiter.pending = waiter.pending, {}
                if not waiter.failure:
                    waiter.arrived.clear()
                for deltas in pending.values():
                    delta = Delta.joined(deltas)
                    if delta.finish_reason is not None:
                        left.discard(delta.id)
                    yield delta
        finally:
            if timer is not None:
                timer.cancel()
            self.abort(left)

    def _expire(self, waiter: Waiter) -> None:
        if not waiter.begun:
            waiter.fail(
                UnavailableError(
                    f"the request has waited for {self._max_wait:g} seconds, --max-wait, and others are "
                    "still before it; come again"
                )
            )

    def abort(self, ids: Iterable[str]) -> None:
        """End these works before the next step; nobody hears of them again."""
        for number, names in self._ledger.end(ids).items():
            if names:
                self._replicas[number].abort(names)
            self._send_due(self._replicas[number])

    async def health(self) -> Health:
        """How the engines are now; answers within a second, whatever happened to them."""
        found = await asyncio.gather(*(one.health() for one in self._replicas))
        state = together([one.state for one in found])
        state = replace(state, waiting=state.waiting + len(self._ledger.of(None)))
        is_mute = not any(one.answers for one in found) and any(one.runs for one in found)
        return Health(
            None if is_mute else state,
            sum(one.restarts for one in found),
            "" if any(not one.trouble for one in found) else "; ".join(one.trouble for one in found),
            tuple(found),
            self._ledger.handed_on,
        )

    def begin_roll(self) -> None:
        """Begin to replace all engines, one after another; nothing more where that is in progress."""
        if self._rolling is not None and not self._rolling.done():
            _LOG.warning("engines are being replaced already")
            return
        self._rolling = self._begin(self.roll())

    async def roll(self) -> None:
        """Replace all engines, one after another, while the others go on with its works.

        Works that no other engine may go on with end where they are before their engine does. New engines are
        of the code and the model as they lie on the disk now. Where one cannot be started, the rest stay.
        """
        for one in self._replicas:
            others = [other for other in self._replicas if other is not one]
            for other in others:
                await self._settled(other)
            if others and not any(other.serves for other in others):
                _LOG.error("%s is not replaced: no other replica serves meanwhile", one.name)
                return
            await self._replace(one)
            if not one.runs:
                _LOG.error("no more engines are replaced: %s", one.trouble)
                return
        _LOG.info("all engines were replaced")

    async def _replace(self, one: Replica) -> None:
        """Replace the engine of a replica; returns when the next one runs, or could not be started."""
        if (pid := one.pid) is not None:
            one.draining = True
            _LOG.info("%s is to be replaced; it has %d answers", one.name, self._ledger.load(one.number))
            self._hand_on(one)
            await _until(lambda: not self._ledger.load(one.number) or one.pid != pid)
            if one.pid == pid:
                await one.renew()
            one.draining = False
            self._place_waiting()  # where it died meanwhile, the next engine may run by now
        await self._settled(one)

    async def _settled(self, one: Replica) -> None:
        """Return when an engine of a replica runs, or it is known that none will soon."""
        await _until(lambda: one.runs or one.is_left_out)

    def _hand_on(self, one: Replica) -> None:
        """Move the works of a replica that drains, as far as others may have them."""
        gone: list[str] = []
        for open_work in self._ledger.of(one.number):
            if not self._ledger.may_move(open_work):
                continue
            if (other := self._choose(open_work)) is not None:
                gone += [open_work.work.id] * open_work.sent
                self._ledger.assign(open_work, other.number)
        if gone:
            one.abort(gone)
        for other in self._replicas:
            self._send_due(other)

    def _choose(self, one: OpenWork) -> Replica | None:
        """The replica for a work; None where none may have it now."""
        may = [r for r in self._replicas if r.serves and one.maker in (None, r.fingerprint)]
        # Caches need not be equally large; the largest refuses what is too long for all.
        most = max((r.longest for r in self._replicas if not r.is_left_out), default=0)
        may = [r for r in may if r.longest >= min(_length(one.work, r.facts), most)]
        loads = {r.number: self._ledger.load(r.number) for r in may}
        suspects = {r.number: self._ledger.suspects(r.number) for r in may}
        if one.is_suspect:
            # It waits for an engine without others, that they are safe from it, and it from them.
            alone = {number: load for number, load in loads.items() if load == suspects[number]}
            if not alone and not self._are_settled:
                return None
            loads = alone or loads
            number = min(loads, key=loads.__getitem__, default=None)
        else:
            loads = {number: load for number, load in loads.items() if not suspects[number]} or loads
            number = self._ring.choose(one.key, loads) if loads else None
        return None if number is None else self._replicas[number]

    @property
    def _are_settled(self) -> bool:
        """Whether no engine is being started that would be waited for."""
        return all(one.runs or one.is_left_out for one in self._replicas)

    def _place_waiting(self) -> None:
        """Give works that wait to replicas."""
        for one in sorted(self._ledger.of(None), key=lambda one: not one.is_suspect):
            replica = self._choose(one)
            if replica is not None:
                self._ledger.assign(one, replica.number)
        for replica in self._replicas:
            self._send_due(replica)

    def _send_due(self, replica: Replica) -> None:
        if replica.runs and (works := self._ledger.due(replica.number)):
            replica.add(works)

    def _hear(self, replica: Replica, deltas: Sequence[Delta]) -> None:
        """An engine has said something."""
        self._ledger.hear(replica.number, replica.fingerprint, deltas)
        self._send_due(replica)

    def _lost(self, replica: Replica, busy: frozenset[str] | None) -> None:
        """An engine died."""
        had = self._ledger.load(replica.number)
        self._ledger.lost(replica.number, busy)
        self._place_waiting()
        if len(self._replicas) == 1:
            _LOG.error("%s; %d answers wait for it", replica.trouble, had)
        else:
            waiting = len(self._ledger.of(None))
            _LOG.error("%s; it had %d answers, and %d wait for an engine", replica.trouble, had, waiting)

    def _changed(self, replica: Replica) -> None:
        """An engine takes work, or could not be started."""
        if replica.runs:
            waiting = len(self._ledger.of(None))
            _LOG.info("%s takes work; %d answers wait for an engine", replica.name, waiting)
        self._place_waiting()
        if self._are_settled and not any(one.draining for one in self._replicas):
            self._give_up_waiting()

    def _give_up_waiting(self) -> None:
        """End what no engine that runs may have; none will come soon."""
        if any(one.runs for one in self._replicas):
            reason = (
                "the engine died, and those that run now have another model, kernels or code, or less "
                "memory: a text that has begun cannot go on as it was"
            )
        else:
            reason = "; ".join(one.trouble for one in self._replicas)
        for one in self._ledger.of(None):
            self._ledger.give_up(one, reason)


def _length(work: Work, facts: EngineInfo | None) -> int:
    """The cache positions that a work may need."""
    most = len(work.prompt_token_ids) + work.params.max_tokens
    return most if facts is None else min(most, facts.max_context)


def _share_of(config: EngineConfig, number: int, count: int) -> EngineConfig:
    """The config of one of several engines: its threads are its share of the cores, a part for each rank."""
    if count == 1 or config.threads is not None:
        return config
    cores = usable_cores()
    share = (number + 1) * cores // count - number * cores // count
    return replace(config, threads=max(1, share // config.ranks_here))


async def _until(holds: Callable[[], bool]) -> None:
    """Return when it holds; it is looked at again and again."""
    while not holds():
        await asyncio.sleep(_LOOK_SECONDS)
