"""PooledModel: one model of a ModelPool, its state and the memory that it needs."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Final, Literal

from specinfer.config import EngineConfig
from specinfer.errors import UserError
from specinfer.hub.known_drafts import local_drafts
from specinfer.hub.model_files import ModelFiles
from specinfer.hub.resolution import resolve
from specinfer.serve.api.service import Service
from specinfer.serve.config import ServedModel
from specinfer.serve.observe.metrics import Metrics
from specinfer.speculation_config import AUTO, OWN_HEAD, SELF

CACHES: Final = 1 << 29  # bytes for KV caches if `kv_cache_memory` is not given
_CODE: Final = 1 << 29  # bytes of an engine process besides weights and caches


@dataclass(eq=False, slots=True)
class PooledModel:
    """One model of a pool, which alone changes its attributes."""

    served: ServedModel
    metrics: Metrics
    service: Service | None = None  # None: it is not loaded
    failure: str = ""  # reason that its last start failed
    failures: int = 0  # starts in a row that failed
    retry_at: float = 0.0  # time from which it may start again
    opened: AsyncExitStack = field(default_factory=AsyncExitStack)  # closes the service
    size: int = 0  # bytes of its engine with full caches
    took: int = 0  # `size` when it was last loaded
    leaving: bool = False  # gets no new requests, and is unloaded after its open answers
    users: int = 0  # requests that have its service
    used_at: float = 0.0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: list[asyncio.Future[None]] = field(default_factory=list)  # requests; a result is a use
    loading: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Its names, the default first, and those of its adapters."""
        return (*self.served.names, *self.served.engine.adapters)

    @property
    def is_loaded(self) -> bool:
        """True if it takes requests at once."""
        return self.service is not None and not self.leaving

    @property
    def status(self) -> Literal["loaded", "loading", "unloaded"]:
        """Its state in /v1/models."""
        if self.is_loaded:
            return "loaded"
        return "unloaded" if self.loading is None or self.loading.done() else "loading"

    @property
    def is_awaited(self) -> bool:
        """True if a client that has not left waits for it."""
        return any(not ticket.done() for ticket in self.waiting)

    def begin_use(self) -> None:
        """Count a request that gets the service."""
        self.users, self.used_at = self.users + 1, time.monotonic()
        if self.expiry is not None:
            self.expiry.cancel()


def needed_bytes(engine: EngineConfig, files: ModelFiles) -> int:
    """Return about the bytes that an engine takes: its weights as in their files, its caches and its code."""
    weights = target = _size(files)
    for draft in engine.speculation.drafts:
        if draft == SELF:
            weights += target // 2
        elif draft == AUTO:  # the engine takes the first that fits, if any
            weights += next((one.bytes for one in local_drafts(files)), 0)
        elif draft != OWN_HEAD:
            with suppress(UserError, OSError):  # the engine reports it
                weights += _size(resolve(draft))
    return weights * 5 // 4 + (engine.cache.memory or CACHES) + _CODE


def _size(files: ModelFiles) -> int:
    return sum(path.stat().st_size for path in files.weights)
