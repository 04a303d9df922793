"""ReplicaBackend: generates tokens for the server with one or several engine processes.

a new work            goes to the replica of its session, or of its prompt's prefix (Ring)
an engine dies        another replica with the same fingerprint continues its works, or else the next engine
                      that starts (ledger.py)
engines are replaced  one after another: works move to other replicas, or finish before their engine ends
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from specinfer.config import EngineConfig
from specinfer.engine.steps import combined
from specinfer.kernels.machine import usable_cores
from specinfer.request import Delta
from specinfer.serve.backend.engine_child import EngineChild
from specinfer.serve.backend.ledger import Ledger, OpenWork, Waiter
from specinfer.serve.backend.replica import Replica
from specinfer.serve.backend.work import BackendError, EngineInfo, Health, UnavailableError, Work

_LOG = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 0.05  # between two polls of a replica's state
_POSITIONS: Final = 64  # per replica on the ring
_PREFIX: Final = 64  # prompt tokens in the key, four KV blocks; later chat turns share them
_MAX_LOAD: Final = 1.5  # times the mean load


class ReplicaBackend:
    """Generates tokens with `count` engines of this config, on this host or on `child`'s cluster.

    All methods belong to one event loop. `start` returns when the first engine takes work; the others start
    one after another. `close` ends all. The first engine uses the process `child` if given. `log` is the
    level and the format of the engines' logs. A request whose first step has not begun after `max_wait`
    seconds fails, and an engine that does not reply for `timeout` seconds is killed; 0 disables either limit.
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
        self._starting: asyncio.Task[None] | None = None  # of the engines after the first
        self._rolling: asyncio.Task[None] | None = None
        self._closed = False
        self._replicas = [
            Replica(
                config if cluster is not None else _share_of(config, number, count),
                number,
                count,
                log,
                on_deltas=self._receive,
                on_lost=self._lost,
                on_change=self._changed,
                child=None if number else child,
                cluster=cluster,
                timeout=timeout,
            )
            for number in range(count)
        ]

    async def start(self) -> EngineInfo:
        """Start the first engine and wait for it; the others start in the background.

        Raises UserError with the engine's message if it cannot serve the config, BackendError if it dies.
        """
        first, *others = self._replicas
        facts = await first.start()
        self._starting = asyncio.create_task(self._start(others))
        return facts

    async def _start(self, replicas: Sequence[Replica]) -> None:
        """Start replicas one after another: each reuses the files and measurements of the one before it."""
        for one in replicas:
            one.begin()
            await self._settled(one)

    async def close(self) -> None:
        """End the engine processes; open works fail."""
        self._closed = True
        tasks = [one for one in (self._starting, self._rolling) if one is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._ledger.fail_all("the server is closing")
        await asyncio.gather(*(one.close() for one in self._replicas))

    def cut(self, reason: str) -> int:
        """Fail all open works with an UnavailableError that has this reason; returns their number."""
        return self._ledger.fail_all(reason)

    async def generate(self, works: Sequence[Work], session: str = "") -> AsyncGenerator[Delta]:
        """Yield the deltas of these works as they arrive; the last of each work has a finish reason.

        Works of one session go to one replica. Two deltas of a work are empty: one when it is admitted, and
        one when its first step begins. Deltas of one work that a slow consumer has not read are joined.
        Closing the generator aborts unfinished works. Raises BackendError if a work cannot continue.
        """
        if self._closed:
            raise BackendError("the server is closing")
        waiter = Waiter()
        left = {work.id for work in works}
        for work in works:
            self._ledger.add(OpenWork(work, waiter, session))
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
            if left:
                self.abort(left)

    def _expire(self, waiter: Waiter) -> None:
        if not waiter.started:
            waiter.fail(
                UnavailableError(
                    f"the request has waited for {self._max_wait:g} seconds (--max-wait) and has not "
                    "started; try again later"
                )
            )

    def abort(self, ids: Iterable[str]) -> None:
        """Abort works before the next step; their generators get no more deltas."""
        for number, names in self._ledger.end(ids).items():
            if names:
                self._replicas[number].send("abort", names)
            self._send_due(self._replicas[number])

    async def health(self) -> Health:
        """Current health of all replicas, returned within a second even if engines hang."""
        found = await asyncio.gather(*(one.health() for one in self._replicas))
        state = combined([one.state for one in found])
        state = replace(state, waiting=state.waiting + len(self._ledger.of(None)))
        return Health(
            state,
            sum(one.restarts for one in found),
            "" if any(one.takes_work for one in found) else "; ".join(one.trouble for one in found),
            tuple(found),
            self._ledger.handed_on,
        )

    def begin_roll(self) -> None:
        """Start `roll` in the background; no effect while one is in progress."""
        if self._rolling is not None and not self._rolling.done():
            _LOG.warning("the engines are already being replaced")
            return
        self._rolling = asyncio.create_task(self.roll())

    async def roll(self) -> None:
        """Replace all engines, one after another, while the other engines continue its works.

        Works that no other engine may continue finish before their engine ends. New engines load the code and
        the model that are now on the disk. If one cannot be started, the remaining engines stay.
        """
        for one in self._replicas:
            others = [other for other in self._replicas if other is not one]
            for other in others:
                await self._settled(other)
            if others and not any(other.serves for other in others):
                _LOG.error("%s is not replaced: no other replica can serve meanwhile", one.name)
                return
            await self._replace(one)
            if not one.runs:
                _LOG.error("the remaining engines are not replaced: %s", one.trouble)
                return
        _LOG.info("all engines have been replaced")

    async def _replace(self, one: Replica) -> None:
        """Replace a replica's engine; returns when the next one runs or its starts have failed."""
        if (pid := one.pid) is not None:
            one.draining = True
            _LOG.info("%s is being replaced; it has %d answers", one.name, self._ledger.load(one.number))
            self._hand_on(one)
            await _until(lambda: not self._ledger.load(one.number) or one.pid != pid)
            if one.pid == pid:
                await one.renew()
            one.draining = False
            self._place_waiting()  # if the engine died while it drained, the next one may already run
        await self._settled(one)

    async def _settled(self, one: Replica) -> None:
        """Wait until a replica's engine runs or 3 starts have failed."""
        await _until(lambda: one.runs or one.is_left_out)

    def _hand_on(self, one: Replica) -> None:
        """Move a draining replica's works to other replicas if these may continue them."""
        aborted: list[str] = []
        for open_work in self._ledger.of(one.number):
            if not self._ledger.may_move(open_work):
                continue
            if (other := self._choose(open_work)) is not None:
                aborted += [open_work.work.id] * open_work.sent
                self._ledger.assign(open_work, other.number)
        if aborted:
            one.send("abort", aborted)
        for other in self._replicas:
            self._send_due(other)

    def _choose(self, one: OpenWork) -> Replica | None:
        """Replica for a work; None if the work has to wait."""
        may = [r for r in self._replicas if r.serves and one.maker in (None, r.facts.fingerprint)]
        if len(self._replicas) == 1:
            return may[0] if may else None
        # Caches may differ in size. A work that is too long for all goes to the largest, which refuses it.
        most = max((r.facts.max_length for r in self._replicas if not r.is_left_out), default=0)
        length = min(len(one.work.prompt_token_ids) + one.work.params.max_tokens, most)
        may = [r for r in may if r.facts.max_length >= min(length, r.facts.max_context)]
        loads: dict[int, int] = {}
        apart: dict[int, int] = {}  # loads of those that keep suspects and other works apart
        for replica in may:
            works = self._ledger.of(replica.number)
            loads[replica.number] = len(works)
            if all(other.is_suspect == one.is_suspect for other in works):
                apart[replica.number] = len(works)
        # A suspect waits for an engine without other works, so that a crash affects only one.
        if not loads or (one.is_suspect and not apart and not self._are_settled):
            return None
        loads = apart or loads
        if one.is_suspect:
            return self._replicas[min(loads, key=loads.__getitem__)]
        return self._replicas[self._ring.choose(key_of(one.session, one.work), loads)]

    @property
    def _are_settled(self) -> bool:
        """True if each replica's engine runs or has failed to start 3 times."""
        return all(one.runs or one.is_left_out for one in self._replicas)

    def _place_waiting(self) -> None:
        """Assign waiting works to replicas, suspects first."""
        for one in sorted(self._ledger.of(None), key=lambda one: not one.is_suspect):
            replica = self._choose(one)
            if replica is not None:
                self._ledger.assign(one, replica.number)
        for replica in self._replicas:
            self._send_due(replica)

    def _send_due(self, replica: Replica) -> None:
        if replica.runs and (works := self._ledger.take_sendable(replica.number)):
            replica.send("add", works)

    def _receive(self, replica: Replica, deltas: Sequence[Delta]) -> None:
        """Record deltas of an engine, and send works that have become due."""
        self._ledger.receive(replica.number, replica.facts.fingerprint, deltas)
        self._send_due(replica)

    def _lost(self, replica: Replica, busy: frozenset[str] | None) -> None:
        """Move the works of an engine that died."""
        had = self._ledger.load(replica.number)
        self._ledger.engine_died(replica.number, busy)
        self._place_waiting()
        if len(self._replicas) == 1:
            _LOG.error("%s; %d answers wait for it", replica.trouble, had)
        else:
            waiting = len(self._ledger.of(None))
            _LOG.error("%s; it had %d answers, and %d wait for an engine", replica.trouble, had, waiting)

    def _changed(self, replica: Replica) -> None:
        """Place waiting works after an engine has started, or has failed to start."""
        if replica.runs:
            waiting = len(self._ledger.of(None))
            _LOG.info("%s takes work; %d answers wait for an engine", replica.name, waiting)
        self._place_waiting()
        if self._are_settled and not any(one.draining for one in self._replicas):
            self._give_up_waiting()

    def _give_up_waiting(self) -> None:
        """Fail works that no running engine may have, once no engine is starting."""
        if any(one.runs for one in self._replicas):
            reason = (
                "the engine died, and the engines that run now have another model, kernels or code, or less "
                "memory: they cannot continue a text that has started"
            )
        else:
            reason = "; ".join(one.trouble for one in self._replicas)
        for one in self._ledger.of(None):
            self._ledger.give_up(one, reason)


def _share_of(config: EngineConfig, number: int, count: int) -> EngineConfig:
    """Config of engine `number` of `count`, with its share of the cores, divided among its ranks."""
    if count == 1 or config.threads is not None:
        return config
    cores = usable_cores()
    share = (number + 1) * cores // count - number * cores // count
    return replace(config, threads=max(1, share // config.ranks_here))


async def _until(holds: Callable[[], bool]) -> None:
    """Poll `holds` until it returns true."""
    while not holds():
        await asyncio.sleep(_LOOK_SECONDS)


def key_of(session: str, work: Work) -> int:
    """Position on the ring, from the session's name if given, else from the prompt's prefix and its cache."""
    if session:
        return _hash(b"session " + session.encode("utf-8", "surrogatepass"))
    prefix = " ".join(map(str, work.prompt_token_ids[:_PREFIX]))  # unchecked token ids may have any size
    cache = f"{work.adapter or ''} {work.params.cache_salt or ''}"  # other ones share no prefixes
    return _hash(f"prompt {cache} {prefix}".encode("utf-8", "surrogatepass"))


class Ring:
    """Consistent hashing of sessions and prompt prefixes to replicas, numbered from 0, with bounded loads.

    Each replica has 64 positions on a ring of hashes, and each session has one. A session belongs to the
    first replica after its position, whose cache then holds its earlier turns. While a replica is down, its
    sessions belong to the next replicas on the ring and all others stay; when it is up again, its sessions
    return.
    """

    def __init__(self, replicas: int) -> None:
        self._positions = sorted(
            (_hash(f"{one} at {n}".encode()), one) for one in range(replicas) for n in range(_POSITIONS)
        )

    def choose(self, key: int, loads: Mapping[int, int]) -> int:
        """First replica after `key` that has room for one more work.

        `loads` maps each candidate to its number of works; it may not be empty. With the new work included,
        no replica may have more than 1.5 times the candidates' mean load, rounded up.
        """
        max_load = math.ceil(_MAX_LOAD * (sum(loads.values()) + 1) / len(loads))
        after = bisect_left(self._positions, (key, -1))
        order = chain(self._positions[after:], self._positions[:after])
        return next(one for _, one in order if loads.get(one, max_load) < max_load)


def _hash(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())
